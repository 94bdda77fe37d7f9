"""Serial replay with memory taken as a server takes it: while a request runs, from two pools or from one.

What SGLang's scheduler does with one request after the other, in the same order, so that the engine's cache and this
replay give the same hits (`engine/host`, `test/engine/test_host_replay.py`):

    match         lock the state that it starts from; a slot for its copy, on which the request works
    begin         touch that state; plan
    each chunk    slots for the planned states within it; before the first, then, the rest of the working slots; then KV
                  for its tokens; at its end the states join the tree, those of the last chunk of a request without
                  decoding together with its end
    decode        KV, a token or a page at a time
    finish        its last state joins the tree, and all else is given back

SGLang asks for more KV than it takes where pages have several tokens: one page beyond a chunk, and a free one at every
step of decoding. What is evicted for that is evicted here. A request that does not fit even alone is counted and
leaves nothing.

In one pool (`--enable-unified-memory`) KV and states take bytes of the same memory, and any victim makes room for
either; a planned state is taken only if KV for the prompt is left beside it.

On a block trace, a state beyond what is known of a request stands at the end of what is known.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from marconi.policy.admission.base import num_processed_tokens
from marconi.policy.admission.prefill import PrefillPlan
from marconi.policy.forecast.turns import NO_CLOSING, closing_of
from marconi.policy.lease import Lease
from marconi.policy.request import Request
from marconi.policy.served import ServedTree
from marconi.replay.pools import Amount, Memory
from marconi.tree import Freed, Node


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How a server runs a request."""

    chunk_tokens: int = 8192
    """The most that one prefill computes; a multiple of the page."""
    num_working_slots: int = 1
    """Slots that a request holds throughout."""
    track_tokens: int | None = None
    """The state at a request's end stands at the last multiple of this that decoding passed; None: at the end."""
    max_running: int = 1
    """Requests beside each other: a planned state leaves the slots alone of those that may still start."""

    def __post_init__(self) -> None:
        """Raise `ValueError` for a count below 1."""
        for name in ("chunk_tokens", "num_working_slots", "track_tokens", "max_running"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name} must be 1 or more, got {count}")


