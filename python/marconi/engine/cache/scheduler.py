"""The scheduler's requests, as the cache follows them: while they wait, and from their first prefill to their end.

    order       what waits is noted                                            (`policy/waiting.py`)
    admission   a request for which a state is being computed waits for it; of one that is taken, what others share
    prefill     the plan, and slots for it
    end         the last state of a request: the working slot's, a tracked one, or one of a verify step

What the cache knows of a request hangs on SGLang's own (`RequestNotes`) and is dropped with it; a retracted request
begins anew. Slots are taken when a prefill that passes their positions is about to run, and belong to the run until its
states join the tree. What those that wait share, and who had better wait, is in `policy/waiting.py`. The hooks do
nothing unless the batch's cache plans prefills (`engine/cache/radix_cache.py`).

Owner: the scheduler's thread.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final, NamedTuple

import torch
from sglang.srt.managers.utils import is_health_check_generate_req

from marconi.engine.cache.speculation import ENDED_IN, EndStateSource, copy_state
from marconi.engine.cache.tree_core import MarconiTreeCore
from marconi.engine.http.hints import KEY, NEXT_TURN, SYSTEM_END
from marconi.engine.prefill.checkpoint import Checkpoint
from marconi.engine.reports.explain import Explained, is_wanted
from marconi.engine.reports.moments import Moments, Steps
from marconi.engine.reports.trail import Trail
from marconi.events.base import SHARED_ELSEWHERE
from marconi.lifecycle.queue import Queue
from marconi.lifecycle.running import RunningRequest
from marconi.policy.admission.hints import Hints, hints_of
from marconi.policy.admission.plan import PrefillPlan
from marconi.policy.forecast.turns import MAX_DISTANCE, NO_CLOSING, closing_of
from marconi.policy.request import Lease, Request

PLAN: Final = "marconi_plan"
"""On a `ScheduleBatch`: a sequence of `Checkpoint`, or nothing. On a linear backend: a plan, for its next batch."""
MAX_PASSED: Final = 64
"""Requests passed over in one round: each was matched first, which takes the scheduler some tens of microseconds."""
_NUM_PASSED: Final = "marconi_num_passed"
"""On a `PrefillAdder`."""
_NOTES: Final = "marconi_notes"
_NO_HINTS: Final = Hints(())


@dataclass(slots=True)
class ServedRequest(RunningRequest):
    """A request of SGLang's that runs, and the slots of the states that a prefill leaves."""

    began_s: float | None = None
    """When its prefill began, by the first rank's clock; None elsewhere, and once its time was taken."""
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    """States that a prefill leaves and the tree has not taken yet, by depth in tokens."""


@dataclass(slots=True)
class RequestNotes:
    """The cache's notes on one of SGLang's requests."""

    lease: Lease | None = None
    """Its last match in the tree; None if it was never matched."""
    run: ServedRequest | None = None
    """None before its first prefill and after its end."""
    packed: tuple[Any, Request] | None = None
    """Its prompt as SGLang has it, and as it was packed."""
    is_counted: bool = False
    """Whether it was counted among those that are served uncached."""
    num_without_slot: int = 0
    """Number of states that it named and that got no slot."""
    explained: Explained | None = None
    """Why it missed; None before its first prefill, and if it did not ask."""
    has_loaded: bool = False
    """Whether it has loaded from the host the state that it starts from."""
    kv_hints: list[dict[str, Any]] | None = None
    """The answers to its `kv_hints`; None before its end, and if it has none."""
    steps: Steps | None = None
    """None unless it asks for an explanation."""
    trail: Trail | None = None
    """Its states; None before its first prefill, and if it is served uncached."""


def notes_of(req: Any) -> RequestNotes:
    """The notes on a request; made with the first."""
    notes: RequestNotes | None = getattr(req, _NOTES, None)
    if notes is None:
        notes = RequestNotes(steps=Steps() if is_wanted(req.sampling_params.custom_params) else None)
        setattr(req, _NOTES, notes)
    return notes


def packed(req: Any, core: MarconiTreeCore) -> Request:
    """The tokens of a request that waits, packed once; anew if SGLang exchanged its prompt, or it has an answer."""
    notes, ids = notes_of(req), req.origin_input_ids
    if req.output_ids:
        return core.request_of(ids + req.output_ids, req.extra_key, req.cache_salt)
    if notes.packed is None or notes.packed[0] is not ids:
        notes.packed = ids, core.request_of(ids, req.extra_key, req.cache_salt)
    return notes.packed[1]


