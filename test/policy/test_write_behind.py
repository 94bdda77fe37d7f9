"""Copies made ahead: random requests, copies that end late and out of order, held against a scan of the tree."""

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import strategies as st

from marconi.policy.admission.plan import Judicious
from marconi.policy.base import Costs, Need
from marconi.policy.eviction.order import Order
from marconi.policy.host_tier import HostMemory, LoadTimes
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.request import Lease, Request, pack
from marconi.policy.write_behind import WriteBehind
from marconi.tree import Node, RadixTree, check_invariants
from marconi.tree.invariants import check_host
from marconi_lab.eviction.joint_lru import JointLru

from .random_runs import Extent, extents, random_ids, sources

NEEDS = frozenset({Need.KV, Need.STATE})
COSTS = Costs(kv_bytes_per_token=3, state_bytes=20, flops=float)
MAX_TOKENS = 60
MAX_STATES = 12


class NoRows:
    """Where copies lie, which no decision asks."""

    def held(self, node: Node) -> None: ...

    def dropped(self, node: Node) -> None: ...

    def dropped_state(self, node: Node) -> None: ...

    def split(self, upper: Node, lower: Node) -> None: ...

    def joined(self, upper: Node, lower: Node) -> None: ...


class Server:
    """A device that requests fill, and copies that are finished whenever the test says so."""

    def __init__(
        self,
        memory: HostMemory = HostMemory(10_000, 1_000),  # noqa: B008 - frozen
        bytes_per_s: float = 1e6,
        least_tokens: int = 1,
        copy_bytes_per_s: float | None = None,
    ) -> None:
        self.copied_now: list[Node] = []
        """Victims whose evictions waited for their copies."""
        tree = RadixTree(max_ghosts=50)
        times = LoadTimes(
            COSTS,
            lambda cached, prompt: float(prompt - cached),
            bytes_per_s,
            least_tokens,
            copy_bytes_per_s=copy_bytes_per_s,
        )
        self.tier = WriteBehind(tree, Order(JointLru(NEEDS)), memory, times, NoRows(), self.copied_now.append)
        self.hybrid = HybridCache(tree, Judicious(), Order(JointLru(NEEDS)), host=self.tier)
        self.tree = tree
        self.now_s = 0.0

    def lease(self, ids: list[int]) -> Lease:
        """A request with `ids`, that goes on after them, and what it finds."""
        request = Request(pack([*ids, 99]), len(ids) + 1, 0, len(ids) + 1, self.now_s)
        return Lease(request, self.hybrid.match(request))

    def ask(self, ids: list[int]) -> Node:
        """A request that leaves a state after all of `ids`."""
        self.now_s += 1.0
        lease = self.lease(ids)
        self.hybrid.begin(lease, self.now_s)
        return self.hybrid.insert(lease, [len(ids)], self.now_s)[-1]

    def choose(self, need: Need, num_missing: int) -> list[Node]:
        """Victims that are to be copied; their copies are begun."""
        chosen = self.tier.choose(self.hybrid, {need: num_missing}, self.now_s)
        for node in chosen:
            self.hybrid.lock(node)
            self.tier.begin(node)
        return chosen

    def finish(self, node: Node) -> None:
        """The copy of `node` is there."""
        self.tier.finish(node)
        self.hybrid.unlock(node)

    def evict(self, need: Need) -> Node | None:
        """The victim, which has gone."""
        victim = self.hybrid.order.victim(need, self.now_s)
        if victim is None:
            return None
        assert isinstance(victim, Node)
        self.hybrid.evict_node(victim, need, self.now_s)
        return victim

    def leaving(self) -> Iterator[Node]:
        """What was chosen and may go, by a scan."""
        for node in self.tree.nodes():
            if node.has_state and not node.num_locks and node.leaving is not None:
                yield node

    def check(self) -> None:
        """Raise `AssertionError` where tree, copies and counts disagree."""
        check_invariants(self.tree)
        check_host(self.tree, self.tier.copies)
        tiers = self.hybrid.order
        leaving = list(self.leaving())
        assert tiers.num_leaving == len(leaving)
        assert tiers.num_leaving_tokens == sum(node.freed_tokens for node in leaving if not node.num_children)
        for node in self.tier.being_copied:
            assert node.has_state, f"{node} went while it was copied"
            assert node.has_copy, f"the copy of {node} went while it was made"
            assert node.host_copy is not None
            assert node.host_copy.num_locks


def test_a_copied_victim_is_there_on_the_host_when_it_has_gone() -> None:
    server = Server()
    server.ask([1, 2, 3])
    (node,) = server.choose(Need.STATE, 1)
    server.finish(node)
    assert server.evict(Need.STATE) is node
    lease = server.lease([1, 2, 3])
    assert lease.match.checkpoint.depth == 0
    assert server.tier.to_load(*lease) == 3


def test_a_victim_that_was_not_chosen_ahead_is_copied_before_it_is_evicted() -> None:
    server = Server()
    node = server.ask([1, 2, 3])
    server.evict(Need.STATE)
    assert server.copied_now == [node]
    assert server.tier.to_load(*server.lease([1, 2, 3])) == 3


def test_a_victim_whose_copy_would_take_longer_than_one_use_saves_is_dropped() -> None:
    """Three seconds to compute; 29 bytes take 1.45 s to copy and 1.45 s to load, or 2.9 s each."""
    for bytes_per_s, num_copied in ((20.0, 1), (10.0, 0)):
        server = Server(bytes_per_s=bytes_per_s)
        server.ask([1, 2, 3])
        server.evict(Need.STATE)
        assert len(server.copied_now) == num_copied
        assert server.tier.copies.num_states == num_copied


