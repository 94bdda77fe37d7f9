"""A store behind a host tier: enough leaves ahead, what pays is written once, and what is read has its place."""

import random

import pytest

from marconi.policy.base import Costs, Need, NodeView
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.eviction.order import Order
from marconi.policy.host_tier import NEEDS, HostMemory, HostTier, LoadTimes
from marconi.policy.request import pack
from marconi.policy.store import StoreBehind, WriteAllowance, stored_above
from marconi.policy.write_behind import MARGIN
from marconi.tree import HostCopy, RadixTree, check_invariants
from marconi.tree.invariants import check_host

from .random_runs import Extent, random_ids, sources

FAST, SLOW = 1e6, 1e-3  # bytes per second; a token takes three bytes and a second, a state 20 bytes


class Watched(Order):
    """Holds every victim against a scan of the tree."""

    def __init__(self, tree: RadixTree) -> None:
        super().__init__(SeparateLru(NEEDS))
        self._tree = tree

    def free(self, need: Need) -> list[HostCopy]:
        nodes = (node for root in self._tree.roots.values() for node in root.walk() if node.has_copy)
        copies = (node.host_copy for node in nodes if need is Need.STATE or not node.hosted_children)
        return [copy for copy in copies if copy is not None and not copy.num_locks]

    def leaving(self, need: Need = Need.STATE) -> list[HostCopy]:
        """Those of them that were chosen ahead, the first to be dropped first."""
        chosen = (copy for copy in self.free(need) if copy.leaving is not None)
        return sorted(chosen, key=lambda copy: copy.leaving or 0)

    def victim(self, need: Need, now_s: float) -> NodeView | None:
        found, ahead = super().victim(need, now_s), self.leaving(need)
        allowed = ahead[:1] or self.free(need)
        assert found in allowed if allowed else found is None, f"{found} is dropped before {allowed}"
        return found


class Host:
    """A host tier below a device that keeps all that comes, and a store behind it."""

    def __init__(self, memory: HostMemory, store_bytes_per_s: float = FAST) -> None:
        self.tree = RadixTree(max_ghosts=50)
        self.order = Watched(self.tree)
        times = LoadTimes(Costs(3, 20, float), lambda cached, prompt: float(prompt - cached), FAST, least_tokens=1)
        self.tier = HostTier(self.tree, self.order, memory, times)
        self.behind = StoreBehind(self.tier, bytes_per_s=store_bytes_per_s)
        self.now_s = 0.0

    def come(self, *ids: int) -> HostCopy:
        """The copy, if it is not dropped at once, of a state that the device has after `ids`."""
        self.now_s += 1.0
        (node,) = self.tree.insert(pack(ids), [len(ids)])
        node.last_hit_s = node.last_pass_s = self.now_s
        self.tier.touch(node)
        self.tier.take(node, self.now_s)
        assert node.host_copy is not None
        return node.host_copy

    def choose(self) -> list[HostCopy]:
        """Choose ahead, begin to write what is to be written, and find as much leaving as was promised, and no more."""
        written, (num_tokens, num_slots), memory = self.behind.being_written, self.tier.room, self.tier.memory
        chosen = self.behind.choose(self.now_s)
        for copy in chosen:
            assert copy.stored_as is None
            self.tier.lock(copy)
            written[copy] = None
        for need, num_free, size in (Need.KV, num_tokens, memory.num_tokens), (Need.STATE, num_slots, memory.num_slots):
            going = [*self.order.leaving(need), *written]
            num = num_free + sum(copy.freed_tokens if need is Need.KV else 1 for copy in going)
            assert num >= MARGIN * size or set(self.order.free(need)) <= set(going), f"{num} of {size} for {need}"
        leaving = self.order.leaving()
        assert (self.behind.choose(self.now_s), self.order.leaving()) == ([], leaving), "enough is leaving already"
        return chosen

    def end_write(self, copy: HostCopy) -> None:
        del self.behind.being_written[copy]
        copy.stored_as = "a hash"
        self.tier.unlock(copy)


def run(host: Host, rng: random.Random) -> int:
    """Copies that come, are used, locked, written and dropped at random; returns how many were used while leaving."""
    num_used, expected, locked = 0, list[int](), list[HostCopy]()
    for _ in range(120):
        draw, copies = rng.randrange(16), host.order.free(Need.STATE)
        if draw < 6:
            host.come(*random_ids(rng, rng.randint(1, 9)))
        elif draw < 8 and copies:
            copy = rng.choice(host.order.leaving() or copies)
            num_used += copy.leaving is not None
            if copy.node.has_state and rng.random() < 0.5:
                host.tree.evict(copy.node)
            host.tier.touch(copy.node)
            assert copy not in host.order.leaving()
        elif draw < 10 and len(locked) > rng.randrange(4):
            host.tier.unlock(locked.pop(rng.randrange(len(locked))))
        elif draw < 10 and copies:
            locked.append(rng.choice(copies))
            host.tier.lock(locked[-1])
        elif draw < 12 and len(expected) > rng.randrange(3):
            host.tier.unexpect(expected.pop())
        elif draw < 12 and host.tier.expect(size := rng.randint(1, 20), host.now_s):
            expected.append(size)
        elif draw < 14 and host.behind.being_written:
            host.end_write(rng.choice(list(host.behind.being_written)))
        elif draw >= 14:
            host.choose()
        check_invariants(host.tree)
        check_host(host.tree, host.tier.copies)
        assert min(host.tier.room) >= 0
        assert host.order.num_leaving == len(host.order.leaving())
        assert host.order.num_leaving_tokens == sum(copy.freed_tokens for copy in host.order.leaving(Need.KV))
    return num_used


