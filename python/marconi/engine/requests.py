"""The requests of one scheduler, as the cache follows them: while they wait, and from their first prefill to their end.

What the cache knows of a request hangs on SGLang's own (`note_match`, `attach`), so it goes when that goes; a retracted
request begins anew. Slots are taken when a prefill that passes their positions is about to run, and belong to the run
until its states join the tree. What those that wait share, and who had better wait, is in `policy/waiting.py`.

Owner: the scheduler's thread.
"""

from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from sglang.srt.managers.utils import is_health_check_generate_req

from marconi.engine.core.tree_core import IDS_PER_TOKEN, MarconiTreeCore
from marconi.engine.prefill.checkpoint import Checkpoint
from marconi.engine.speculation import Ends, copy_state, end_of
from marconi.policy.admission.base import LEAST_GAIN_TOKENS
from marconi.policy.admission.plan import PrefillPlan
from marconi.policy.forecast.turns import NO_CLOSING, closing_of
from marconi.policy.request import Lease
from marconi.policy.waiting import WaitingPrompts
from marconi.tree import Node

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

HIT_KINDS = ("input_prefix", "conversation", "none")
"""What a request may start from."""
_MATCH = "marconi_match"
_RUN = "marconi_run"
_UNCACHED = "marconi_uncached"


@dataclass(slots=True)
class RunningRequest:
    """A request from its first prefill on: its match, its plan, and the slots of the states that a prefill leaves."""

    lease: Lease
    plan: PrefillPlan
    began_s: float | None = None
    """When its prefill began, by the first rank's clock; None elsewhere, and once its time was taken."""
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    """States that a prefill leaves and the tree has not taken yet, by depth in tokens."""
    granted: set[int] = field(default_factory=set)
    """Depths of all states that have got a slot."""


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


def end_state(req: Any, up_to: int, ends: Ends, states: Any, pool: Any) -> EndState | None:
    """The last state of a finished request within `up_to` tokens, taken from where `ends` says; None if there is none.

    `states` is SGLang's component of recurrent states, `pool` its pool of requests.
    """
    if ends in (Ends.TRACKED, Ends.PLANNED):
        return tracked_state(req, up_to, states)
    ended_in = end_of(req)
    if ended_in is None:
        # Where steps overlap, one has begun from the working state.
        return None if ends is Ends.LEFT else working_state(req, up_to)
    step, row = ended_in
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


def kind_of_hit(lease: Lease, ends: set[Node]) -> str:
    """The kind of state that a request starts from, if that saves anything; `ends` are the nodes at which one ended."""
    if lease.match.source is None or lease.match.source.depth < LEAST_GAIN_TOKENS:
        return "none"
    return "conversation" if lease.match.source in ends else "input_prefix"


def is_health_check(req: Any) -> bool:
    """True for SGLang's own `GET /health`, which generates a token if the server is idle."""
    return bool(is_health_check_generate_req(req))


def note_match(req: Any, match: Any) -> None:
    """Remember what the tree last knew of a waiting request; a health check is to leave nothing, and plans nothing."""
    setattr(req, _MATCH, match)
    if is_health_check(req):
        req.skip_radix_cache_insert = True


def last_match(req: Any) -> Any:
    """The last match of a request; None if it was never matched."""
    return getattr(req, _MATCH, None)


def attach(req: Any, run: RunningRequest) -> RunningRequest:
    """The request has begun."""
    setattr(req, _RUN, run)
    return run


def run_of(req: Any) -> RunningRequest | None:
    """The running request behind one of SGLang's; None before its first prefill and after its end."""
    return getattr(req, _RUN, None)


def is_first_prefill(req: Any) -> bool:
    """True if a request that could not begin is asked about for the first time."""
    seen = getattr(req, _UNCACHED, False)
    setattr(req, _UNCACHED, True)
    return not seen


def num_reserved_slots(reqs: "list[Req]", req_to_token_pool: Any, num_sources: int) -> int:
    """Slots that are taken before the states of the next prefill, of `reqs`, join the tree.

    By SGLang for `reqs` (`mem_cache/allocation.py:ensure_mamba_capacity`), and by the requests which may still start:
    each its working slot and its tracking slots. And every other request that runs, or may, in place of one that ends
    first, starts from a state of its own, which it locks: `num_sources` are locked now.
    """
    num_tracking = req_to_token_pool.mamba_initial_tracking_slots
    num_needed, num_others = 0, req_to_token_pool.available_size()
    for req in reqs:
        kv = req.kv
        num_needed += (not kv.holds_mamba) + (num_tracking if kv.mamba_ping_pong_track_buffer is None else 0)
        num_others -= kv.req_pool_idx is None
    num_locked_by_others = num_sources - sum(req.kv.cache_protected_len > 0 for req in reqs)
    num_to_lock = req_to_token_pool.size - len(reqs) - num_locked_by_others
    return num_needed + max(num_others, 0) * (1 + num_tracking) + max(num_to_lock, 0)


def detach(req: Any) -> RunningRequest | None:
    """The request has ended, or was retracted."""
    run: RunningRequest | None = getattr(req, _RUN, None)
    if run is not None:
        setattr(req, _RUN, None)
    return run


class WaitingRequests:
    """The requests of one scheduler, while they wait and while they are prefilled."""

    def __init__(self, core: MarconiTreeCore) -> None:
        self._core = core
        self._prompts = WaitingPrompts(core.page_size, core.page_size * IDS_PER_TOKEN)

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
        for req in left:
            prompts.remove(req)
        num_new = len(current) - len(known)
        if left or num_new:
            self._core.hybrid.queue(left, self._come(queue, num_new))

    def _come(self, queue: list[Any], num_new: int) -> list[tuple[Any, Node]]:
        """Take the last `num_new` requests that are not known into the index, as far as it has room.

        Returns each with the state that it would start from.
        """
        prompts, known = self._prompts, self._prompts.keys()
        if not num_new or prompts.is_full:
            return []
        new, come = [*islice((req for req in reversed(queue) if req not in known), num_new)], []
        for req in reversed(new):
            if prompts.is_full:
                break
            # What has not run yet has no answer, and copying its prompt once more is half of what this costs.
            ids = req.origin_input_ids + req.output_ids if req.output_ids else req.origin_input_ids
            request = self._core.request_of(ids, req.extra_key, req.cache_salt)
            prompts.add(req, request)
            come.append((req, self._core.hybrid.match(request).checkpoint))
        return come

    def matched(self, req: Any, lease: Lease) -> None:
        """Note the match of a request, which may change while it waits."""
        hybrid = self._core.hybrid
        if hybrid.awaits(req):
            hybrid.queue((), [(req, lease.match.checkpoint)])

    def waits(self, req: Any) -> bool:
        """True if a request that has been matched is better computed once a state that is under way is there."""
        lease = last_match(req)
        return lease is not None and not req.skip_radix_cache_insert and self._prompts.waits(*lease)

    def begins(self, req: Any) -> Lease | None:
        """The match of a request that is taken for the first time and shares more of its prompt with others.

        None for others, and for what stays out: nobody could wait for what it leaves.
        """
        if run_of(req) is not None or req.skip_radix_cache_insert:
            return None
        lease = last_match(req)
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
        """The state at `depth` has come, or will not."""
        self._prompts.arrived(req, depth)

    def expect_nothing(self, req: Any) -> None:
        """A request leaves nothing more."""
        self._prompts.expect_nothing(req)
