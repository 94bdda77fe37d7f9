"""Checks of the tensors that operators take: a ValueError says what they must be, and what was given."""

from collections.abc import Sequence

import torch
from torch import Tensor

INTEGERS = (torch.int32, torch.int64)


def require(
    name: str, tensor: Tensor, *shapes: Sequence[int | str], dtypes: tuple[torch.dtype, ...] | None = None
) -> None:
    """Raise ValueError unless `tensor` has one of `shapes` and one of `dtypes`, any float dtype if absent.

    A word in a shape stands for any extent.
    """
    is_dtype = tensor.is_floating_point() if dtypes is None else tensor.dtype in dtypes
    if is_dtype and any(_fits(tensor.shape, shape) for shape in shapes):
        return
    shape_names = " or ".join(_shown(shape) for shape in shapes)
    dtype_names = "a float dtype" if dtypes is None else " or ".join(_name(dtype) for dtype in dtypes)
    raise ValueError(
        f"{name} must be {shape_names} of {dtype_names}, got {_shown(tensor.shape)} of {_name(tensor.dtype)}"
    )


def require_shared(name: str, tensor: Tensor, num_heads: int) -> None:
    """Raise ValueError unless each head along dimension 1 of `tensor` is shared by as many of `num_heads`."""
    if tensor.shape[1] == 0 or num_heads % tensor.shape[1]:
        raise ValueError(f"dimension 1 of {name} must divide {num_heads} heads, got {tensor.shape[1]}")


def require_one_dtype(**tensors: Tensor) -> None:
    """Raise ValueError unless all `tensors` have the same dtype."""
    dtypes = [tensor.dtype for tensor in tensors.values()]
    if len(set(dtypes)) > 1:
        names, found = (", ".join(each) for each in (tensors, map(_name, dtypes)))
        raise ValueError(f"{names} must have one dtype, got {found}")


def _fits(found: Sequence[int], shape: Sequence[int | str]) -> bool:
    return len(found) == len(shape) and all(
        isinstance(extent, str) or extent == size for extent, size in zip(shape, found, strict=True)
    )


def _shown(shape: Sequence[int | str]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