def test_after_each_choice_enough_is_leaving_and_it_is_dropped_first() -> None:
    memories = HostMemory(90, 60), HostMemory(900, 12)
    assert Extent(num_runs=8, every=1).draw(lambda memory, rng: run(Host(memory), rng), memories, rng=sources) > 20


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (StoreBehind, "_num_leaving", lambda behind, need: 10**9),
        (StoreBehind, "being_written", property(lambda behind: {}, lambda behind, written: None)),
        (HostTier, "touch", lambda tier, node: None),
        (Order, "victim", lambda order, need, now_s: order.next_to_leave(need, now_s) or order._leaving.first(need)),
    ],
)
def test_a_wrong_rule_is_caught(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, wrong: object) -> None:
    monkeypatch.setattr(owner, name, wrong, raising=False)
    with pytest.raises(AssertionError):
        run(Host(HostMemory(900, 12)), random.Random(0))  # noqa: S311 - test data


@pytest.mark.parametrize(("store_bytes_per_s", "num_written"), [(FAST, 2), (SLOW, 0)])
def test_what_leaves_is_written_once_in_order_if_it_pays(store_bytes_per_s: float, num_written: int) -> None:
    host = Host(HostMemory(100, 4), store_bytes_per_s)
    first, second, third, fourth = (host.come(index, 5) for index in range(4))
    chosen = host.choose()
    assert chosen == [first, second][:num_written], "half the slots, as all came at once"
    for copy in reversed(chosen):
        host.end_write(copy)
    assert host.order.leaving() == [first, second]
    host.tier.touch(first.node)
    assert first.leaving is None
    assert host.choose() == []
    assert host.order.leaving() == [second, first], "it leaves again without a write"
    host.come(4, 5)
    assert [copy.is_held for copy in (first, second, third, fourth)] == [True, False, True, True]


def test_no_more_is_written_than_a_day_may_have_whatever_comes() -> None:
    """An hour's worth at once, and never more than a copy above it."""
    host = Host(HostMemory(300, 12))
    allowance = WriteAllowance(24 * 2 * host.behind._bytes_of(5))
    num_written = 0
    for index in range(200):
        if index % 20 == 0:
            # As after a flush.
            host.behind = StoreBehind(host.tier, allowance, FAST)
        host.now_s = 60.0 * index
        host.come(index, 7, 7, 7, 7)
        for copy in host.choose():
            num_written += 1
            host.end_write(copy)
        assert num_written <= 2 * (1 + host.now_s / 3600) + 1
    assert num_written >= 2 * 200 / 60


def test_a_state_that_is_expected_has_its_room_until_it_is_expected_no_more() -> None:
    host = Host(HostMemory(10, 4))
    first, second = host.come(1, 1, 1, 1), host.come(2, 2, 2, 2)
    assert (host.tier.expect(5, host.now_s), first.is_held) == (True, False)
    assert (host.tier.num_dropped, host.tier.num_dropped_tokens) == (1, 4)
    third = host.come(3, 3, 3, 3)
    assert (second.is_held, third.is_held, host.tier.room) == (False, True, (1, 2))
    assert host.come(4, 4, 4, 4, 4, 4).is_held is False, "it would take what is expected"
    host.tier.unexpect(5)
    assert host.tier.room == (10, 4)


def test_nothing_is_expected_where_all_is_locked() -> None:
    host = Host(HostMemory(10, 2))
    for index in range(2):
        host.tier.lock(host.come(index, 5, 5, 5))
    assert host.tier.expect(1, host.now_s) is False
    assert (host.tier.room, host.tier.num_dropped) == ((2, 0), 0)


@pytest.mark.parametrize(("num_tokens", "has_room"), [(4, True), (5, False)])
def test_nothing_is_dropped_for_a_state_that_does_not_fit_beside_what_is_locked(
    num_tokens: int, has_room: bool
) -> None:
    host = Host(HostMemory(10, 4))
    host.tier.lock(host.come(1, 1, 1, 1, 1, 1))
    other = host.come(2, 2, 2)
    assert host.tier.expect(num_tokens, host.now_s) is has_room
    assert other.is_held is not has_room


@pytest.mark.parametrize(("bytes_per_s", "pays"), [(FAST, True), (SLOW, False)])
def test_a_start_pays_beyond_what_either_tier_has_if_reading_is_fast(bytes_per_s: float, pays: bool) -> None:
    host = Host(HostMemory(100, 4), bytes_per_s)
    host.come(1, 2, 3, 4, 5)
    live = host.tree.match(pack(range(1, 21)), 20)
    host.tree.evict(live.checkpoint)
    for each in (live._replace(hosted=None), host.tree.match(pack(range(1, 21)), 20)):
        assert [host.behind.pays_to_read(each, depth, 21, 15) for depth in (4, 5, 20)] == [False, False, pays]


def test_the_nearest_stored_state_above_counts_though_it_was_dropped() -> None:
    host = Host(HostMemory(100, 4))
    upper, middle, lower, end = (host.come(*range(depth)) for depth in (2, 4, 6, 8))
    upper.stored_as = middle.stored_as = end.stored_as = "a hash"
    host.tier.copies.drop(middle)
    assert [stored_above(copy) for copy in (upper, middle, lower, end)] == [None, upper, middle, middle]
