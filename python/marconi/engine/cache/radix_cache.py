"""SGLang's unified radix cache of a hybrid model, on this project's tree and policies.

    match_prefix            looks up and touches nothing; a hit's state is copied to the request's slot, as in stock
    plan_prefill            before a prefill: the request begins; slots for the planned states that the prefill passes
    checkpoint_into_tree    after a prefill: those states join the tree, at their exact positions; after the last token:
                            the working state does
    evict                   victims one by one, their memory back in one piece
    locks, sizes            SGLang's own, over `tree_core.py`

Which planned states get a slot is decided by `lifecycle/running.py`, as in the replay; how memory is divided is
the pools' (`pools.py`).

With pages of one token the state at a request's end is its working state, which stands after the last token that was
computed, whether scheduling overlaps or not, and nothing is tracked (`scheduler.py`); of accepted drafts, see
`speculation.py`. With larger pages it is what SGLang tracked last while decoding. On a prefill server
(`--disaggregation-mode prefill`) a request ends with its prompt, once another server has taken its KV and its state
over.

Owner: the scheduler's thread.
"""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.environ import envs
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    EvictParams,
    EvictResult,
    MatchPrefixParams,
    MatchResult,
    TreeLock,
)
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import mamba_track_grid

from marconi.engine.cache.pools import DevicePools, Targets
from marconi.engine.cache.scheduler import (
    EndState,
    ServedRequest,
    WaitingRequests,
    asked_by,
    closing_of_answer,
    count_dropped,
    distance_known_by,
    end_state,
    is_health_check,
    is_refused,
    is_tracked,
    lend_slots,
    lends_slots,
    note_match,
    notes_of,
    packed,
    settle,
    shared_elsewhere,
    system_end_of,
)
from marconi.engine.cache.sessions import SessionStates
from marconi.engine.cache.speculation import ENDED_IN, OF_A_STEP, EndStateSource, LastStops
from marconi.engine.cache.tick import FirstRank, Tick
from marconi.engine.cache.tree_core import IDS_PER_TOKEN, MarconiTreeCore, namespace_of, path_of
from marconi.engine.events.load import LoadReporter
from marconi.engine.events.publishing import CachePublisher
from marconi.engine.events.sglang_events import KvEventRecorder
from marconi.engine.faults import OF_PROCESS, Faults
from marconi.engine.int8.pools import Int8DevicePools
from marconi.engine.joint.pools import JointMemory, JointPools
from marconi.engine.launch.flags import Explain, Flags
from marconi.engine.launch.policies import JUDICIOUS, PolicyChoice, hybrid_cache
from marconi.engine.launch.running import may_track
from marconi.engine.prefill.checkpoint import Checkpoint
from marconi.engine.prefill.side_states import num_parts
from marconi.engine.reports.explain import Explained, Explanations, uncached
from marconi.engine.reports.metrics import CacheMetrics, labels
from marconi.engine.reports.moments import Moments, Steps
from marconi.engine.reports.picture import Picture
from marconi.engine.reports.record import ended
from marconi.engine.reports.stats import CacheStats, kind_of_hit
from marconi.engine.reports.status import CacheSettings, HostUse, Status, StoreUse, Use
from marconi.engine.reports.trail import Trail
from marconi.engine.windows.pools import WindowedPools
from marconi.events.base import StoreReach
from marconi.events.tree_log import Tenant, TreeLog
from marconi.lifecycle.pools import Amount
from marconi.lifecycle.running import grant, may_keep_end
from marconi.model.learned_latency import LearnedLatency
from marconi.policy.admission.plan import NO_PLAN, PrefillPlan
from marconi.policy.base import Costs, Need
from marconi.policy.causes import Cause
from marconi.policy.divergence import Divergence, divergence_of
from marconi.policy.forecast.turns import NO_CLOSING
from marconi.policy.hybrid_cache import HybridCache, Suffix
from marconi.policy.kv_hints import EndedRequest, Prefetch, obey, reject
from marconi.policy.misses import Explanation
from marconi.policy.request import Lease
from marconi.record import TraceRecorder
from marconi.tree import Match
from marconi.tree.memory import Memory

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixKey


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The server around a cache: whom it tells, and what it answers for the server."""

    log: TreeLog | None = None
    """The log of all that is held."""
    publisher: CachePublisher | None = None
    """Publishes a log to routers."""
    kv_events: KvEventRecorder | None = None
    """SGLang's own events, of the same log; None where it publishes none."""
    recorder: TraceRecorder | None = None
    """On the first rank, under `--marconi-record`."""
    split: str | None = None
    """How the server divided memory itself, and why; None where a flag divided it."""
    vocab_size: int | None = None
    """Size of the model's vocabulary; None if it is unknown."""
    forward_stream: Any = None
    """The stream of forward passes; None where they run on the scheduler's own."""