def test_a_copy_takes_as_long_as_the_way_to_the_host() -> None:
    """Three seconds to compute; 29 bytes take 0.29 s to load, and 2.9 s or 1.45 s to copy: 2.71 s are saved."""
    for copy_bytes_per_s, num_copied in ((20.0, 1), (10.0, 0)):
        server = Server(bytes_per_s=100.0, copy_bytes_per_s=copy_bytes_per_s)
        server.ask([1, 2, 3])
        server.evict(Need.STATE)
        assert len(server.copied_now) == num_copied


def test_an_end_is_copied_at_once_though_the_device_has_a_state_just_above() -> None:
    """The path of ten seconds is copied and loaded in 1.7 s each; its last token alone saves a second less 0.8.

    The device evicts a path from its end: were this end dropped, so would be all that is above.
    """
    server = Server(bytes_per_s=30.0)
    above, end = server.ask([1, 2, 3, 4, 5, 6, 7, 8, 9]), server.ask([1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
    assert end.checkpoint_depth_above == above.depth
    server.evict(Need.KV)
    assert server.copied_now == [end]


def test_a_copy_that_would_save_too_few_tokens_is_not_made() -> None:
    for least_tokens, num_copied in ((3, 1), (4, 0)):
        server = Server(least_tokens=least_tokens)
        server.ask([1, 2, 3])
        assert len(server.choose(Need.STATE, 1)) == num_copied


def test_what_is_being_copied_does_not_go() -> None:
    server = Server()
    node = server.ask([1, 2, 3])
    assert server.choose(Need.STATE, 1) == [node]
    assert server.evict(Need.STATE) is None
    assert server.choose(Need.STATE, 1) == [], "it is chosen already"
    server.finish(node)
    assert server.evict(Need.STATE) is node


@pytest.mark.parametrize("need", [Need.KV, Need.STATE])
def test_what_was_chosen_goes_as_it_was_chosen_and_before_what_is_older(need: Need) -> None:
    server = Server()
    first, second, third = (server.ask([index, 5]) for index in range(3))
    chosen = server.choose(need, 2 if need is Need.STATE else 4)
    assert chosen == [first, second]
    for node in reversed(chosen):
        server.finish(node)
    assert [server.evict(need) for _ in range(4)] == [first, second, third, None]


def test_a_request_that_starts_from_what_is_leaving_keeps_it_and_its_copy() -> None:
    server = Server()
    first, second = server.ask([1, 5]), server.ask([2, 5])
    (chosen,) = server.choose(Need.STATE, 1)
    assert chosen is first
    server.finish(first)
    server.ask([1, 5, 6])
    assert first.leaving is None
    assert first.has_copy
    assert server.evict(Need.STATE) is second
    server.check()


def test_what_loads_no_faster_than_it_is_computed_leaves_without_a_copy() -> None:
    server = Server(bytes_per_s=1.0)
    node = server.ask([1, 2, 3])
    assert server.choose(Need.STATE, 1) == []
    assert node.leaving is not None
    assert not node.has_copy
    server.check()


def test_an_abandoned_copy_leaves_nothing_behind() -> None:
    server = Server()
    server.ask([1, 2, 3])
    (node,) = server.tier.choose(server.hybrid, {Need.STATE: 1}, server.now_s)
    server.tier.abandon(node)
    assert not node.has_copy
    assert server.tier.copies.num_tokens == 0
    server.check()


@extents
def test_whatever_comes_no_copy_is_lost_while_it_is_made_and_victims_go_in_order(extent: Extent) -> None:
    """A little host still holds all that is copied at once: newcomers and those under way fit into it together."""
    num_done: Counter[str] = Counter()

    def steps(memory: HostMemory, rng: random.Random, length: int) -> int:
        server = Server(memory)
        for _ in range(length):
            draw = rng.randrange(20)
            if draw < 8:
                server.ask(random_ids(rng, rng.randint(1, 8)))
                num_done["ask"] += 1
            elif draw < 12 and len(server.tier.being_copied) < 3:
                need = rng.choice([Need.KV, Need.STATE])
                chosen = server.choose(need, rng.randint(1, 4))
                assert all(node.host_copy is not None for node in chosen)
                num_done["chosen"] += len(chosen)
            elif draw < 16 and server.tier.being_copied:
                server.finish(rng.choice(list(server.tier.being_copied)))
                num_done["finished"] += 1
            elif draw < 18:
                lease = server.lease(random_ids(rng, rng.randint(1, 8)))
                if depth := server.tier.to_load(*lease):
                    with server.tier.loading(*lease, server.now_s):
                        server.hybrid.load(lease.request, depth, depth - lease.match.num_live_tokens)
                    num_done["loads"] += 1
            while server.tree.num_tokens > MAX_TOKENS or server.tree.num_states > MAX_STATES:
                need = Need.STATE if server.tree.num_states > MAX_STATES else Need.KV
                waiting = [node for node in server.leaving() if need is Need.STATE or not node.num_children]
                victim = server.evict(need)
                if victim is None:
                    break
                num_done["evicted"] += 1
                if waiting:
                    first = min(waiting, key=lambda node: node.leaving or 0)
                    assert victim is first, f"{victim} went before {first}"
                server.check()
            server.check()
        return length

    memories = HostMemory(10_000, 1_000), HostMemory(150, 14)
    extent.draw(steps, memories, rng=sources, length=st.integers(50, 250))
    assert min(num_done[name] for name in ("ask", "chosen", "finished", "evicted", "loads")) > extent.num_runs, num_done
