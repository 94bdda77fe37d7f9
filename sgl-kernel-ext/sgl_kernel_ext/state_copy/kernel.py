"""Copies of many states across all layers in one launch.

What is moved are bits: a pool is seen as integers of its elements' size. The dimensions of a state and of the layers
are put in the order of their strides, and those that lie end to end in memory are one, so a state of a contiguous or a
transposed pool is one run a layer. A piece of work is _BLOCK_BYTES of one run. As many programs as fill the chip each
read all slots, leave out the negative ones, and share the pieces of what remains: a call with nothing to copy costs
that one read, a single copy has the bandwidth of the whole chip.

Programs do not wait for each other, so what a slot ends with that is both source and destination is undefined.
"""

from functools import cache
from math import prod
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_kernel_ext import launch
from sgl_kernel_ext.launch import Launcher
from sgl_kernel_ext.state_copy.reference import require_copy

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK_BYTES = 8192
_MAX_SLOTS = 256
"""Copies of one launch. Every program holds as many slots, whatever is copied: one compilation serves all batches, and
256 are two of each for a thread, where 1,024 would be eight in every piece's search. Few batches have more."""
_PROGRAMS_PER_PROCESSOR = 8
_NUM_INTERPRETED = 3
_MAX_RUNS = 3
"""Dimensions over the runs of a state that do not lie end to end."""


def copy(pool: Tensor, source_slots: Tensor, destination_slots: Tensor, *, slot_dim: int = 0) -> None:
    """Run `reference.copy` on an accelerator, with a launch for every 256 copies.

    No slot is a source and the destination of another copy. Raises ValueError for more or fewer sources than
    destinations; for elements that are not 1, 2, 4 or 8 bytes; for more than four dimensions, beside that of the slots,
    that do not lie end to end in memory; and for slots on another device than the pool. Where the slots lie on the host
    it raises too for one outside the pool, one that is a source and another's destination, and two copies to one. On a
    device the first is left out and the others are the caller's word.
    """
    num_copies = source_slots.size(0)
    if not launch.runs_kernels(source_slots) or destination_slots.size(0) != num_copies:
        require_copy(pool, source_slots, destination_slots, slot_dim)
        _require_apart(source_slots, destination_slots)
    if not num_copies or not pool.numel():
        return
    if num_copies <= _MAX_SLOTS:
        _launch(pool, source_slots, destination_slots, slot_dim)
        return
    for start in range(0, num_copies, _MAX_SLOTS):
        part = slice(start, start + _MAX_SLOTS)
        _launch(pool, source_slots[part], destination_slots[part], slot_dim)


def _require_apart(source_slots: Tensor, destination_slots: Tensor) -> None:
    if not source_slots.device.type == destination_slots.device.type == "cpu":
        return
    pairs = [
        (source, destination)
        for source, destination in zip(source_slots.tolist(), destination_slots.tolist(), strict=True)
        if source >= 0 and destination >= 0 and source != destination
    ]
    sources, destinations = {source for source, _ in pairs}, [destination for _, destination in pairs]
    for slot in sorted({slot for slot in destinations if slot in sources or destinations.count(slot) > 1}):
        raise ValueError(f"destination_slots must be slots of their own, got {slot} twice or as a source")


def _launch(pool: Tensor, sources: Tensor, destinations: Tensor, slot_dim: int) -> None:
    device = pool.device
    for slots in (sources, destinations):
        if slots.device != device:
            raise ValueError(f"slots must be on {device}, where the pool is, got {slots.device}")
    layout = _layout(pool.shape, pool.stride(), pool.dtype, slot_dim)
    launcher, num_copies, bits = _launcher(layout), sources.size(0), pool.view(layout.bits)
    if launcher.repeat(slot_dim, sources, destinations, bits):
        return
    launcher(
        slot_dim,
        (min(num_copies * layout.num_pieces, _num_programs(device)),),
        (sources, destinations, bits),
        (),
        (
            sources.stride(0),
            destinations.stride(0),
            pool.stride(slot_dim),
            layout.steps,
            layout.stride,
            num_copies,
            pool.size(slot_dim),
            layout.num_runs,
            layout.sizes,
            layout.length,
        ),
        BN=_MAX_SLOTS,
        BL=layout.block,
    )