class MarconiRadixCache(UnifiedRadixCache):
    """The unified radix cache of a hybrid model.

    Source of what it extends: `srt/mem_cache/unified_radix_cache.py`.
    """

    tree_core: MarconiTreeCore

    def __init__(
        self,
        params: "CacheInitParams",
        choice: PolicyChoice,
        costs: Costs,
        flags: Flags = Flags(),  # noqa: B008 - frozen
        first_rank: FirstRank | None = None,
        around: Surroundings = Surroundings(),
        end_source: EndStateSource = EndStateSource.WORKING,
    ) -> None:
        """A cache on the pools of `params`; `costs` is what memory a state takes there, and what it saves.

        `first_rank` makes the ticks of all ranks that share the cache, and is None on the others. `end_source` is where
        the state at a request's end is taken from.
        """
        self.choice = choice
        self.cuts_prefills = choice.admission == JUDICIOUS
        """Whether states are kept where the plan says; else where SGLang itself would."""
        assert not self.cuts_prefills or params.swa_retain_window is None, "windows are held where SGLang keeps states"
        self.plans = self.cuts_prefills
        """Whether states inside prefills are planned; see `_stop_planning`."""
        self.end_source = end_source
        self._is_lazy = params.enable_mamba_extra_buffer_lazy
        self.costs = costs
        self.flags = flags
        self.first_rank = first_rank
        self.faults = Faults() if first_rank is None else first_rank.faults
        OF_PROCESS.set(self.faults)
        self.tick = Tick(0.0)
        """The time of all decisions; see `adopt`."""
        self.moments = Moments(self.clock)
        """Numbers the steps of requests that ask for an explanation."""
        self.log, self.publisher, self.recorder = around.log, around.publisher, around.recorder
        self.split, self.vocab_size, self.event_recorder = around.split, around.vocab_size, around.kv_events
        self.load_reporter: LoadReporter | None = None
        """Tells routers the load, where there is a publisher."""
        self.latency = LearnedLatency(costs.flops)
        self.explanations = Explanations(self.latency, costs.flops)
        self.pools = pools_of(params, around.forward_stream)
        super().__init__(params)
        if self.publisher is not None:
            self.load_reporter = LoadReporter(self, self.publisher.publish_load)
        if params.enable_session_radix_cache:
            self.session_refs = SessionStates(self.tree_core)
        lends = self.cuts_prefills and lends_slots(end_source, self._is_lazy)
        self._num_parts = num_parts(self.req_to_token_pool)
        self._num_lent = lend_slots(self.req_to_token_pool) if lends else 0
        self.waiting = WaitingRequests(self.tree_core, self.moments)
        self._chunk_tokens = params.chunked_prefill_size
        self.stops = LastStops()
        self._no_slot = torch.empty(0, dtype=torch.int64, device=params.req_to_token_pool.device)
        assert self.req_to_token_pool.req_to_token.dtype is torch.int32, "rows of token indices are of int32"
        reports_metrics = params.enable_metrics and first_rank is not None
        self.num_running = 0
        """Requests between their first prefill and their end, of those that may leave something."""
        metrics = CacheMetrics(labels()) if reports_metrics else None
        self.stats = CacheStats(self, metrics)
        if metrics is not None:
            self.tree_core.hybrid.watchers += (metrics,)
        self.picture = Picture(costs, self.status)
        if first_rank is not None:
            logger.info("marconi: %s", self.stats.describe())

    def make_tree_core(self, params: "CacheInitParams") -> MarconiTreeCore:
        """The core of this cache."""
        page = params.page_size

        def make(memory: Memory) -> HybridCache:
            choice, ids, needs = self.choice, page * IDS_PER_TOKEN, frozenset(self.pools.needs.values())
            explains = self.flags.explain
            return hybrid_cache(choice, self.costs, page, ids, memory, self.latency, needs, explains=explains)

        return MarconiTreeCore(params, make, self.clock, self.pools.needs, self.log)

    def take_events(self) -> list[Any]:
        """SGLang's events since the last call."""
        return [] if self.event_recorder is None else self.event_recorder.take()

    def clock(self) -> float:
        """The time of the last tick, in seconds: that of all decisions."""
        return self.tick.now_s

    def adopt(self, tick: Tick) -> None:
        """Go on by `tick`, which every rank that shares this cache adopts between the same two steps."""
        self.tick = tick
        self.latency.follow(tick.overhead_s, tick.s_per_flop)
        if self.plans and not tick.plans:
            self._stop_planning()

    def _stop_planning(self) -> None:
        """A hook has failed, or nobody has written what was planned: SGLang keeps states where it does without us.

        Where that is not served (one pool, int8 checkpoints, lazy tracking, more requests at once than there are
        tracking slots for), and of accepted drafts, whose tracking this cache has left out, ends of answers are kept
        and nothing else.
        """
        self.plans = False
        pool = self.req_to_token_pool
        has_own_pool = self.pools.state_need is Need.BYTES or not self.pools.are_slots_shared
        lacks_slots = self._num_lent > 0 and not may_track(pool.size, pool.mamba_allocator.size, self._num_lent)
        self.cuts_prefills = has_own_pool or self._is_lazy or lacks_slots or self.end_source in OF_A_STEP
        if not self.cuts_prefills:
            pool.mamba_initial_tracking_slots += self._num_lent
        self.waiting.note([])
        self.waiting = WaitingRequests(self.tree_core, self.moments)
        if self.first_rank is not None:
            rest = "ends of answers alone" if self.cuts_prefills else "where SGLang tracks them (chunk-end)"
            logger.error("marconi: %s; states are no longer planned, and kept %s", self.faults.first, rest)

    def status(self) -> Status:
        """Counts of what the cache holds and did."""
        return self.stats.status()

    @property
    def settings(self) -> CacheSettings:
        """The settings that decide what is cached, beside the pools."""
        choice, pool = self.choice, self.req_to_token_pool
        return CacheSettings(
            admission=choice.admission,
            ttft_budget_s=choice.ttft_budget_s,
            step_tokens=choice.step_tokens,
            max_ghosts=choice.max_ghosts,
            max_ghost_tokens=choice.max_ghost_tokens,
            page_tokens=self.page_size,
            chunk_tokens=self._chunk_tokens if (self._chunk_tokens or 0) > 0 else None,
            num_rows=pool.size,
            num_working_slots=1 + pool.mamba_initial_tracking_slots,
            num_lent_slots=self._num_lent,
            ends=self.end_source.value,
            track_tokens=mamba_track_grid(self.page_size),
            vocab_size=self.vocab_size,
        )

    @property
    def state_slots(self) -> Any:
        """SGLang's allocator of the slots that hold the tree's states."""
        return self.pools.state_slots

    @property
    def hybrid(self) -> HybridCache:
        """The owner of what is held."""
        return self.tree_core.hybrid

    @property
    def host_use(self) -> HostUse | None:
        """The host tier; None without one."""
        return None

    def save(self) -> dict[str, Any] | None:
        """Write on what is held to the store behind the host; empty without one."""
        return {}

    @property
    def store_reach(self) -> StoreReach | None:
        """The store behind the host, as a router prices it; None without one."""
        return None

    @property
    def store_use(self) -> StoreUse | None:
        """The store behind the host; None without one."""
        return None

    @property
    def joint_bytes(self) -> Use | None:
        """Bytes of the one pool; None where KV and states have pools of their own."""
        return self.pools.joint_use(self.tree_core)

    def reset(self) -> None:
        """Reset like SGLang."""
        super().reset()
        self.pools.reset()
        self.waiting = WaitingRequests(self.tree_core, self.moments)
        self.explanations.flushed()

    def sanity_check(self) -> None:
        """Check as SGLang does, and who waits."""
        super().sanity_check()
        self.waiting.check_invariants()

    def release_host_resources(self) -> None:
        """Release as SGLang does, at the end of a scheduler: events that wait are published."""
        super().release_host_resources()
        if self.publisher is not None:
            self.publisher.close()
        if self.recorder is not None:
            self.recorder.close()

    def on_idle(self) -> None:
        """Nothing runs and nothing waits: the metrics are set, and a router knows."""
        self.stats.publish(self.clock())
        if self.load_reporter is not None:
            self.load_reporter.idle()

    # Matching

    def _match_tree(self, params: MatchPrefixParams) -> MatchResult:
        if envs.SGLANG_RADIX_FORCE_MISS.get():
            # SGLang drops the hit, but not the copy of its state into the request's slot.
            params = replace(params, cow_mamba=False)
        lease = self._look_up(params)
        if params.req is not None:
            self.waiting.matched(params.req, lease)
            note_match(params.req, lease)
            if params.cow_mamba and (steps := notes_of(params.req).steps) is not None:
                self._note_copy(params.req, lease, steps)
        result = self.tree_core.answer(lease.match, params)
        if not self.cuts_prefills:
            result = result._replace(mamba_branching_seqlen=self._branch_on_grid(result, lease.match))
        return self._finalize_match_result(params, result)

    def _note_copy(self, req: "Req", lease: Lease, steps: Steps) -> None:
        """SGLang is about to take a slot for a copy of the state that a request would resume from."""
        if steps.began is not None:
            # It was retracted: the moments are those of its first prefill.
            return
        steps.matched = now = self.moments.now()
        is_slot_free = req.kv.holds_mamba or self.req_to_token_pool.mamba_allocator.available_size() > 0
        if lease.match.source is not None and not is_slot_free:
            steps.tried.append(now)

    def _look_up(self, params: MatchPrefixParams) -> Lease:
        """Look up a prompt; without a slot for a copy of the state that it would resume from it is a miss, for now."""
        req, key = params.req, params.key
        # Embeddings of a request's own are looked up by no tokens.
        is_whole = req is not None and len(key.token_ids) == len(req.origin_input_ids) + len(req.output_ids)
        core = self.tree_core
        lease = core.look_up(key, packed(req, core) if is_whole else None)
        source = lease.match.source
        if source is None or not params.cow_mamba or req is None or req.kv.holds_mamba:
            return lease
        if self.pools.has_slot_for_copy(source, core):
            return lease
        request = lease.request
        return Lease(request, core.hybrid.tree.match(request.path, 0, request.namespace))

    def touch_prefix(self, key: "RadixKey") -> None:
        """A waiting request uses nothing yet: only what a request starts from counts as used."""

    def _branch_on_grid(self, result: MatchResult, match: Match) -> int | None:
        """The last position of SGLang's grid within the KV that is held, or before prompts part, beyond the hit."""
        grid = self.components[ComponentType.MAMBA].mamba_checkpoint_grid
        num_known = max(result.full_kv_hit_length, match.num_seen_tokens if match.diverges else 0)
        branch: int = num_known // grid * grid
        return branch if branch > result.device_prefix_len else None

    @property
    def _grid_of_sglang(self) -> int | None:
        """Tokens at whose multiples states stand where SGLang tracks them; None where they stand anywhere."""
        if self.cuts_prefills or not self.enable_mamba_extra_buffer:
            return None
        grid: int = self.components[ComponentType.MAMBA].mamba_checkpoint_grid
        return grid

    # Planning

    def plan_prefill(self, reqs: "list[Req]") -> list[Checkpoint]:
        """Begin the requests that are new, and take slots for the planned states within this prefill of each.

        Where slots run out, the planned states of least worth get none; a plan that was stopped gets none.
        """
        now_s = self.clock()
        if self.first_rank is not None:
            self.stats.publish(now_s)
        runs = [notes_of(req).run or self._begin(req, now_s) for req in reqs]
        for req in reqs:
            if (steps := notes_of(req).steps) is not None:
                steps.computes(req.extend_end, self.moments.now())
        chunks = [(run, req.prefix_len, req.extend_end) for req, run in zip(reqs, runs, strict=True)]
        checkpoints: list[Checkpoint] = []
        for row, depth, slot in grant(chunks, self, partial(self._reserved, reqs), now_s) if self.plans else ():
            run, req = runs[row], reqs[row]
            assert run is not None, "it plans a state"
            if slot is not None:
                checkpoint = run.checkpoints[depth] = Checkpoint(row, depth, slot)
                checkpoints.append(checkpoint)
            elif depth in run.absent:
                self.stats.num_not_written += 1
                self.waiting.arrived(req, depth)
                count_dropped(req, depth, self.page_size)
        for checkpoint in checkpoints:
            checkpoint.batch = checkpoints
        return checkpoints

    def _begin(self, req: "Req", now_s: float) -> ServedRequest | None:
        notes = notes_of(req)
        lease = notes.lease
        if lease is None or req.skip_radix_cache_insert or req.prefix_len != lease.match.checkpoint.depth:
            if is_health_check(req):
                self.stats.num_health_checks += not notes.is_counted
            elif not notes.is_counted and not is_refused(req):
                self.stats.num_uncached += 1
                if self.flags.explain:
                    whole = uncached(req.prefix_len, len(req.origin_input_ids))
                    self.tree_core.hybrid.counters.missed(whole)
                    self._explain(req, whole, now_s)
            notes.is_counted = True
            self.waiting.expect_nothing(req)
            return None
        hybrid = self.tree_core.hybrid
        if not req.retracted_stain:
            self.stats.hits[kind_of_hit(lease, self.tree_core.memory.ends)] += 1
            diverged = divergence_of(lease.request, hybrid.tree) if self.flags.explanations is Explain.TEXT else None
            explanation = hybrid.begin(lease, now_s, self._grid_of_sglang)
            if explanation is not None:
                notes.trail = Trail(lease.request.namespace, lease.match.checkpoint)
                self._explain(req, explanation, now_s, diverged)
        run = notes.run = ServedRequest(lease, self._plan(req, lease) if self.plans else NO_PLAN)
        for position in asked_by(req).over_limit:
            run.absent[position // self.page_size * self.page_size] = Cause.HINT_OVER_LIMIT
        if self.first_rank is not None:
            self.first_rank.began(run)
        self.num_running += 1
        return run

    def _explain(self, req: "Req", explanation: Explanation, now_s: float, diverged: Divergence | None = None) -> None:
        notes = notes_of(req)
        explained = Explained(req.rid, now_s, explanation, notes.trail, diverged)
        self.explanations.note(explained)
        if notes.steps is not None:
            notes.steps.began, notes.explained = self.moments.now(), explained

    def _plan(self, req: "Req", lease: Lease) -> PrefillPlan:
        """Where a request leaves states; others may wait for them from now on."""
        asked, elsewhere, distance = asked_by(req).positions, shared_elsewhere(req), distance_known_by(req)
        system_end = system_end_of(req)
        if self.end_source is EndStateSource.PLANNED:
            asked = (*asked, lease.request.num_prompt_tokens)
        if (steps := notes_of(req).steps) is not None:
            steps.asked, steps.elsewhere, steps.next_turn = tuple(asked), elsewhere, distance
            steps.system_end = system_end
        shared = (*self.waiting.shared(req, lease), *elsewhere)
        plan = self.tree_core.hybrid.plan(lease, asked, shared, distance, system_end)
        self.waiting.expect(req, lease, plan)
        return plan

    def note_taken(self, req: "Req") -> None:
        """A request will be in the next prefill: those behind it may wait for the states that it will leave."""
        lease = self.waiting.begins(req)
        if lease is not None and self.plans:
            self._plan(req, lease)

    # Keeping

    def checkpoint_into_tree(self, req: "Req", *, up_to: int, **kwargs: Any) -> None:
        """Add what the request has computed so far to the tree, as far as a state stands behind it."""
        notes = notes_of(req)
        run = notes.run
        if run is not None and self.first_rank is not None:
            self.first_rank.prefilled(run, up_to)
        is_finished = req.finished()
        if notes.steps is not None:
            notes.steps.computed(self.moments.now())
        if not self.cuts_prefills and is_tracked(req):
            if run is not None:
                self._free_planned(run)
            super().checkpoint_into_tree(req, up_to=up_to, **kwargs)
        elif is_finished:
            end = None if run is None else self._keep_end(req, run, up_to)
            self._release_states(req, end if self.pools.are_slots_shared else None)
        elif run is not None:
            self._keep_prefill(req, run, up_to)
        if is_finished:
            self._obey(req, run)
            self._end(req)
            if notes.steps is not None:
                notes.steps.ended = self.moments.now()
            if self.first_rank is not None:
                self.stats.count(req)
            if self.recorder is not None and not is_health_check(req):
                lease = notes_of(req).lease
                arrival_s = self.clock() if lease is None else lease.request.arrival_s
                namespace = namespace_of(req.extra_key, req.cache_salt)
                self.recorder.add(lambda: ended(req, arrival_s, namespace))

    def _obey(self, req: "Req", run: ServedRequest | None) -> None:
        """Obey the `kv_hints` of a request that has left its states, answer them, and note its session."""
        hints, core, sessions = req.kv_hints, self.tree_core, self.session_refs
        if run is None:
            if hints is not None:
                notes_of(req).kv_hints = reject(hints.actions, "the request is served without the cache")
            return
        resumed_depth = run.lease.match.checkpoint.depth
        if hints is not None:
            notes = notes_of(req)
            with self.prefetching(req) as prefetch:
                ended = EndedRequest(core.node_by_id(req.lock.node), resumed_depth, notes.has_loaded, prefetch)
                notes.kv_hints = obey(core.hybrid, hints.actions, ended, self.clock())
        if isinstance(sessions, SessionStates):
            sessions.ended(core.node_by_id(req.lock.node), resumed_depth, req.session_generation)

    def prefetching(self, req: "Req") -> AbstractContextManager[Prefetch | None]:
        """How a hint of `req` loads another prompt's state from the host: without a host tier, not at all."""
        return nullcontext()

    def on_release(self, req: "Req", *, checkpointed: bool) -> None:
        """Free a request's memory, and the slots of states that it will not leave."""
        self._end(req)
        super().on_release(req, checkpointed=checkpointed)

    def release_aborted_request(self, request: "CacheRequestHandle") -> None:
        """Forget a request that was aborted, while it waited or later."""
        super().release_aborted_request(request)
        self.waiting.aborted(request.rid)

    def _end(self, req: "Req") -> None:
        notes = notes_of(req)
        run, notes.run = notes.run, None
        if run is not None:
            self.num_running -= 1
            self._free_planned(run)
        self.waiting.ended(req)

    def _keep_prefill(self, req: "Req", run: ServedRequest, up_to: int) -> None:
        slots = self._written(req, run, up_to)
        if slots:
            self._keep(req, run, run.lease, slots)

    def _keep_end(self, req: "Req", run: ServedRequest, up_to: int) -> "EndState | None":
        """Keep what the prefill left, and the request's last state; returns that if it was kept."""
        slots = self._written(req, run, up_to)
        end = self._end_state(req, up_to)
        if self.end_source in OF_A_STEP and not self._on_all_ranks(end is not None)[0]:
            # Where a hook has failed, the step is not known.
            end = None
        # An answer whose thinking is stripped is to leave nothing of it.
        is_answer_kept = up_to > run.lease.request.num_prompt_tokens
        is_of_drafts = hasattr(req, ENDED_IN) or (self.end_source is EndStateSource.TRACKED and self.page_size == 1)
        self.stats.num_ends_not_kept += is_answer_kept and is_of_drafts and (end is None or end.depth < up_to)
        deepest = max(slots, default=req.kv.cache_protected_len)
        if end is not None and end.depth > deepest and may_keep_end(self, self.clock()):
            slots[end.depth] = end.slot
        else:
            end = None
        if slots:
            prompt, match = run.lease
            # Its path stays the prompt's: what has come since stands beside it (`Suffix`).
            num_output_tokens = max(up_to + 1 - prompt.num_prompt_tokens, 0)
            request = replace(prompt, num_output_tokens=num_output_tokens, num_known_tokens=max(slots))
            closing, end_depth = closing_of_answer(req), None if end is None else end.depth
            self._keep(req, run, Lease(request, match), slots, end_depth, closing)
        return end

    def _written(self, req: "Req", run: ServedRequest, up_to: int) -> dict[int, torch.Tensor]:
        """Slots of the checkpoints up to `up_to` tokens, taken off the run; those that no model wrote are freed."""
        written: dict[int, torch.Tensor] = {}
        unwritten: dict[int, torch.Tensor] = {}
        for depth in sorted(run.checkpoints):
            if depth > up_to:
                break
            checkpoint = run.checkpoints.pop(depth)
            self.waiting.arrived(req, depth)
            if checkpoint.is_written is None:
                fault = settle(checkpoint.batch, self._num_parts, self.faults.first is None, self._on_all_ranks)
                if fault is not None:
                    self.faults.note(fault)
            (written if checkpoint.is_written else unwritten)[depth] = checkpoint.slot
        if unwritten:
            logger.warning("marconi: %d states of a prefill were not written and are not kept", len(unwritten))
            run.absent |= dict.fromkeys(unwritten, Cause.NOT_WRITTEN)
            self.stats.num_not_written += len(unwritten)
            self.pools.free_unkept(unwritten.values())
        return written

    def _on_all_ranks(self, *flags: bool) -> list[bool]:
        """Which of `flags` are set on every rank; ranks wait for each other, and for no device."""
        agreed = torch.tensor(flags, dtype=torch.int32)
        self._all_reduce_attn_groups(agreed, torch.distributed.ReduceOp.MIN)
        return [bool(flag) for flag in agreed.tolist()]

    def _end_state(self, req: "Req", up_to: int) -> "EndState | None":
        return end_state(req, up_to, self.end_source, self.components[ComponentType.MAMBA], self.req_to_token_pool)

    def _release_states(self, req: "Req", kept: "EndState | None") -> None:
        """Free the slots that the request holds, but for the one that the tree has taken."""
        pool, kv = self.req_to_token_pool, req.kv
        if kept is None or kept.tracking_index is not None:
            pool.free_mamba_cache(req, mamba_ping_pong_track_buffer_to_keep=kept and kept.tracking_index)
        elif self.enable_mamba_extra_buffer:
            # The pool frees the working slot and the tracking slots; the tree has the working slot.
            kv.mamba_pool_idx = self._no_slot
            pool.free_mamba_cache(req)
        else:
            kv.mamba_pool_idx = None

    def _keep(
        self,
        req: "Req",
        run: ServedRequest,
        lease: Lease,
        slots: dict[int, torch.Tensor],
        end_depth: int | None = None,
        closing: int = NO_CLOSING,
    ) -> None:
        """States in `slots`, by depth, and the KV before the last of them join the tree, and the lock moves there."""
        kv, core = req.kv, self.tree_core
        hybrid, memory = core.hybrid, core.memory
        slots = self.pools.join(slots, end_depth)
        depths = sorted(slots)
        shared, end = kv.cache_protected_len, depths[-1]
        start = core.start_of(req.lock.node, lease.request.namespace)
        assert start.depth == shared, f"{shared} tokens in use, and a lock on {start}"
        suffix = Suffix(start, path_of(req.full_untruncated_fill_ids, end, shared))
        # A row is of int32: widening it copies it.
        indices = self.req_to_token_pool.req_to_token[kv.req_pool_idx, shared:end].long()
        num_tokens = hybrid.tree.num_tokens
        tenant = Tenant(req.extra_key, req.cache_salt)
        insert = partial(hybrid.insert, lease, depths, self.clock(), suffix, closing, run.absent, run.plan.trials)
        made = core.insert(indices, shared, tenant, insert)
        if (trail := notes_of(req).trail) is not None:
            trail.left(made)
        num_held = end - (hybrid.tree.num_tokens - num_tokens)
        for node in made:
            slot = slots[node.depth]
            if node in memory.states:
                self.pools.free([slot])
            else:
                memory.keep_state(node, slot)
                if node.depth == end_depth:
                    memory.ends.add(node)
        if num_held > shared:
            # Another request brought the same KV first: the tree's stays, this one's is freed.
            self.token_to_kv_pool_allocator.free_segment(indices[: num_held - shared], start_pos=0)
            held = memory.path_indices(made[-1], suffix.start)[: num_held - shared]
            self.req_to_token_pool.write((kv.req_pool_idx, slice(shared, num_held)), held)
        node_id = core.move_lock(req.lock.node, made[-1])
        req.lock = TreeLock(node_id, DecLockRefParams(node_id))
        req.last_node = node_id
        kv.cache_protected_len = end
        kv.cache_inserted_len = max(kv.cache_inserted_len, end)

    # Slots and victims

    def _reserved(self, reqs: "list[Req]") -> Amount:
        """Memory that requests take before the states of this prefill join the tree."""
        num_copied = len(self.ongoing_write_through) + len(self.ongoing_load_back)
        return self.pools.reserved(reqs, self.mamba_protected_size() - num_copied)

    def evictable(self) -> Amount:
        """KV on no locked path, and unlocked states."""
        core = self.tree_core
        return Amount(core.evictable_size(), core.mamba_evictable_size())

    def evict_state(self, now_s: float) -> None:
        """Free a slot that the tree holds, if any may be freed."""
        params = EvictParams(num_tokens=0, mamba_num=1)
        if self.pools.are_slots_shared:
            self.evict_for_alloc(params)
        else:
            self.evict(params)

    def _free_planned(self, run: ServedRequest) -> None:
        self.pools.free_unkept([run.checkpoints.pop(depth).slot for depth in [*run.checkpoints]])

    def evict_for_alloc(
        self, params: EvictParams, *, allocation_reclaim_satisfied: Callable[[], bool] | None = None
    ) -> EvictResult:
        """Evict as SGLang asks; of one pool by worth, whichever side is short, and not first what that side holds."""
        if self.pools.state_need is not Need.BYTES or self.disable:
            return super().evict_for_alloc(params, allocation_reclaim_satisfied=allocation_reclaim_satisfied)
        assert allocation_reclaim_satisfied is None, "a quota of KV and states apart"
        wanted = {ComponentType.FULL: params.num_tokens, ComponentType.MAMBA: params.mamba_num}
        return self._evict(
            params,
            {kind: (kind, self._component_available_size(kind) + count) for kind, count in wanted.items() if count > 0},
        )

    def _evict(
        self,
        params: EvictParams,
        available_size_targets: Targets | None = None,
        *,
        allocation_reclaim_satisfied: Callable[[], bool] | None = None,
    ) -> EvictResult:
        """Evict; SGLang's own loop does it for pools that share their bytes."""
        satisfied = allocation_reclaim_satisfied
        if self.disable or satisfied is not None:
            return super()._evict(params, available_size_targets, allocation_reclaim_satisfied=satisfied)
        start_s, core = time.perf_counter(), self.tree_core
        num_window_tokens = core.memory.num_window_tokens
        try:
            freed = self.pools.evict(core, params, available_size_targets or {}, self._component_available_size)
        finally:
            self.pools.give_back(core)
        self.update_eviction_metrics(freed.num_tokens, start_s)
        return EvictResult(
            num_tokens_evicted=freed.num_tokens,
            swa_num_tokens_evicted=num_window_tokens - core.memory.num_window_tokens,
            mamba_num_evicted=freed.num_states,
        )


def pools_of(params: "CacheInitParams", forward_stream: Any = None) -> DevicePools:
    """The pools of a server, by how its memory is divided."""
    requests, kv = params.req_to_token_pool, params.token_to_kv_pool_allocator
    memory = JointMemory.of(kv)
    if memory is not None:
        return JointPools(requests, kv, memory)
    if getattr(requests, "mamba_ckpt_pool", None) is not None:
        return Int8DevicePools(requests, kv, forward_stream)
    if params.swa_retain_window is not None:
        return WindowedPools(requests, kv)
    return DevicePools(requests, kv)