class ServerReplay:
    """Serves requests one after the other."""

    def __init__(self, served: ServedTree, pools: Memory, scheduling: Scheduling) -> None:
        """Raise `ValueError` for fewer slots than a request takes that starts from a state.

        The rule of `served` must answer the needs of `pools`.
        """
        if pools.num_slots <= scheduling.num_working_slots:
            least = scheduling.num_working_slots + 1
            raise ValueError(
                f"slots must be {least} or more, for a request and the state it starts from, got {pools.num_slots}"
            )
        self.served = served
        self.pools = pools
        self.scheduling = scheduling
        self.num_prefilled = 0
        """Requests that run and have begun their prefill."""
        self._in_use: list[Node] = []
        """The node that each running request has locked, if it has."""

    @property
    def page_tokens(self) -> int:
        """Tokens in a page."""
        return self.served.tree.unit_tokens

    def serve(self, request: Request) -> int:
        """Serve `request` at its arrival; returns its hit tokens."""
        num_tokens, num_slots = self.pages(num_processed_tokens(request)), self.scheduling.num_working_slots + 1
        if not self.pools.holds(num_tokens, num_slots):
            self.served.counters.num_too_large += 1
            return 0
        run = self.run(request, request.arrival_s)
        run.prefill()
        run.decode()
        run.finish()
        return run.num_hit_tokens

    def run(self, request: Request, now_s: float) -> "Run":
        """Begin `request`, for which there is room beside those that run."""
        return Run(self, request, now_s)

    def take_slots(self, num_slots: int, now_s: float) -> None:
        """Take slots that must be had."""
        while self.pools.num_free_slots < num_slots:
            freed = self.served.evict(self.pools.state_need, now_s)
            assert freed is not None, "no slot is left to evict for a request that fits"
            self._collect(freed)
        self.pools.take(num_slots=num_slots)

    def use(self, node: Node | None, in_place_of: Node | None) -> None:
        """Lock `node` for a running request, and unlock what it had locked before."""
        tree = self.served.tree
        if node is not None:
            tree.lock(node)
            self._in_use.append(node)
        if in_place_of is not None:
            tree.unlock(in_place_of)
            self._in_use.remove(in_place_of)
        self.served.tell()

    def evictable(self) -> Amount:
        """What may go: KV that is on no locked path, and states that nobody has locked."""
        tree, seen = self.served.tree, set[Node]()
        num_locked_tokens = 0
        for end in self._in_use:
            node = end
            while node.parent is not None and node not in seen:
                seen.add(node)
                num_locked_tokens += node.depth - node.parent.depth
                node = node.parent
        return Amount(tree.num_tokens - num_locked_tokens, tree.num_states - len(set(self._in_use)))

    def take_planned_slot(self, on_probation: bool, reserved: Amount, now_s: float) -> bool:
        """Take a slot for a planned state; False if there is none beside what is reserved for requests.

        One on probation takes a free slot or that of another one on probation.
        """
        pools, served = self.pools, self.served
        evictable = self.evictable()
        if not pools.spares_slot(Amount(0, served.tiers.num_on_probation) if on_probation else evictable, reserved):
            return False
        if not pools.num_free_slots:
            need = pools.state_need
            freed = served.evict_on_probation(need, now_s) if on_probation else served.evict(need, now_s)
            if freed is None:
                return False
            self._collect(freed)
        pools.take(num_slots=1)
        return True

    def take_tokens(self, num_tokens: int, num_asked: int, now_s: float) -> None:
        """Take KV that must be had, after evicting for the `num_asked` tokens that the server asks for."""
        pools = self.pools
        while pools.num_free_tokens < num_asked:
            freed = self.served.evict(pools.kv_need, now_s)
            if freed is None:
                break
            self._collect(freed)
        assert pools.num_free_tokens >= num_tokens, "no KV is left to evict for a request that fits"
        pools.take(num_tokens)

    def leave(
        self,
        lease: Lease,
        depths: Sequence[int],
        on_probation: Collection[int],
        num_shared_tokens: int,
        closing: int,
        now_s: float,
    ) -> Node:
        """Hand states and KV beyond `num_shared_tokens` to the tree; what it has already comes back.

        Returns the node of the deepest.
        """
        tree = self.served.tree
        num_tokens, num_states = tree.num_tokens, tree.num_states
        made = self.served.leave(lease, depths, now_s, on_probation, closing=closing)
        num_duplicates = depths[-1] - num_shared_tokens - (tree.num_tokens - num_tokens)
        self.pools.give(num_duplicates, len(depths) - (tree.num_states - num_states))
        return made[-1]

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless, between requests, every token and slot is free or held by the tree."""
        tree, pools = self.served.tree, self.pools
        pools.check_balance(Amount(tree.num_tokens, tree.num_states))

    def pages(self, num_tokens: int) -> int:
        """Tokens of the pages that `num_tokens` tokens take."""
        return -(-num_tokens // self.page_tokens) * self.page_tokens

    def _collect(self, freed: Freed) -> None:
        self.pools.give(*freed)


class Run:
    """One request on its way."""

    def __init__(self, server: ServerReplay, request: Request, now_s: float) -> None:
        self._server = server
        self._request = request
        self._num_processed = num_processed_tokens(request)
        self.now_s = now_s
        """The clock, which goes on while it runs."""
        served = server.served
        known = min(request.num_known_tokens, request.num_prompt_tokens)
        prompt = replace(request, num_output_tokens=0, num_known_tokens=known)
        self._lease = Lease(prompt, served.match(prompt))
        self._held: Node | None = None
        self._num_slots_to_take = server.scheduling.num_working_slots
        source = self._lease.source
        if source is not None:
            if not server.pools.num_free_slots:
                # It is locked while a slot is made free, and again once the request is admitted.
                self._hold(source)
            self._take_working_slots(1)
            self._hold(None)
            self._hold(source)
        self.num_hit_tokens = 0 if source is None else source.depth
        self._num_shared_tokens = self._num_allocated_tokens = self.num_hit_tokens
        self._plan = PrefillPlan(())
        self._waiting: list[int] = []
        """Depths of states that the last chunk left and the tree has not taken yet."""

    def prefill(self) -> None:
        """Compute the prompt, a chunk at a time."""
        served = self._server.served
        served.arrive(self._lease, self.now_s)
        served.tell()
        self._plan = self._planned()
        self._server.num_prefilled += 1
        position, prompt_end = self.num_hit_tokens, self._request.num_prompt_tokens
        while position < prompt_end:
            end = min(position + self._server.scheduling.chunk_tokens, prompt_end)
            self._waiting = self._take_planned_slots(position, end)
            self._take_working_slots(self._num_slots_to_take)
            beyond = self._server.page_tokens if self._server.page_tokens > 1 else 0
            self._allocate(end, end - position + beyond)
            if end < self._num_processed:
                self._leave_waiting()
            position = end

    def decode(self) -> None:
        """Compute the answer, a token at a time."""
        for end in range(self._request.num_prompt_tokens + 1, self._num_processed + 1):
            self._allocate(end, self._server.page_tokens)

    def finish(self) -> None:
        """Leave the last state, and give everything else back."""
        scheduling, pools = self._server.scheduling, self._server.pools
        end = self._end()
        depths = self._waiting
        if end > max(depths, default=self._num_shared_tokens):
            depths = [*depths, end]
        if depths:
            request = replace(self._request, num_known_tokens=depths[-1])
            closing, on_probation = self._closing(), self._plan.on_probation
            if depths[-1] == end:
                on_probation = self._server.served.on_probation(self._plan, end, closing)
            self._leave(Lease(request, self._lease.match), depths, on_probation, closing)
        num_given_slots = len(depths) - self._num_slots_for_waiting()
        num_own_tokens = self._num_allocated_tokens - self._num_shared_tokens
        pools.give(num_own_tokens, scheduling.num_working_slots - num_given_slots)
        self._hold(None)
        self._server.num_prefilled -= 1

    def _end(self) -> int:
        """Where the last state of the request stands; 0 if there is none."""
        server, track = self._server, self._server.scheduling.track_tokens
        end = self._num_processed
        if track is not None:
            end = end // track * track
            if end <= self._request.num_prompt_tokens:
                return 0
        return min(end, self._request.num_known_tokens) // server.page_tokens * server.page_tokens

    def _closing(self) -> int:
        """How the answer closed; `NO_CLOSING` where its tokens are not known."""
        tree, request = self._server.served.tree, self._request
        num_bytes = tree.unit_bytes // tree.unit_tokens
        at = (request.num_prompt_tokens + request.num_output_tokens - 2) * num_bytes
        if not num_bytes or request.num_output_tokens < 2 or len(request.path) < at + num_bytes:
            return NO_CLOSING
        return closing_of(int.from_bytes(request.path[at : at + num_bytes], "little"))

    def _take_working_slots(self, num_slots: int) -> None:
        self._server.take_slots(num_slots, self.now_s)
        self._num_slots_to_take -= num_slots

    def _planned(self) -> PrefillPlan:
        """Where the prefill leaves states."""
        return self._server.served.plan(self._lease)

    def _take_planned_slots(self, start: int, end: int) -> list[int]:
        """Rising: the planned depths beyond `start`, up to `end`, for which a slot is left beside the prompt's KV."""
        scheduling = self._server.scheduling
        num_tokens = self._request.num_prompt_tokens - start + self._server.page_tokens
        num_others = scheduling.max_running - self._server.num_prefilled
        # Another request takes its working slots, and locks the state that it starts from.
        reserved = Amount(num_tokens, self._num_slots_to_take + num_others * (scheduling.num_working_slots + 1))
        return sorted(
            depth
            for depth in self._plan.within(start, end)
            if self._server.take_planned_slot(depth in self._plan.on_probation, reserved, self.now_s)
        )

    def _leave_waiting(self) -> None:
        """A chunk before the last has ended, or one that decoding follows."""
        self._leave(self._lease, self._waiting, self._plan.on_probation)
        self._waiting = []

    def _num_slots_for_waiting(self) -> int:
        """Slots beside the working ones that what waits at the end has."""
        return len(self._waiting)

    def _allocate(self, end: int, num_asked: int) -> None:
        """KV up to `end`; the server evicts for `num_asked` tokens."""
        allocated = self._server.pages(end)
        self._server.take_tokens(allocated - self._num_allocated_tokens, num_asked, self.now_s)
        self._num_allocated_tokens = allocated

    def _leave(
        self, lease: Lease, depths: Sequence[int], on_probation: Collection[int], closing: int = NO_CLOSING
    ) -> None:
        if depths:
            newest = self._server.leave(lease, depths, on_probation, self._num_shared_tokens, closing, self.now_s)
            self._num_shared_tokens = depths[-1]
            self._hold(newest)

    def _hold(self, node: Node | None) -> None:
        """Lock `node` in place of what was locked."""
        self._server.use(node, self._held)
        self._held = node
