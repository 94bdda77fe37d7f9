"""A server without a model: requests take memory as they run, from two pools or from one.

What SGLang's scheduler does with a request, in the same order, so that the engine's cache and this replay give the same
hits, one after the other and beside each other (`test/engine/test_host_replay.py`):

    load          what a host tier, or a store behind it, has beyond the device's states, if that saves time: KV, a slot
    match         lock the state that it starts from; a slot for its copy, on which the request works
    begin         touch that state; plan
    each chunk    slots for the planned states within it; before the first, then, the rest of the working slots; then KV
                  for its tokens; at its end the states join the tree, those of the last chunk of a request without
                  decoding together with its end
    decode        KV, a token or a page at a time
    finish        its last state joins the tree, and all else is given back

An admission that does not plan ahead is a baseline (`policy/admission/base.py`): its states stand where it says, the
answer's included, and nowhere else, and the slot of one is taken when its chunk ends, as SGLang does: the request hands
over the one that it has held, and gets another.

SGLang asks for more KV than it takes where pages have several tokens: a page beyond a chunk, and a free one at every
step of decoding. It is evicted here, too. A request that does not fit even alone is counted and leaves nothing.

In one pool (`--enable-unified-memory`) KV and states take bytes of the same memory, and any victim makes room for
either; a planned state is taken only if KV for the prompt is left beside it.

On a block trace, a state beyond what is known of a request stands at the end of what is known.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import replace
from functools import partial

from marconi.lifecycle.pools import NOTHING, Amount
from marconi.lifecycle.running import Missing, Rows, RunningRequest, grant, may_keep_end, reserved, take_planned
from marconi.policy.admission.plan import PrefillPlan
from marconi.policy.causes import Cause
from marconi.policy.counters import Counters
from marconi.policy.forecast.turns import NO_CLOSING, closing_of
from marconi.policy.hybrid_cache import HybridCache, Suffix
from marconi.policy.misses import Explanation
from marconi.policy.request import Lease, Request
from marconi.replay.pools import Pool
from marconi.replay.scheduling import Scheduling
from marconi.replay.store import StoreReplay
from marconi.tree import Match, Node


class ServerReplay:
    """Serves requests, one after the other or beside each other."""

    def __init__(self, hybrid: HybridCache, pools: Pool, scheduling: Scheduling) -> None:
        """The rule of `served` must answer the needs of `pools`."""
        self.hybrid = hybrid
        self.pools = pools
        self.scheduling = scheduling
        self.store: StoreReplay | None = None
        self.num_prefilled = 0
        """Requests that run and have begun their prefill."""
        self.page_tokens = hybrid.tree.unit_tokens
        self._in_use: frozenset[Node] = frozenset()
        self._locked = NOTHING
        """KV on the paths to the nodes `_in_use`, and their states: neither changes while they stay locked."""

    @property
    def counters(self) -> Counters:
        """The counts so far."""
        return self.hybrid.counters

    @property
    def chosen(self) -> str | None:
        """The choice of a rule that tunes itself, in words; None of all others."""
        return None

    @property
    def held(self) -> Amount:
        """The contents of the cache."""
        return Amount(self.hybrid.tree.num_tokens, self.hybrid.tree.num_states)

    def run_together(self, max_running: int) -> int:
        """Let up to `max_running` requests run beside each other, and no more than a server has rows for; how many."""
        num_rows = self.pools.num_rows(self.scheduling.num_working_slots)
        self.scheduling = replace(self.scheduling, max_running=max(1, min(max_running, num_rows)))
        return self.scheduling.max_running

    def fits(self, request: Request) -> bool:
        """True if there is memory for `request` alone: its KV, the state that it starts from, and its slots.

        Those that it does not hold count, too: a server is refused without room for them.
        """
        num_slots = self.scheduling.num_working_slots + self.scheduling.num_lent_slots + 1
        return self.pools.holds(self.pages(request.num_processed_tokens), num_slots)

    def serve(self, request: Request) -> int:
        """Serve `request` at its arrival; returns its hit tokens, none of one that does not fit."""
        if not self.fits(request):
            self.refuse(request)
            return 0
        run = self.run(request, request.arrival_s)
        run.begin()
        run.prefill()
        run.decode()
        run.finish()
        self.end_steps(max(request.num_output_tokens, 1), request.arrival_s)
        return run.num_hit_tokens

    def refuse(self, request: Request) -> None:
        """Count a request that does not fit, and is served uncached."""
        self.counters.num_too_large += 1
        self.counters.num_missed_tokens[Cause.UNCACHED] += request.num_prompt_tokens

    def run(self, request: Request, now_s: float) -> "ReplayedRequest":
        """Begin `request`, for which there is room beside those that run."""
        kind = ReplayedRequest if self.hybrid.admission.plans_ahead else BaselineRequest
        return kind(self, request, now_s)

    def has_room(self, request: Request, match: Match, running: Iterable["ReplayedRequest"]) -> bool:
        """True if `request`, of which the cache has `match`, can run to its end beside those `running`.

        Each keeps a state of its own from eviction, beside what it works on.
        """
        source = match.checkpoint
        host = self.hybrid.host
        is_loaded = host is not None and host.to_load(request, match) > 0
        num_slots = self.scheduling.num_working_slots + 1 + is_loaded
        needs = [Amount(self.pages(request.num_processed_tokens) - source.depth + self.page_tokens, num_slots)]
        needs += (run.needs for run in running)
        reserved = Amount(sum(need.num_tokens for need in needs), sum(need.num_states for need in needs))
        return self.pools.spares(self.evictable(source if source.depth else None), reserved)

    def match(self, request: Request, now_s: float) -> tuple[Match, float]:
        """Match `request`, reading and loading a state if that pays; returns the match and the seconds of both."""
        hybrid, host, load_s = self.hybrid, self.hybrid.host, 0.0
        match = hybrid.match(request)
        read_s = 0.0 if self.store is None else self.store.read(request, match, now_s)
        match = hybrid.match(request) if read_s else match
        depth = 0 if host is None else host.to_load(request, match)
        if host is not None and depth:
            held = match.checkpoint if match.checkpoint.depth else None
            hybrid.move_lock(None, held)
            with host.loading(request, match, now_s):
                num_tokens = self._take_for_load(request, depth, now_s)
                load_s = 0.0 if num_tokens is None else hybrid.load(request, depth, num_tokens)
            hybrid.move_lock(held, None)
            match = hybrid.match(request)
        if match.checkpoint.depth and not self.pools.has_slot_for_copy:
            match = hybrid.tree.match(request.path, 0, request.namespace)
        return match, read_s + load_s

    def _take_for_load(self, request: Request, depth: int, now_s: float) -> int | None:
        """Take a slot, and KV for what is not there up to `depth`; how many tokens, None if there is too little memory.

        KV that the request shares beyond the last state that it has may be evicted for it.
        """
        pools, hybrid = self.pools, self.hybrid
        while True:
            num_tokens = max(depth - hybrid.match(request).num_live_tokens, 0)
            if pools.spares(NOTHING, Amount(num_tokens, 1)):
                pools.take(num_tokens, 1)
                return num_tokens
            freed = hybrid.evict(pools.kv_need if pools.num_free_slots else pools.state_need, now_s)
            if freed is None:
                return None
            self.pools.collect(freed)

    def take_slots(self, num_slots: int, now_s: float) -> None:
        """Take slots that must be had."""
        pools = self.pools
        while pools.num_free_slots < num_slots and (freed := self.hybrid.evict(pools.state_need, now_s)):
            pools.collect(freed)
        pools.take(num_slots=num_slots)

    def evictable(self, but: Node | None = None) -> Amount:
        """Evictable memory: KV on no locked path, and unlocked states; `but` counts as locked, too."""
        in_use = self.hybrid.tree.locked if but is None else self.hybrid.tree.locked | {but}
        if in_use != self._in_use:
            self._in_use, self._locked = frozenset(in_use), self._amount_of(in_use)
        return self.held.without(self._locked)

    def _amount_of(self, in_use: Set[Node]) -> Amount:
        """KV on the paths to `in_use`, and their states."""
        seen, num_tokens = set[Node](), 0
        for end in in_use:
            node = end
            while node.parent is not None and node not in seen:
                seen.add(node)
                node = node.parent
            num_tokens += end.depth - node.depth
        return Amount(num_tokens, len(in_use))

    def evict_state(self, now_s: float) -> None:
        """Evict for a state, if anything may be evicted."""
        freed = self.hybrid.evict(self.pools.state_need, now_s)
        if freed is not None:
            self.pools.collect(freed)

    def take_chunks(self, chunks: Sequence[tuple["ReplayedRequest", int]]) -> None:
        """Take memory for the next chunk of each request of a batch, up to the tokens that stand beside it."""
        if self.hybrid.admission.plans_ahead:
            planned = [(run, run.num_computed, end) for run, end in chunks]
            for row, depth, slot in grant(planned, self, partial(self._reserved, chunks), chunks[0][0].now_s):
                if slot is not None:
                    chunks[row][0].has_slot(depth)
        # SGLang asks for the KV of a batch at once.
        suffix = self.page_tokens if self.page_tokens > 1 else 0
        num_asked, now_s = 0, chunks[0][0].now_s
        for run, end in chunks:
            run.take_working_slots(self.scheduling.num_working_slots)
            num_asked += end - run.num_computed + suffix
            now_s = max(now_s, run.now_s)
        self.free_tokens(num_asked, now_s)
        for run, end in chunks:
            run.allocate_chunk(end)
        self.end_steps(1, chunks[0][0].now_s)

    def end_steps(self, num_steps: int, now_s: float) -> None:
        """Write what the host drops next, `num_steps` steps after the last call."""
        if self.store is not None:
            self.store.write(now_s, num_steps)

    def _reserved(self, chunks: Sequence[tuple["ReplayedRequest", int]]) -> Amount:
        """Memory that requests take before the states of the next prefill, of `chunks`, join the tree."""
        num_rows, num_slots = self.scheduling.max_running, self.scheduling.num_working_slots
        num_free, num_locked = num_rows - self.num_prefilled, len(self.hybrid.tree.locked)
        rows = Rows(num_rows, num_free, num_slots, num_locked, self.page_tokens)
        return reserved([run.missing for run, _ in chunks], rows, self.pools.are_slots_shared)

    def free_tokens(self, num_tokens: int, now_s: float) -> None:
        """Evict until `num_tokens` tokens of KV are free, or nothing is left to evict."""
        pools = self.pools
        while pools.num_free_tokens < num_tokens and (freed := self.hybrid.evict(pools.kv_need, now_s)):
            pools.collect(freed)

    def leave(
        self,
        lease: Lease,
        depths: Sequence[int],
        held: Node | None,
        closing: int,
        absent: Mapping[int, Cause],
        now_s: float,
        trials: Collection[int] = (),
    ) -> Node:
        """Hand states and KV beyond `held`, the request's node, to the tree; what it has already comes back.

        `absent` are depths of planned states without a slot, `trials` of those on trial. Returns the node of the
        deepest.
        """
        tree = self.hybrid.tree
        num_tokens, num_states = tree.num_tokens, tree.num_states
        suffix, num_shared_tokens = None, 0
        if held is not None:
            num_shared_tokens = held.depth
            path = lease.request.path[tree.offset(held.depth) : tree.offset(depths[-1])]
            suffix = Suffix(held, path)
        made = self.hybrid.insert(lease, depths, now_s, suffix, closing, absent, trials)
        num_duplicates = depths[-1] - num_shared_tokens - (tree.num_tokens - num_tokens)
        self.pools.give(num_duplicates)
        self.pools.hand_over(len(depths), tree.num_states - num_states)
        return made[-1]

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless, between requests, every token and slot is free or held by the tree."""
        self.pools.check_balance(self.held)

    def pages(self, num_tokens: int) -> int:
        """Tokens of the pages that `num_tokens` tokens take."""
        return -(-num_tokens // self.page_tokens) * self.page_tokens


class ReplayedRequest(RunningRequest):
    """One request on its way."""

    def __init__(self, server: ServerReplay, request: Request, now_s: float) -> None:
        self._server = server
        self._request = request
        self._num_processed = request.num_processed_tokens
        self.now_s = now_s
        """The clock, which advances while it runs."""
        prompt = self._visible(request)
        match, self.load_s = server.match(prompt, now_s)
        """Seconds that its prefill waits for the load of the state that it starts from."""
        super().__init__(Lease(prompt, match))
        self._held: Node | None = None
        self._num_working_slots = self._num_slots = 0
        """Slots that it works on, and all that it holds."""
        source = self.lease.match.source
        if source is not None:
            if not server.pools.num_free_slots:
                # It is locked while a slot is made free, and again once the request is admitted.
                self._hold(source)
            self.take_working_slots(1)
            if self._held is not None:
                self._hold(None)
            self._hold(source)
        self.num_hit_tokens = 0 if source is None else source.depth
        self._num_shared_tokens = self._num_allocated_tokens = self.num_hit_tokens
        self.num_computed = self.num_hit_tokens
        """Tokens of the prompt that were cached, or for which memory was taken."""
        self.explanation: Explanation | None = None
        """Its misses and why; None before it begins."""
        self._waiting: list[int] = []
        """Depths of states that the last chunk left and the tree has not taken yet."""

    @property
    def needs(self) -> Amount:
        """Memory that it still takes until it ends: KV, working slots and one state that it keeps from eviction."""
        server = self._server
        num_tokens = server.pages(self._num_processed) - self._num_allocated_tokens + server.page_tokens
        return Amount(num_tokens, server.scheduling.num_working_slots - self._num_working_slots + 1)

    @property
    def missing(self) -> Missing:
        """Memory that its prefill has yet to take: KV, and working slots."""
        num_slots = self._server.scheduling.num_working_slots - self._num_working_slots
        return Missing(self._request.num_prompt_tokens - self.num_computed, num_slots, self._held is not None)

    def begin(
        self,
        shared: Sequence[int] = (),
        asked: Sequence[int] = (),
        distance: int | None = None,
        system_end: int = 0,
    ) -> PrefillPlan:
        """Touch the state that it starts from, and plan; the arguments are those of `HybridCache.plan`."""
        self.explanation = self._server.hybrid.begin(self.lease, self.now_s)
        self.plan = self._planned(shared, asked, distance, system_end)
        self._server.num_prefilled += 1
        return self.plan

    def prefill(self) -> None:
        """Compute the prompt, a chunk at a time."""
        position, prompt_end = self.num_hit_tokens, self._request.num_prompt_tokens
        while position < prompt_end:
            position = min(position + self._server.scheduling.chunk_tokens, prompt_end)
            self.take_chunk(position)
            self.leave_chunk()

    def take_chunk(self, end: int) -> None:
        """Take memory for the prompt up to `end`, beyond the computed tokens, in a batch of its own."""
        self._server.take_chunks(((self, end),))

    def has_slot(self, depth: int) -> None:
        """The planned state at `depth` has a slot."""
        self._num_slots += 1
        self._waiting = sorted([*self._waiting, depth])

    def allocate_chunk(self, end: int) -> None:
        """Take KV up to `end`, which is free."""
        self._allocate(end)
        self.num_computed = end

    def leave_chunk(self) -> None:
        """Leave the states of the chunk for which memory was taken last, but for those that wait for the end."""
        if self._waiting and self.num_computed < self._num_processed:
            self._take_slots_of_waiting()
            if self._waiting:
                self._hold(self._leave(self.lease, self._waiting))
            self._waiting = []

    def decode(self, end: int | None = None) -> None:
        """Compute the answer, or all up to `end` tokens.

        A free page is asked for at every step, also where none is taken: what that evicts in all is what the last step
        asks for.
        """
        end = self._num_processed if end is None else end
        if end > self._request.num_prompt_tokens:
            server = self._server
            num_asked = server.pages(end - 1) - self._num_allocated_tokens + server.page_tokens
            server.free_tokens(num_asked, self.now_s)
            self._allocate(end)

    def finish(self) -> None:
        """Leave the last states, and give everything else back."""
        left = max(self._waiting, default=self._num_shared_tokens)
        ends = [end for end in self._ends() if end > left]
        if ends and may_keep_end(self._server, self.now_s):
            self._waiting += ends
        if self._waiting:
            self._take_slots_of_waiting(but_last=True)
        depths = self._waiting
        if depths:
            self._leave(Lease(self._request, self.lease.match), depths, self._closing())
        self._server.pools.give(self._num_allocated_tokens - self._num_shared_tokens, self._num_slots)
        self._hold(None)
        self._server.num_prefilled -= 1

    def _visible(self, request: Request) -> Request:
        """The part of `request` that is known when it comes: its prompt."""
        return request.known_for(min(request.num_known_tokens, request.num_prompt_tokens), 0)

    def _planned(
        self, shared: Sequence[int], asked: Sequence[int], known_distance: int | None, system_end: int
    ) -> PrefillPlan:
        """Where the prefill leaves states."""
        return self._server.hybrid.plan(self.lease, asked, shared, known_distance, system_end)

    def _take_slots_of_waiting(self, but_last: bool = False) -> None:
        """Take slots for the states that wait, of which there are some, if they have none; one without is dropped."""

    def _ends(self) -> Sequence[int]:
        """Where states of the answer stand; the last takes a slot that the request has worked on."""
        server, track, end = self._server, self._server.scheduling.track_tokens, self._num_processed
        if track is not None:
            end = end // track * track
            if end <= self._request.num_prompt_tokens:
                return ()
        end = min(end, self._request.num_known_tokens) // server.page_tokens * server.page_tokens
        return (end,) if end else ()

    def _closing(self) -> int:
        """How the answer closed; `NO_CLOSING` where its tokens are not known."""
        tree, request = self._server.hybrid.tree, self._request
        num_bytes = tree.unit_bytes // tree.unit_tokens
        at = (request.num_prompt_tokens + request.num_output_tokens - 2) * num_bytes
        if not num_bytes or request.num_output_tokens < 2 or len(request.path) < at + num_bytes:
            return NO_CLOSING
        return closing_of(int.from_bytes(request.path[at : at + num_bytes], "little"))

    def take_working_slots(self, up_to: int) -> None:
        """Take slots until the request works on `up_to` of them."""
        num_slots = up_to - self._num_working_slots
        if num_slots:
            self._server.take_slots(num_slots, self.now_s)
            self._num_working_slots = up_to
            self._num_slots += num_slots

    def _allocate(self, end: int) -> None:
        """KV up to `end`, which is free."""
        num_taken = self._server.pages(end) - self._num_allocated_tokens
        self._server.pools.take(num_taken)
        self._num_allocated_tokens += num_taken

    def _leave(self, lease: Lease, depths: Sequence[int], closing: int = NO_CLOSING) -> Node:
        newest = self._server.leave(lease, depths, self._held, closing, self.absent, self.now_s, self.plan.trials)
        self._num_shared_tokens = depths[-1]
        self._num_slots -= len(depths)
        return newest

    def _hold(self, node: Node | None) -> None:
        """Lock `node` in place of the node locked so far."""
        self._server.hybrid.move_lock(self._held, node)
        self._held = node


class BaselineRequest(ReplayedRequest):
    """A request whose states stand where its admission says, knowing the answer."""

    def _visible(self, request: Request) -> Request:
        return request

    def _planned(
        self, shared: Sequence[int], asked: Sequence[int], known_distance: int | None, system_end: int
    ) -> PrefillPlan:
        return PrefillPlan(self._server.hybrid.admission.depths(*self.lease))

    def allocate_chunk(self, end: int) -> None:
        """Also note which states will stand within it."""
        self._waiting = [depth for depth in self.plan.depths if self.num_computed < depth <= end]
        super().allocate_chunk(end)

    def _take_slots_of_waiting(self, but_last: bool = False) -> None:
        waiting = self._waiting
        self._waiting = waiting[-1:] if but_last else []
        for depth in waiting[: len(waiting) - len(self._waiting)][::-1]:
            if take_planned(self, depth, self._server, NOTHING, self.now_s) is not None:
                self.has_slot(depth)

    def _ends(self) -> Sequence[int]:
        return [depth for depth in self.plan.depths if depth > self._request.num_prompt_tokens]

    def _closing(self) -> int:
        return NO_CLOSING
