"""A request from its first prefill to its end, and which of its planned states get a slot.

The plan says where a prefill is to leave states (`policy/admission/plan.py`). A state's slot is taken when a chunk that
passes its position is about to run, and only beside what is *reserved*: memory that requests take before the states of
this chunk join the tree. Those of the batch take the rest of their KV and of their slots, those that may still begin
all of theirs, and each other that runs, or may, locks a state that it starts from. Where no slot is free beside that,

    one must be free once all that is evictable has been evicted, but for states that waiting requests start from;
    a state that nobody has asked for must be worth more than the next victim (`HybridCache.deserves`).

A state on trial gets a slot only if beside that as much is free, or on trial, as all else takes.

A state without a slot is not kept: a miss later on, of which the cause is remembered.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from marconi.lifecycle.pools import NOTHING, Amount, Pool, SlotT_co
from marconi.policy.admission.plan import NO_PLAN, PrefillPlan
from marconi.policy.causes import Cause
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.request import Lease


@dataclass(slots=True)
class RunningRequest:
    """A request that runs: its match, its plan, and which states of the plan it has."""

    lease: Lease
    plan: PrefillPlan = NO_PLAN
    granted: set[int] = field(default_factory=set)
    """Depths of all states that have got a slot."""
    absent: dict[int, Cause] = field(default_factory=dict)
    """Depths of states that were asked for or planned and will not be there."""


class Device(Protocol[SlotT_co]):
    """A server or a replay, as far as its requests take memory."""

    @property
    def hybrid(self) -> HybridCache:
        """The owner of what is held."""
        ...

    @property
    def pools(self) -> Pool[SlotT_co]:
        """The memory that requests take."""
        ...

    def evictable(self) -> Amount:
        """KV on no locked path, and unlocked states."""
        ...

    def evict_state(self, now_s: float) -> None:
        """Free a slot that the tree holds, if any may be freed."""
        ...


class Missing(NamedTuple):
    """A request of the next batch: the memory that its prefill has yet to take, and whether it has locked a state."""

    num_tokens: int
    num_slots: int
    is_holding: bool


class Rows(NamedTuple):
    """The requests that may run at once."""

    num_rows: int
    num_free: int
    """Rows that are left once the batch has its own."""
    num_slots: int
    """Slots that each of them holds."""
    num_locked: int
    """States that are locked for those that run."""
    page_tokens: int
    """KV that SGLang asks for beyond what a request takes."""


def reserved(batch: Sequence[Missing], rows: Rows, are_slots_shared: bool) -> Amount:
    """Memory that requests take before the states of the next prefill, of `batch`, join the tree.

    A locked state takes a slot from others only where the tree's states and requests share them.
    """
    num_tokens, num_slots = len(batch) * rows.page_tokens, max(rows.num_free, 0) * rows.num_slots
    num_locked_by_others = rows.num_locked
    for request in batch:
        num_tokens += request.num_tokens
        num_slots += request.num_slots
        num_locked_by_others -= request.is_holding
    if are_slots_shared:
        num_slots += max(rows.num_rows - len(batch) - num_locked_by_others, 0)
    return Amount(num_tokens, num_slots)


def grant(
    chunks: Sequence[tuple[RunningRequest | None, int, int]],
    device: Device[SlotT_co],
    reserve: Callable[[], Amount],
    now_s: float,
) -> list[tuple[int, int, SlotT_co | None]]:
    """Take slots for the states that are planned within `chunks`, by precedence; row, depth and slot of each.

    Each chunk is a request, None for one that plans nothing, and the tokens that it starts after and ends at. `reserve`
    is asked for what is `reserved` if anything is planned.
    """
    planned = [
        (run.plan.precedence(depth), row, depth)
        for row, (run, start, end) in enumerate(chunks)
        if run is not None
        for depth in run.plan.depths
        if start < depth <= end and depth not in run.granted
    ]
    if not planned:
        return []
    beside, slots = reserve(), list[tuple[int, int, SlotT_co | None]]()
    for _, row, depth in sorted(planned):
        run = chunks[row][0]
        assert run is not None, "it plans a state"
        slots.append((row, depth, take_planned(run, depth, device, beside, now_s)))
    return slots


def take_planned(
    run: RunningRequest, depth: int, device: Device[SlotT_co], beside: Amount, now_s: float
) -> SlotT_co | None:
    """A slot for the state that `run` plans at `depth`, beside what is reserved; None, and why, where it gets none."""
    slot = None
    if _may_take(run, depth, device, beside, now_s) and (slot := device.pools.take_planned()) is None:
        device.evict_state(now_s)
        slot = device.pools.take_planned()
    if slot is not None:
        run.granted.add(depth)
    elif not run.plan.is_spare(depth):
        run.absent[depth] = Cause.NO_SLOT
    return slot


def may_keep_end(device: Device[object], now_s: float) -> bool:
    """True if the tree can take the last state of a request, after an eviction if need be."""
    if device.pools.promise():
        return True
    device.evict_state(now_s)
    return device.pools.promise()


def _is_idle(device: Device[object], beside: Amount) -> bool:
    """True if as much is free, or on trial, as is reserved and the tree's other states take with all KV."""
    hybrid = device.hybrid
    num_on_trial = hybrid.order.num_on_trial
    taken = Amount(hybrid.tree.num_tokens, hybrid.tree.num_states - num_on_trial)
    beside = Amount(beside.num_tokens + taken.num_tokens, beside.num_states + taken.num_states)
    return device.pools.spares_slot(Amount(0, num_on_trial), beside)


def _may_take(run: RunningRequest, depth: int, device: Device[object], beside: Amount, now_s: float) -> bool:
    pools, hybrid = device.pools, device.hybrid
    if depth in run.plan.trials:
        return pools.spares_slot(NOTHING, beside) and _is_idle(device, beside)
    if pools.spares_slot(NOTHING, beside):
        return True
    num_tokens, num_states = device.evictable()
    if not pools.spares_slot(Amount(num_tokens, num_states - hybrid.num_awaited), beside):
        return False
    role = run.plan.roles.get(depth)
    return role is None or hybrid.deserves(run.lease, depth, role, run.granted, pools.state_need, now_s)
