"""Copies of many states across all layers in one launch.

What is moved are bits: a pool is seen as integers of its elements' size. The dimensions of a state and of the layers
are put in the order of their strides, and those that lie end to end in memory are one, so a state of a contiguous or a
transposed pool is one run a layer. A piece of work is _BLOCK_BYTES of one run. As many programs as fill the chip each
read all slots, leave out the negative ones, and share the pieces of what remains: a call with nothing to copy costs
that one read, a single copy has the bandwidth of the whole chip.

Programs do not wait for each other, so what a slot ends with that is both source and destination is undefined.
"""

from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from sgl_kernel_ext.launch import on_device_of
from sgl_kernel_ext.state_copy.reference import require_copy

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK_BYTES = 8192
_MAX_SLOTS = 1024
"""Copies of one launch."""
_PROGRAMS_PER_PROCESSOR = 8
_NUM_INTERPRETED = 3
_MAX_RUNS = 3
"""Dimensions over the runs of a state that do not lie end to end."""


def copy(pool: Tensor, source_slots: Tensor, destination_slots: Tensor, *, slot_dim: int = 0) -> None:
    """Run `reference.copy` on an accelerator, with a launch for every 1024 copies.

    No slot is a source and the destination of another copy. Raises ValueError for that, and for two copies to one slot,
    where the slots lie on the host; for elements that are not 1, 2, 4 or 8 bytes; for more than four dimensions, beside
    that of the slots, that do not lie end to end in memory; and for slots on another device than the pool.
    """
    require_copy(pool, source_slots, destination_slots, slot_dim)
    _require_apart(source_slots, destination_slots)
    for start in range(0, source_slots.shape[0], _MAX_SLOTS):
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
    if pool.element_size() not in _BITS:
        raise ValueError(f"pool must have elements of 1, 2, 4 or 8 bytes, got {pool.dtype}")
    for slots in (sources, destinations):
        if slots.device != pool.device:
            raise ValueError(f"slots must be on {pool.device}, where the pool is, got {slots.device}")
    runs = _runs(pool, slot_dim)
    if len(runs) > _MAX_RUNS + 1:
        raise ValueError(
            f"pool must have at most {_MAX_RUNS + 1} dimensions, beside that of the slots, that do not lie end to end "
            f"in memory, got strides {pool.stride()} for shape {tuple(pool.shape)}"
        )
    if not pool.numel():
        return
    *outer, (length, stride) = ((1, 0),) * (_MAX_RUNS + 1 - len(runs)) + runs
    num_runs = prod(size for size, _ in outer)
    block = _BLOCK_BYTES // pool.element_size()
    num_pieces = sources.shape[0] * num_runs * triton.cdiv(length, block)
    with on_device_of(pool):
        _copy_kernel[(min(num_pieces, _num_programs(pool.device)),)](
            pool.view(_BITS[pool.element_size()]),
            sources,
            destinations,
            sources.stride(),
            destinations.stride(),
            pool.stride(slot_dim),
            tuple(step for _, step in outer),
            stride,
            sources.shape[0],
            pool.shape[slot_dim],
            num_runs,
            tuple(size for size, _ in outer[1:]),
            length,
            BN=triton.next_power_of_2(max(sources.shape[0], 64)),
            BL=block,
        )


def _num_programs(device: torch.device) -> int:
    if device.type != "cuda":
        return _NUM_INTERPRETED
    return _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count


def _runs(pool: Tensor, slot_dim: int) -> tuple[tuple[int, int], ...]:
    """List (size, stride) of the dimensions beside the slots', widest first, joined where they lie end to end."""
    dims = [
        (stride, size)
        for dim, (size, stride) in enumerate(zip(pool.shape, pool.stride(), strict=True))
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


@triton.jit
def _copy_kernel(
    pool,
    sources,
    destinations,
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
    b_src = tl.load(sources + o_n * s_sources[0], mask=o_n < M, other=-1).to(tl.int64)
    b_dst = tl.load(destinations + o_n * s_destinations[0], mask=o_n < M, other=-1).to(tl.int64)
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