class _Layout(NamedTuple):
    """A state in memory: runs of `length` values, `stride` apart, along three dimensions."""

    bits: torch.dtype
    steps: tuple[int, ...]
    """Strides of the runs' dimensions, widest first,"""
    sizes: tuple[int, ...]
    """and the extents of the last two."""
    num_runs: int
    length: int
    stride: int
    block: int
    """Values of a piece."""

    @property
    def num_pieces(self) -> int:
        """How many a state has."""
        return self.num_runs * -(-self.length // self.block)


@cache
def _layout(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, slot_dim: int) -> _Layout:
    """Find how a state of a pool lies in memory: once for each pool of a server."""
    if dtype.itemsize not in _BITS:
        raise ValueError(f"pool must have elements of 1, 2, 4 or 8 bytes, got {dtype}")
    runs = _runs(shape, strides, slot_dim)
    if len(runs) > _MAX_RUNS + 1:
        raise ValueError(
            f"pool must have at most {_MAX_RUNS + 1} dimensions, beside that of the slots, that do not lie end to end "
            f"in memory, got strides {strides} for shape {tuple(shape)}"
        )
    *outer, (length, stride) = ((1, 0),) * (_MAX_RUNS + 1 - len(runs)) + runs
    return _Layout(
        _BITS[dtype.itemsize],
        steps=tuple(step for _, step in outer),
        sizes=tuple(size for size, _ in outer[1:]),
        num_runs=prod(size for size, _ in outer),
        length=length,
        stride=stride,
        block=_BLOCK_BYTES // dtype.itemsize,
    )


@cache
def _launcher(_: _Layout) -> Launcher:
    """A launcher of its own: the pools of a server take turns."""
    return Launcher(_copy_kernel)


@cache
def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _NUM_INTERPRETED
    return _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def _runs(shape: tuple[int, ...], strides: tuple[int, ...], slot_dim: int) -> tuple[tuple[int, int], ...]:
    """List (size, stride) of the dimensions beside the slots', widest first, joined where they lie end to end."""
    dims = [
        (stride, size)
        for dim, (size, stride) in enumerate(zip(shape, strides, strict=True))
        if dim != slot_dim and size != 1
    ]
    dims.sort(reverse=True)
    merged: list[tuple[int, int]] = []
    for stride, size in dims:
        if merged and merged[-1][1] == stride * size:
            merged[-1] = (merged[-1][0] * size, stride)
        else:
            merged.append((size, stride))
    return tuple(merged) or ((1, 1),)


@triton.jit(
    do_not_specialize=("s_sources", "s_destinations", "M"), do_not_specialize_on_alignment=("sources", "destinations")
)
def _copy_kernel(
    sources,
    destinations,
    pool,
    s_sources,
    s_destinations,
    s_slot,
    s_run,
    s_value,
    M,
    N,
    R,
    sizes,
    L,
    BN: tl.constexpr,
    BL: tl.constexpr,
):
    """Copy the pieces of BL values that fall to this program.

    extents  M copies, N slots, R runs of L values a state; `sizes` of the runs' last two dimensions; BN covers M
    strides  s_slot of slots, s_run of the runs' three dimensions, s_value of values
    indices  i_p piece, i_r run, i_src and i_dst slots; o_n copies, o_l values of a run, o_p where they lie in a state
    blocks   b_src and b_dst slots of all copies, b_rank how many are made up to each; m_own the piece's copy
    """
    o_n = tl.arange(0, BN)
    b_src = tl.load(sources + o_n * s_sources, mask=o_n < M, other=-1).to(tl.int64)
    b_dst = tl.load(destinations + o_n * s_destinations, mask=o_n < M, other=-1).to(tl.int64)
    m_copy = (b_src >= 0) & (b_src < N) & (b_dst >= 0) & (b_dst < N) & (b_src != b_dst)
    b_rank = tl.cumsum(m_copy.to(tl.int32), 0)
    num_per_run = tl.cdiv(L, BL)
    num_per_copy = R * num_per_run

    for i_p in range(tl.program_id(0), tl.sum(m_copy.to(tl.int32), 0) * num_per_copy, tl.num_programs(0)):
        m_own = m_copy & (b_rank == i_p // num_per_copy + 1)
        i_src, i_dst = tl.sum(tl.where(m_own, b_src, 0), 0), tl.sum(tl.where(m_own, b_dst, 0), 0)
        i_r = ((i_p % num_per_copy) // num_per_run).to(tl.int64)
        o_l = (i_p % num_per_run).to(tl.int64) * BL + tl.arange(0, BL)
        m_l = o_l < L
        o_p = (
            (i_r // (sizes[0] * sizes[1])) * s_run[0]
            + (i_r // sizes[1] % sizes[0]) * s_run[1]
            + (i_r % sizes[1]) * s_run[2]
            + o_l * s_value
        )
        b = tl.load(pool + i_src * s_slot + o_p, mask=m_l)
        tl.store(pool + i_dst * s_slot + o_p, b, mask=m_l)