def note_match(req: Any, lease: Lease) -> None:
    """Remember what the tree last knew of a waiting request.

    A health check and a refused request leave nothing and plan nothing.
    """
    notes_of(req).lease = lease
    if is_health_check(req) or is_refused(req):
        req.skip_radix_cache_insert = True


def is_health_check(req: Any) -> bool:
    """True for SGLang's own `GET /health`, which generates a token if the server is idle."""
    return bool(is_health_check_generate_req(req))


def is_refused(req: Any) -> bool:
    """True for a request that SGLang answers with an error: it computes one token of its own in place of the prompt."""
    return getattr(req, "to_finish", None) is not None


# Hooks of the scheduler


def on_calc_priority(_result: None, policy: Any, waiting_queue: "list[Any]", *_args: Any, **_kwargs: Any) -> None:
    """After `SchedulePolicy.calc_priority`: what waits is known to the cache."""
    if getattr(policy.tree_cache, "cuts_prefills", False):
        policy.tree_cache.waiting.note(waiting_queue)


def around_add_one_req(add: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `PrefillAdder.add_one_req`: a request that waits for a state is passed over, and the next one is tried."""
    cache = adder.tree_cache
    if not getattr(cache, "cuts_prefills", False):
        return add(adder, req, *args, **kwargs)
    # Where nothing runs, nothing is computed that one could wait for. (A prefill server's running batch is empty.)
    if (adder.can_run_list or cache.num_running) and cache.waiting.waits(req):
        from sglang.srt.managers.schedule_policy import AddReqResult

        num_passed = getattr(adder, _NUM_PASSED, 0) + 1
        setattr(adder, _NUM_PASSED, num_passed)
        # Last: where anything fails, SGLang adds the request with what its match took.
        _give_slot_back(cache, req)
        return AddReqResult.CONTINUE if num_passed < MAX_PASSED else AddReqResult.OTHER
    num_taken = len(adder.can_run_list)
    result = add(adder, req, *args, **kwargs)
    if len(adder.can_run_list) > num_taken:
        cache.note_taken(req)
    return result


def _give_slot_back(cache: Any, req: Any) -> None:
    """Free the slot that a match took for a request that is not run now, as SGLang does for one that does not fit."""
    kv = req.kv
    if kv.holds_mamba and not getattr(req, "session", None):
        cache.req_to_token_pool.mamba_allocator.free(kv.mamba_pool_idx.unsqueeze(-1))
        kv.mamba_pool_idx = None
    kv.mamba_cow_src_index = None
    kv.mamba_needs_clear = False


def around_prepare_for_extend(prepare: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `ScheduleBatch.prepare_for_extend`: plan before SGLang takes memory for the prefill."""
    plan = getattr(batch.tree_cache, "plan_prefill", None)
    if plan is not None:
        setattr(batch, PLAN, plan(batch.reqs))
    return prepare(batch, *args, **kwargs)


def before_prepare_for_decode(batch: Any) -> None:
    """Before `ScheduleBatch.prepare_for_decode`: steps are counted, as every request that decodes takes memory."""
    moments: Moments | None = getattr(batch.tree_cache, "moments", None)
    if moments is not None:
        moments.decodes()


def around_track(prepare: Callable[..., Any], batch: Any, req: Any) -> Any:
    """Around `ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend`: track nothing on SGLang's own grid."""
    if not getattr(batch.tree_cache, "cuts_prefills", False):
        return prepare(batch, req)
    from sglang.srt.managers.schedule_batch import _MambaRadixCacheV2TrackEntry

    return _MambaRadixCacheV2TrackEntry(track_mask=False, track_position=req.kv.mamba_next_track_idx, track_seqlen=-1)


def settle(
    checkpoints: Sequence[Checkpoint], num_parts: int, is_sound: bool, on_all_ranks: Callable[..., list[bool]]
) -> str | None:
    """Settle which states of a prefill have all of their `num_parts` parts, on every rank.

    `is_sound` says that no hook has failed here; `on_all_ranks` takes flags and returns which are set on every rank.
    Returns why states can be planned no longer; None if they can.
    """
    own = [each.num_parts == num_parts for each in checkpoints]
    are_all_sound, *written = on_all_ranks(is_sound, *own)
    for checkpoint, is_written in zip(checkpoints, written, strict=True):
        checkpoint.is_written = is_written
    if not are_all_sound or (any(own) and not any(written)):
        return "a hook failed on another rank"
    if checkpoints and not any(own):
        num_seen = max(each.num_parts for each in checkpoints)
        return f"a prefill wrote {num_seen} of the {num_parts} parts of a state, one a recurrent layer"
    return None


# What a request asks for


def asked_by(req: Any) -> Hints:
    """The positions in the prompt of `req` after which it asks for a state."""
    custom = req.sampling_params.custom_params
    if not isinstance(custom, Mapping) or KEY not in custom:
        return _NO_HINTS
    try:
        return hints_of(custom[KEY], len(req.origin_input_ids))
    except ValueError:
        # A process that validates nothing let it through (`--tokenizer-worker-num`), or it is of another part of a
        # session.
        return _NO_HINTS


def distance_known_by(req: Any) -> int | None:
    """The distance that came with a request, in tokens; None if none did, or none that makes sense."""
    custom = req.sampling_params.custom_params
    distance = custom.get(NEXT_TURN) if isinstance(custom, Mapping) else None
    return distance if type(distance) is int and 0 <= distance <= MAX_DISTANCE else None


def shared_elsewhere(req: Any) -> tuple[int, ...]:
    """The position at which prompts on other servers diverge from that of `req`, if its router named one."""
    custom = req.sampling_params.custom_params
    position = custom.get(SHARED_ELSEWHERE) if isinstance(custom, Mapping) else None
    return (position,) if type(position) is int and 0 < position < len(req.origin_input_ids) else ()


def system_end_of(req: Any) -> int:
    """Where the system prompt of `req` ends, in tokens, if it is a chat's; 0 otherwise."""
    custom = req.sampling_params.custom_params
    position = custom.get(SYSTEM_END) if isinstance(custom, Mapping) else None
    return position if type(position) is int and 0 < position < len(req.origin_input_ids) else 0


def count_dropped(req: Any, depth: int, page_tokens: int) -> None:
    """Note that a planned state of `req` got no slot: if the request named it, its answer reports that."""
    if any(position // page_tokens * page_tokens == depth for position in asked_by(req).positions):
        notes_of(req).num_without_slot += 1


# Slots


def lends_slots(source: EndStateSource, is_lazy: bool) -> bool:
    """True if a server that plans its states reads nothing that SGLang tracks; `is_lazy` is `extra_buffer_lazy`.

    There SGLang takes a request's second slot whenever it tracks, and frees the first.
    """
    return source is EndStateSource.WORKING and not is_lazy


def lend_slots(pool: Any) -> int:
    """Have requests of `pool`, SGLang's of requests, begin without tracking slots; returns how many they had."""
    num_slots: int = pool.mamba_initial_tracking_slots
    pool.mamba_initial_tracking_slots = 0
    return num_slots


def after_alloc_buffer(_result: None, pool: Any, req: Any) -> None:
    """After `HybridReqToTokenPool._alloc_ping_pong_buffer`: what has no slot writes to the padding."""
    if not pool.mamba_initial_tracking_slots:
        req.kv.mamba_ping_pong_track_buffer.zero_()


def is_tracked(req: Any) -> bool:
    """False for a request that began without tracking slots; true as well where SGLang tracks nothing at all."""
    is_empty = req.kv.mamba_ping_pong_empty
    return is_empty is None or not all(is_empty)


# The end of a request


class EndState(NamedTuple):
    """The last state of a request."""

    depth: int
    slot: torch.Tensor
    tracking_index: int | None
    """Which of the request's tracking slots it is; None for the working slot."""


def working_state(req: Any, up_to: int) -> EndState | None:
    """The working state of a finished request, if it stands after `up_to` tokens: those that were computed."""
    kv = req.kv
    return EndState(up_to, kv.mamba_pool_idx.view(1).clone(), None) if kv.kv_committed_len == up_to else None


def tracked_state(req: Any, up_to: int, states: Any) -> EndState | None:
    """The state of a finished request that SGLang tracked last within `up_to` tokens; None if there is none.

    `states` is SGLang's component of recurrent states.
    """
    tracked = states._select_finished_checkpoint(req, up_to)
    if tracked is None or not tracked[0]:
        return None
    depth, index = tracked
    return EndState(depth, req.kv.mamba_ping_pong_track_buffer[index].view(1).clone(), index)


def end_state(req: Any, up_to: int, source: EndStateSource, states: Any, pool: Any) -> EndState | None:
    """The last state of a finished request within `up_to` tokens, taken from where `ends` says; None if there is none.

    `states` is SGLang's component of recurrent states, `pool` its pool of requests.
    """
    if source in (EndStateSource.TRACKED, EndStateSource.PLANNED):
        return tracked_state(req, up_to, states)
    ended_in = getattr(req, ENDED_IN, None)
    if ended_in is None:
        # Where steps overlap, one has begun from the working state.
        return None if source is EndStateSource.LEFT else working_state(req, up_to)
    step, row = ended_in
    if step is None:
        return None
    if step.left is not None:
        depth, index = int(step.left[row]), step.tracking[row]
        slot = req.kv.mamba_ping_pong_track_buffer[index].view(1).clone()
        return EndState(depth, slot, index) if 0 < depth <= up_to else None
    node = step.node_at(row, up_to)
    if node is None:
        return None
    slot = req.kv.mamba_pool_idx.view(1).clone()
    copy_state(pool, row, node, slot)
    return EndState(up_to, slot, None)


def closing_of_answer(req: Any) -> int:
    """How the answer of a finished request closed, and whether it thought before; `NO_CLOSING` of one token or none."""
    answer = req.output_ids_through_stop
    if len(answer) < 2:
        return NO_CLOSING
    return closing_of(answer[-2], thought=req.reasoning_tokens > 0)


class WaitingRequests:
    """The requests of one scheduler, while they wait and while they are prefilled."""

    def __init__(self, core: MarconiTreeCore, moments: Moments) -> None:
        self._core = core
        self._moments = moments
        self._queue = Queue(core.hybrid)
        self._prompts = self._queue.prompts

    def note(self, queue: list[Any]) -> None:
        """Take over the queue as it is now, in SGLang's order."""
        prompts = self._prompts
        if not prompts and len(queue) < 2:
            return
        # Every pass of the scheduler comes here with the whole queue: whoever stays costs a look into a table or two,
        # and whoever is new is looked for from the end.
        current, known = set(queue), prompts.keys()
        gone = known - current
        # Not in the order of a set, which is that of addresses and another on every rank.
        left = [req for req in known if req in gone] if gone else []
        num_new = len(current) - len(known) + len(left)
        if left:
            self._go(left)
        if num_new and not prompts.is_full:
            new = reversed([*islice((req for req in reversed(queue) if req not in known), num_new)])
            for req in self._queue.come((req, packed(req, self._core)) for req in new):
                if (steps := notes_of(req).steps) is not None:
                    steps.queued = steps.queued or self._moments.now()

    def ended(self, req: Any) -> None:
        """A request leaves nothing more, and waits no longer: SGLang makes no pass while its queue is empty."""
        self._prompts.expect_nothing(req)
        if req in self._prompts:
            self._go([req])

    def aborted(self, rid: str) -> None:
        """The request that SGLang knows as `rid` has ended, if it waited."""
        waiting: list[Any] = [*self._prompts.keys()]
        for req in waiting:
            if req.rid == rid:
                self.ended(req)

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless whoever was reported come, and nobody else, is in the index."""
        self._queue.check_invariants()

    def _go(self, left: list[Any]) -> None:
        self._queue.go(left)
        for req in left:
            if (steps := notes_of(req).steps) is not None:
                steps.unqueued = steps.unqueued or self._moments.now()

    def matched(self, req: Any, lease: Lease) -> None:
        """Note the match of a request, which may change while it waits."""
        if self._prompts and self._queue.rematch(req, lease.match):
            notes = notes_of(req)
            is_another = notes.lease is None or notes.lease.match.checkpoint is not lease.match.checkpoint
            if is_another and notes.steps is not None:
                notes.steps.rematched.append(self._moments.now())

    def waits(self, req: Any) -> bool:
        """True if a request that has been matched is better computed once a state that is under way is there."""
        lease = notes_of(req).lease
        return lease is not None and not req.skip_radix_cache_insert and self._prompts.waits(*lease)

    def begins(self, req: Any) -> Lease | None:
        """The match of a request that is taken for the first time and shares more of its prompt with others.

        None for others, and for what stays out: nobody could wait for what it leaves.
        """
        notes = notes_of(req)
        if notes.run is not None or req.skip_radix_cache_insert:
            return None
        lease = notes.lease
        if lease is None or not self._prompts.is_shared(req, lease.match.checkpoint.depth):
            return None
        return lease

    def shared(self, req: Any, lease: Lease) -> list[int]:
        """Where others that wait leave the prompt of one, beyond its hit, the deepest first."""
        return self._prompts.shared(req, lease.match.checkpoint.depth)

    def expect(self, req: Any, lease: Lease, plan: PrefillPlan) -> None:
        """The states of `plan` are under way."""
        self._prompts.expect(req, lease.request, plan.depths)

    def arrived(self, req: Any, depth: int) -> None:
        """The state at `depth` was written, or will not be."""
        self._prompts.arrived(req, depth)

    def expect_nothing(self, req: Any) -> None:
        """A request leaves nothing more."""
        self._prompts.expect_nothing(req)
