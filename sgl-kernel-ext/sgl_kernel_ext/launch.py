"""How the Triton kernels are launched: block sizes, the precision of products, the device.

A kernel is taken where the tensors lie on an accelerator; else the operator's reference is. Under `TRITON_INTERPRET=1`
kernels can be called on a CPU, which is how they are tested there.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

MIN_DOT = 16
"""The least extent of a block that tensor cores multiply."""
MAX_BLOCK = 64
"""The largest extent of a block of a state."""
_MAX_EXACT_BLOCK = 32
"""The same where products are exact: those of 64 by 64 spill thousands of bytes a thread (compiled for sm_90)."""


def runs_kernels(tensor: Tensor) -> bool:
    """Whether operators on `tensor` take their Triton kernel."""
    return tensor.device.type != "cpu"


def block(extent: int, at_most: int | None) -> int:
    """A power of two that covers `extent`, from `MIN_DOT` up to `at_most`."""
    covering = max(MIN_DOT, 1 << max(extent - 1, 0).bit_length())
    return covering if at_most is None else min(covering, at_most)


def dot_precision(*operands: Tensor) -> str:
    """How float32 products are made: exactly where an operand is float32, else on tensor cores."""
    return "ieee" if any(operand.dtype == torch.float32 for operand in operands) else "tf32"


def largest_block(precision: str) -> int:
    """The largest extent of a block of a state whose products have `precision`."""
    return _MAX_EXACT_BLOCK if precision == "ieee" else MAX_BLOCK


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """The device of `tensor` made current: Triton launches on that."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()
