"""How an operator runs: by its reference or its Triton kernel, in which blocks and with which products.

On an accelerator the kernel runs, elsewhere the reference. A reference checks all arguments. A launcher trusts what a
model fixes (extents, dtypes) and checks what changes from batch to batch and would be read past its end: the rows of
tokens, chunk states and initial states. What it finds amiss it leaves to the reference's check to name. Under
`TRITON_INTERPRET=1` kernels can be called on a CPU, which is how they are tested there. This module needs no Triton;
what kernels share is `tile.py`.

Layers of a batch launch a kernel with other tensors and nothing else new. Triton finds the compilation of each launch
anew, and an operator what it is launched with, which takes most of a launch's time on the host; a `Launcher` keeps both
from a batch's first layer for all others.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from importlib import import_module
from typing import Any, Final, NamedTuple, ParamSpec

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


_ALIGNMENT_BYTES: Final = 16
"""A kernel is compiled for pointers at multiples of so many bytes, or for any."""
_LAUNCHABLE_VERSIONS: Final = ((3, 6), (3, 8))
"""The first and last Triton whose `CompiledKernel[grid]` was read: it takes all of a kernel's arguments in order."""


_Layout = tuple[torch.dtype, torch.Size, tuple[int, ...], int]
"""A tensor's dtype, shape and strides, and the bytes that it lies behind the alignment."""


class _Bound(NamedTuple):
    """A compilation, and what a launch must have alike to be one of it."""

    compiled: Any
    """A `CompiledKernel`."""
    alike: tuple[Any, ...]
    """The device, the dtypes and alignments of tensors, and the values of all else."""


class _Repeatable(NamedTuple):
    """A launch that the next layer of its batch repeats with tensors of its own."""

    batch: object
    layouts: list[_Layout | None]
    """Of its tensors; None for an absent one."""
    card: int | None
    """The CUDA device that must be current; None without one."""
    run: Callable[..., object]
    """A `CompiledKernel` with its grid."""
    behind: tuple[Any, ...]
    """The arguments behind the tensors."""


class Launcher:
    """Launches of a Triton kernel whose parameters are tensors, the vectors of spans, numbers and constants, in order.

    A launch like the one before runs its compilation without asking Triton, whose binder looks at every argument.
    Alike are the device, the tensors' dtypes and alignments, and the values of all else: no less than what Triton
    compiles for. Vectors of spans are int64 and compiled for any alignment (`tile.SPANS`). Whatever differs is launched
    by Triton, as is everything in its interpreter and by a version whose compilations were not read.

    An operator makes all else of the batch and of its tensors' layouts. So a layer first tries to `repeat` the launch
    of the layer before.
    """

    def __init__(self, kernel: Any, **options: Any) -> None:
        """Launch `kernel`, a `triton.jit` function, with Triton's own `options`."""
        self._kernel = kernel
        self._options = options
        self._bound: _Bound | None = None
        self._repeatable: _Repeatable | None = None

    def repeat(self, batch: object, *tensors: Tensor | None) -> bool:
        """Launch with `tensors` and all else as last time; False if the batch or a layout is another."""
        last = self._repeatable
        if last is None or last.batch != batch or _layouts(tensors) != last.layouts:
            return False
        if last.card is not None and last.card != torch.cuda.current_device():
            return False
        last.run(*tensors, *last.behind)
        return True

    def __call__(
        self,
        batch: object,
        grid: tuple[int, ...],
        tensors: Sequence[Tensor | None],
        spans: Sequence[Tensor],
        rest: tuple[Any, ...],
        **constants: Any,
    ) -> None:
        """Launch on the device of the last of `tensors`, the pool; `rest` are strides and extents.

        `grid`, `spans`, `rest` and `constants` are functions of `batch` and of the layouts of `tensors`.
        """
        last, pool = self._bound, tensors[-1]
        assert pool is not None, "every operator writes to a pool"
        layouts, device = _layouts(tensors), pool.device
        alike = device, [each and (each[0], each[-1]) for each in layouts], rest, constants
        behind = (*spans, *rest, *(constants[name] for name in self._kernel.arg_names[-len(constants) :]))
        grid_3d = (*grid, 1, 1)[:3]
        self._bound = self._repeatable = None
        with on_device_of(pool):
            if last is not None and last.alike == alike:
                compiled = last.compiled
                compiled[grid_3d](*tensors, *behind)
            else:
                compiled = self._kernel[grid](*tensors, *spans, *rest, **constants, **self._options)
        if is_launchable(compiled):
            self._bound = _Bound(compiled, alike)
            card = device.index if pool.is_cuda else None
            self._repeatable = _Repeatable(batch, layouts, card, compiled[grid_3d], behind)


def _layouts(tensors: Sequence[Tensor | None]) -> list[_Layout | None]:
    return [
        None if each is None else (each.dtype, each.shape, each.stride(), each.data_ptr() % _ALIGNMENT_BYTES)
        for each in tensors
    ]


def is_launchable(compiled: Any) -> bool:
    """Return whether `compiled`, which a launch has returned, can be launched by itself with all of its arguments."""
    kind = _compilations()
    return kind is not None and isinstance(compiled, kind)


@cache
def _compilations() -> type | None:
    """Triton's class of compilations; None where it is not known to be launchable."""
    compiler = import_module("triton.compiler")
    first, last = _LAUNCHABLE_VERSIONS
    version = tuple(map(int, import_module("triton").__version__.split(".")[:2]))
    kind: type | None = getattr(compiler, "CompiledKernel", None)
    return kind if first <= version <= last else None
