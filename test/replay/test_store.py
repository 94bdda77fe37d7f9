"""A store behind the host in a replay: bounded as SGLang bounds its folder, read where that pays, else of no effect."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marconi.policy.catalog import SGLANG_MAMBA_RATIO, PolicySpec
from marconi.policy.host_tier import HostTier
from marconi.policy.request import Request, Trace, pack
from marconi.policy.store import StoreBehind
from marconi.replay import queueing, serial
from marconi.replay.catalog import build, require_possible
from marconi.replay.outcome import Outcome
from marconi.replay.queueing import Batching
from marconi.replay.server import ServerReplay
from marconi.replay.store import KEPT_SHARE, LEAST_TOKENS, LruObjects, StoreReplay, StoreSpec
from marconi.replay.target import CacheConfig, Host, ReplayTarget
from marconi.tree import HostCopy, check_invariants
from marconi.tree.invariants import check_host

from .worlds import COSTS, SPEED, STATE_BYTES, SecondAToken, conversations

UNIT = 64
TRACE = conversations(num_sessions=14, num_turns=8, unit_tokens=UNIT)
FAST, SLOW = 1e6, 1e-9
PLENTY = StoreSpec(10**9, FAST)
LITTLE = StoreSpec(20_000, FAST)
"""Some five conversations."""
DEVICE = 4_000
HOST = Host(8_000, FAST, mamba_ratio=1.0)
"""Half for states, far more than it needs: KV is short."""


def target_of(storage: StoreSpec | None, policy: str = "best", trace: Trace = TRACE) -> ReplayTarget:
    config = CacheConfig(trace, COSTS, SecondAToken(), DEVICE, host=HOST, storage=storage)
    return build(PolicySpec.parse(policy), config)


def served(storage: StoreSpec | None, policy: str = "best") -> tuple[Outcome, ServerReplay]:
    target = target_of(storage, policy)
    assert isinstance(target, ServerReplay)
    return serial.replay(TRACE, target, SecondAToken()), target


class NaiveFolder:
    """All objects in one list, by whole paths, with the time when each was last used."""

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.now = 0
        self.objects = dict[object, tuple[int, int]]()

    def put(self, name: object, num_bytes: int) -> None:
        if name not in self.objects and num_bytes <= self.memory_bytes:
            if self.num_bytes + num_bytes > self.memory_bytes:
                while self.objects and self.num_bytes > int(self.memory_bytes * KEPT_SHARE) - num_bytes:
                    del self.objects[min(self.objects, key=lambda each: self.objects[each][0])]
            self.objects[name] = self._tick(), num_bytes

    def read(self, name: object) -> None:
        self.objects[name] = self._tick(), self.objects[name][1]

    @property
    def num_bytes(self) -> int:
        return sum(size for _, size in self.objects.values())

    def _tick(self) -> int:
        self.now += 1
        return self.now


def compare(memory_bytes: int, uses: list[tuple[int, int]]) -> None:
    """Each use reads an object if it is there, or writes it."""
    folder, naive = LruObjects(memory_bytes), NaiveFolder(memory_bytes)
    for index, num_bytes in uses:
        name = str(index)
        assert (name in folder) is (name in naive.objects)
        if name in folder:
            folder.read(name)
            naive.read(name)
        else:
            assert folder.put(name, num_bytes) == (num_bytes if num_bytes <= memory_bytes else None)
            naive.put(name, num_bytes)
        folder.check_invariants()
        assert folder.num_bytes == naive.num_bytes


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), max_size=60))
def test_a_folder_deletes_what_is_unused_longest_like_a_scan_of_all(
    memory_bytes: int, uses: list[tuple[int, int]]
) -> None:
    compare(memory_bytes, uses)


def test_a_folder_that_forgets_reads_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    uses = [(index, 4) for index in (0, 1, 0, 2, 0, 3, 0)]
    compare(12, uses)
    monkeypatch.setattr(LruObjects, "read", lambda folder, name: 0)
    with pytest.raises(AssertionError):
        compare(12, uses)


class Watched(StoreReplay):
    """Holds what can be read against a folder whose objects are named by whole paths."""

    naive: NaiveFolder
    num_compared = num_readable = 0

    @classmethod
    def of(cls, storage: StoreSpec) -> tuple[ServerReplay, "Watched"]:
        server = target_of(storage)
        assert isinstance(server, ServerReplay)
        tier = server.hybrid.host
        assert isinstance(tier, HostTier)
        store = cls(server.hybrid.tree, tier, COSTS, storage)
        store.naive = NaiveFolder(storage.memory_bytes)
        server.store = store
        return server, store

    def _write(self, copy: HostCopy) -> None:
        path, namespace = self._tree.path_to(copy.node)
        above = copy.node.parent
        while above is not None and (above.host_copy is None or above.host_copy.stored_as is None):
            above = above.parent
        self.naive.put((namespace, path, "state"), STATE_BYTES)
        for end in range((0 if above is None else above.depth // UNIT * 4) + 4, len(path) + 4, 4):
            self.naive.put((namespace, path[:end]), UNIT)
        super()._write(copy)

    def _readable(self, request: Request) -> list[str]:
        names, found = super()._readable(request), 0
        for num_units in range(1, min(request.num_known_tokens, request.num_prompt_tokens - 1) // UNIT + 1):
            path = request.path[: 4 * num_units]
            if (request.namespace, path) not in self.naive.objects:
                break
            if (request.namespace, path, "state") in self.naive.objects:
                found = num_units
        assert len(names) == found
        self.num_compared += 1
        self.num_readable += found > 0
        return names

    def read(self, request: Request, match: object, now_s: float) -> float:
        num_reads, start = self.traffic.num_reads, match.hosted.depth if match.hosted else 0  # type: ignore[attr-defined]
        read_s = super().read(request, match, now_s)  # type: ignore[arg-type]
        if self.traffic.num_reads > num_reads:
            found = self._tree.match(request.path, request.num_prompt_tokens - 1, request.namespace).hosted
            assert found is not None
            for depth in range(start + UNIT, found.depth + UNIT, UNIT):
                self.naive.read((request.namespace, request.path[: depth // UNIT * 4]))
            self.naive.read((request.namespace, request.path[: found.depth // UNIT * 4], "state"))
            assert read_s == pytest.approx((found.depth - start + STATE_BYTES) / self.storage.bytes_per_s)
        return read_s


@pytest.mark.parametrize("storage", [PLENTY, LITTLE, StoreSpec(3_500, FAST)], ids=["plenty", "little", "least"])
def test_what_can_be_read_is_what_a_scan_of_whole_paths_finds_and_nothing_exceeds_its_memory(
    storage: StoreSpec,
) -> None:
    server, store = Watched.of(storage)
    tier = server.hybrid.host
    assert isinstance(tier, HostTier)
    for each in TRACE.requests:
        server.serve(each)
        server.check_invariants()
        store.objects.check_invariants()
        check_invariants(server.hybrid.tree)
        check_host(server.hybrid.tree, tier.copies)
        assert store.objects.num_bytes == store.naive.num_bytes
        assert min(tier.room) >= 0
        assert not any(node.host_copy.num_locks for node in server.hybrid.tree.nodes() if node.host_copy is not None)
    assert store.num_compared > 20
    assert store.num_readable > 0
    assert store.traffic.num_written_bytes > (0 if storage is PLENTY else storage.memory_bytes), "something is deleted"


def test_a_path_whose_beginning_was_deleted_is_not_readable() -> None:
    server, store = Watched.of(PLENTY)
    for each in TRACE.requests:
        server.serve(each)
    last = TRACE.requests[-1]
    names = StoreReplay._readable(store, last)
    assert names
    del store.objects._sizes[names[0]]
    assert StoreReplay._readable(store, last) == []


def test_a_large_fast_store_computes_fewer_tokens_in_less_time_than_device_and_host() -> None:
    (without, _), (stored, server) = served(None), served(PLENTY)
    assert server.store is not None
    traffic = server.store.traffic
    assert traffic.num_reads > 0
    assert sum(stored.hit_tokens) > sum(without.hit_tokens)
    assert stored.prefill_s < without.prefill_s
    num_computed = sum(each.num_prompt_tokens for each in TRACE.requests) - sum(stored.hit_tokens)
    waited_s = traffic.read_s + server.counters.load_s
    assert stored.prefill_s == pytest.approx(num_computed + waited_s), "a token a second"
    assert traffic.read_s == pytest.approx(traffic.num_read_bytes / FAST)
    assert traffic.num_hit_tokens >= LEAST_TOKENS


USELESS = (StoreSpec(1, FAST), StoreSpec(10**9, SLOW))


@pytest.mark.parametrize("storage", USELESS, ids=["a byte", "never read"])
def test_a_store_that_holds_nothing_or_is_never_read_leaves_device_and_host_as_they_are(storage: StoreSpec) -> None:
    """The copies that the host drops next are chosen ahead, which by last use are the same."""
    (without, _), (stored, server) = served(None, "lru-joint"), served(storage, "lru-joint")
    assert server.store is not None
    assert server.store.traffic.num_written_bytes == server.store.traffic.num_reads == 0
    assert (stored.hit_tokens, stored.ttft_s) == (without.hit_tokens, without.ttft_s)
    assert served(PLENTY, "lru-joint")[0].hit_tokens != without.hit_tokens, "one that is of use does not"


@pytest.mark.parametrize("policy", ["best", "marconi", "seglen"])
def test_a_store_that_chooses_nothing_has_no_effect(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreBehind, "choose", lambda behind, now_s, num_steps: [])
    (without, _), (stored, _) = served(None, policy), served(PLENTY, policy)
    assert (stored.hit_tokens, stored.ttft_s) == (without.hit_tokens, without.ttft_s)


def test_requests_beside_each_other_read_as_well() -> None:
    def replayed(storage: StoreSpec | None) -> tuple[int, float, ServerReplay]:
        target = target_of(storage)
        assert isinstance(target, ServerReplay)
        outcome = queueing.replay(TRACE, target, SPEED, Batching(2))
        return sum(outcome.hit_tokens), outcome.prefill_s, target

    (hits, without_s, _), (stored_hits, stored_s, server) = replayed(None), replayed(PLENTY)
    assert server.store is not None
    assert server.store.traffic.num_reads > 0
    assert stored_hits > hits
    assert stored_s < without_s


def test_a_prompt_of_another_name_space_reads_nothing() -> None:
    _, server = served(PLENTY)
    assert server.store is not None
    last = TRACE.requests[-1]
    assert server.store._readable(last)
    assert server.store._readable(replace(last, namespace=1)) == []


def test_a_stored_state_shallower_than_the_hosts_is_not_read() -> None:
    server, store = Watched.of(PLENTY)
    path = pack(range(1, 21))
    shallow, deep = (Request(path, units * UNIT + 1, 1, units * UNIT, 0.0) for units in (8, 16))
    for each in (shallow, deep):
        server.serve(each)
    hybrid = server.hybrid
    match = hybrid.match(replace(deep, num_prompt_tokens=20 * UNIT, num_known_tokens=20 * UNIT))
    node = match.checkpoint
    while node.parent is not None and node.depth > 8 * UNIT:
        node = node.parent
    assert node.depth
    tier = hybrid.host
    assert isinstance(tier, HostTier)
    tier.take(node, 1.0)
    assert node.host_copy is not None
    store._write(node.host_copy)
    longer = replace(deep, num_prompt_tokens=20 * UNIT, num_known_tokens=20 * UNIT)
    assert len(store._readable(longer)) * UNIT == node.depth < match.checkpoint.depth
    assert store.read(longer, hybrid.match(longer), 2.0) == 0.0


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ("lru", "policy 'lru': --storage-memory must be left out for stock SGLang, whose writes are not replayed"),
        ("gdsf", "with a host tier the policy must be one of"),
        ("lfu", "--host-memory must be left out for a block cache"),
    ],
)
def test_a_policy_without_copies_by_worth_is_refused(policy: str, message: str) -> None:
    config = CacheConfig(TRACE, COSTS, SecondAToken(), 10_000, SGLANG_MAMBA_RATIO, host=HOST, storage=PLENTY)
    config = replace(config, mamba_ratio=None) if policy == "lfu" else config
    with pytest.raises(ValueError, match=message):
        require_possible(PolicySpec(policy), config)
