"""How an operator runs: by its reference or its Triton kernel, in which blocks and with which products.

On an accelerator the kernel runs, elsewhere the reference. A reference checks all arguments. A launcher trusts what a
model fixes (extents, dtypes) and checks what changes from batch to batch and would be read past its end: the rows of
tokens, chunk states and initial states. What it finds amiss it leaves to the reference's check to name. Under
`TRITON_INTERPRET=1` kernels can be called on a CPU, which is how they are tested there. This module needs no Triton;
what kernels share is `tile.py`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from importlib import import_module
from typing import Any, NamedTuple, ParamSpec

import torch
from torch import Tensor

MIN_DOT = 16
"""The least extent of a block that tensor cores multiply."""
MAX_BLOCK = 64
"""The largest extent of a block of a state."""
_MAX_EXACT_BLOCK = 32
"""The same where products are exact: those of 64 by 64 spill thousands of bytes a thread (compiled for sm_90)."""

Arguments = ParamSpec("Arguments")


def by_device(reference: Callable[Arguments, None], kernel: str) -> Callable[Arguments, None]:
    """Wrap `reference` to run the function of its name in module `kernel` where its `pool` is on an accelerator.

    `pool` is given by name, or first.
    """

    @wraps(reference)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
        pool: Any = kwargs.get("pool", args[0] if args else None)
        chosen = reference
        if runs_kernels(pool):
            chosen = getattr(_module(kernel), reference.__name__)
        chosen(*args, **kwargs)

    return run


_module = cache(import_module)


def runs_kernels(tensor: Tensor) -> bool:
    """Return whether operators on `tensor` run their Triton kernel."""
    return tensor.device.type != "cpu"


class Tiling(NamedTuple):
    """How a head's state is cut into tiles of `rows` by `columns`, one a program, and their products."""

    grid: tuple[int, int]
    """Tiles along the rows and the columns of a state."""
    rows: int
    columns: int
    largest: int
    """Extent of a block that shares a product with a tile."""
    precision: str


@cache
def tiling(num_rows: int, num_columns: int, *dtypes: torch.dtype) -> Tiling:
    """Cut a head's state (num_rows, num_columns), made by products of operands of `dtypes`, into tiles."""
    precision = dot_precision(*dtypes)
    largest = largest_block(precision)
    rows, columns = block(num_rows, largest), block(num_columns, largest)
    return Tiling((-(-num_rows // rows), -(-num_columns // columns)), rows, columns, largest, precision)


def block(extent: int, at_most: int | None) -> int:
    """Return a power of two that covers `extent`, from `MIN_DOT` up to `at_most`."""
    covering = max(MIN_DOT, 1 << max(extent - 1, 0).bit_length())
    return covering if at_most is None else min(covering, at_most)


def dot_precision(*dtypes: torch.dtype) -> str:
    """Choose how float32 products are made: exactly where an operand is float32, else on tensor cores."""
    return "ieee" if torch.float32 in dtypes else "tf32"


def largest_block(precision: str) -> int:
    """Return the largest extent of a block of a state whose products have `precision`."""
    return _MAX_EXACT_BLOCK if precision == "ieee" else MAX_BLOCK


def num_rows(states: Tensor | None) -> int:
    """Return how many states there are, 0 where they are absent."""
    return 0 if states is None else states.size(0)


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Make the device of `tensor` current: Triton launches on that one."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
