"""Serial replay with memory taken as a server takes it: while a request runs, from two pools.

What SGLang's scheduler does with one request after the other, in the same order, so that the engine's cache and this
replay give the same hits (`benchmark/host_replay.py`):

    begin         match, touch and lock the state that it starts from; a slot for the state that it works on
    each chunk    slots for the planned states within it, then KV for its tokens; at its end the states join the tree
    decode        KV, a page at a time
    finish        the working state joins the tree at the last page boundary that it stands at, and is freed elsewhere

A request that does not fit even alone is counted and leaves nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from marconi.policy.admission.base import num_processed_tokens
from marconi.policy.eviction.base import Need
from marconi.policy.lease import Lease
from marconi.policy.request import Request
from marconi.policy.served import ServedTree
from marconi.tree import Freed, Node


@dataclass(slots=True)
class Pools:
    """What is free, of how much."""

    num_tokens: int
    num_slots: int
    num_free_tokens: int = 0
    num_free_slots: int = 0

    def __post_init__(self) -> None:
        """Raise `ValueError` for a pool of nothing; all is free at first."""
        if self.num_tokens < 1 or self.num_slots < 1:
            raise ValueError(f"pools of {self.num_tokens} tokens and {self.num_slots} slots; 1 or more each is right")
        self.num_free_tokens, self.num_free_slots = self.num_tokens, self.num_slots


class ServerReplay:
    """Serves requests one after the other from two pools."""

    def __init__(self, served: ServedTree, pools: Pools, chunk_tokens: int, num_working_slots: int = 1) -> None:
        """`chunk_tokens` is the most that one prefill computes, `num_working_slots` what a request holds throughout."""
        self.served = served
        self.pools = pools
        self._chunk_tokens = chunk_tokens
        self._num_working_slots = num_working_slots

    def serve(self, request: Request) -> int:
        """Serve `request` at its arrival; returns its hit tokens."""
        num_processed = num_processed_tokens(request)
        if self._pages(num_processed) > self.pools.num_tokens or self._num_working_slots > self.pools.num_slots:
            self.served.counters.num_too_large += 1
            return 0
        run = _Run(self, request)
        run.prefill(self._chunk_tokens)
        run.decode(num_processed)
        run.finish(num_processed, self._num_working_slots)
        return run.num_hit_tokens

    def take_slots(self, num_slots: int, now_s: float) -> None:
        """Take slots that must be had."""
        while self.pools.num_free_slots < num_slots:
            self._collect(self.served.evict(Need.STATE, now_s))
        self.pools.num_free_slots -= num_slots

    def take_slot_on_probation(self, now_s: float) -> bool:
        """Take a free slot or that of a state on probation; False if there is neither."""
        if not self.pools.num_free_slots:
            freed = self.served.evict_on_probation(Need.STATE, now_s)
            if freed is None:
                return False
            self._collect(freed)
        self.pools.num_free_slots -= 1
        return True

    def take_tokens(self, num_tokens: int, now_s: float) -> None:
        """Take KV that must be had."""
        while self.pools.num_free_tokens < num_tokens:
            self._collect(self.served.evict(Need.KV, now_s))
        self.pools.num_free_tokens -= num_tokens

    def leave(self, lease: Lease, depths: Sequence[int], on_probation: int | None, num_shared_tokens: int) -> Node:
        """Hand states and KV beyond `num_shared_tokens` to the tree; what it has already comes back.

        Returns the node of the deepest.
        """
        tree = self.served.tree
        num_tokens, num_states = tree.num_tokens, tree.num_states
        made = self.served.leave(lease, depths, lease.request.arrival_s, on_probation)
        self.pools.num_free_tokens += depths[-1] - num_shared_tokens - (tree.num_tokens - num_tokens)
        self.pools.num_free_slots += len(depths) - (tree.num_states - num_states)
        return made[-1]

    def check_invariants(self) -> None:
        """Raise `AssertionError` unless, between requests, every token and slot is free or held by the tree."""
        tree, pools = self.served.tree, self.pools
        assert pools.num_free_tokens + tree.num_tokens == pools.num_tokens, f"{pools}: KV is lost"
        assert pools.num_free_slots + tree.num_states == pools.num_slots, f"{pools}: slots are lost"

    def _pages(self, num_tokens: int) -> int:
        page = self.served.tree.unit_tokens
        return -(-num_tokens // page) * page

    def _collect(self, freed: Freed | None) -> None:
        assert freed is not None, "nothing is left to evict for a request that fits"
        self.pools.num_free_tokens += freed.num_tokens
        self.pools.num_free_slots += freed.num_states


class _Run:
    """One request on its way."""

    def __init__(self, server: ServerReplay, request: Request) -> None:
        self._server = server
        self._request = request
        served = server.served
        self._page = served.tree.unit_tokens
        self._now_s = request.arrival_s
        known = min(request.num_known_tokens, request.num_prompt_tokens)
        prompt = replace(request, num_output_tokens=0, num_known_tokens=known)
        self._lease = served.begin(prompt, self._now_s)
        self._held = self._lease.source
        self.num_hit_tokens = 0 if self._held is None else self._held.depth
        self._num_shared_tokens = self._num_allocated_tokens = self.num_hit_tokens
        server.take_slots(server._num_working_slots, self._now_s)
        self._plan = served.plan(self._lease)

    def prefill(self, chunk_tokens: int) -> None:
        """Compute the prompt, a chunk at a time."""
        position, prompt_end = self.num_hit_tokens, self._request.num_prompt_tokens
        while position < prompt_end:
            end = min(position + chunk_tokens, prompt_end)
            planned = [depth for depth in self._plan.depths if position < depth <= end]
            taken = [depth for depth in planned if self._take_slot(depth)]
            self._allocate(end)
            self._leave(self._lease, taken, self._plan.on_probation)
            position = end

    def decode(self, num_processed_tokens: int) -> None:
        """Compute the answer, a token at a time."""
        for end in range(self._request.num_prompt_tokens + 1, num_processed_tokens + 1):
            self._allocate(end)

    def finish(self, num_processed_tokens: int, num_working_slots: int) -> None:
        """Leave the working state where it stands at a page's end, and give everything else back."""
        pools, request = self._server.pools, self._request
        end = min(num_processed_tokens, request.num_known_tokens) // self._page * self._page
        if end > self._num_shared_tokens:
            final = Lease(replace(request, num_known_tokens=end), self._lease.match)
            self._leave(final, [end], None)
            num_working_slots -= 1
        pools.num_free_slots += num_working_slots
        pools.num_free_tokens += self._num_allocated_tokens - self._num_shared_tokens
        self._hold(None)

    def _take_slot(self, depth: int) -> bool:
        if depth == self._plan.on_probation:
            return self._server.take_slot_on_probation(self._now_s)
        self._server.take_slots(1, self._now_s)
        return True

    def _allocate(self, end: int) -> None:
        allocated = -(-end // self._page) * self._page
        if allocated > self._num_allocated_tokens:
            self._server.take_tokens(allocated - self._num_allocated_tokens, self._now_s)
            self._num_allocated_tokens = allocated

    def _leave(self, lease: Lease, depths: Sequence[int], on_probation: int | None) -> None:
        if depths:
            newest = self._server.leave(lease, depths, on_probation, self._num_shared_tokens)
            self._num_shared_tokens = depths[-1]
            self._hold(newest)

    def _hold(self, node: Node | None) -> None:
        """Lock `node` in place of what was locked."""
        tree = self._server.served.tree
        if node is not None:
            tree.lock(node)
        if self._held is not None:
            tree.unlock(self._held)
        self._held = node
        self._server.served.tell()
