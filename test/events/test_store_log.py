"""What the events of a store leave is what was told of it, beside what the device holds, and to one log's reader."""

from array import array
from collections import OrderedDict

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from marconi.events.base import Batch, Event, KvStored, StateStored, is_in_store
from marconi.events.codec import Decoder, Encoder, Published
from marconi.events.hashes import HashSpace
from marconi.events.mirror import Mirror
from marconi.events.store_log import StoreLog
from marconi.events.tree_log import Tenant, TreeLog
from marconi.router.dispatch import prompt_of
from marconi.router.index import Chain, FleetIndex
from marconi.tree import RadixTree

BLOCK, STORE, MAX_TOKENS = 4, 0x8000_0000_0000_0001, 40
TENANTS = (Tenant(), Tenant("adapter", "tenant"))
PATHS = [tuple(trunk + branch) for trunk in ([1] * 5, [2] * 8) for branch in ([], [3], [3] * 4, [4] * 7, [3, 4] * 9)]

Step = tuple[str, int, int, int]
steps = st.lists(
    st.tuples(
        st.sampled_from(["stored", "stored", "found"]),
        st.integers(0, len(PATHS) - 1),
        st.integers(0, 1),
        st.integers(0, 26),
    ),
    max_size=40,
)


def packed(ids: tuple[int, ...]) -> bytes:
    return array("q", ids).tobytes()


def chain_of(ids: tuple[int, ...], tenant: Tenant) -> Chain:
    """Of a prompt that begins with `ids`."""
    return prompt_of((*ids, 99), HashSpace.of("m", tenant.extra_key, tenant.cache_salt), BLOCK).chain


class World:
    """A server's log of a device and a store, what goes over the wire, a router's index, and what is there in truth."""

    def __init__(self) -> None:
        self.log = TreeLog()
        self.device = RadixTree(1, 0, 2, self.log)
        self.told = StoreLog(self.log, STORE, MAX_TOKENS)
        self.mirror = Mirror(self.log, BLOCK, "m")
        self.index = FleetIndex(BLOCK)
        self.index.add_worker("w")
        self.encoder, self.decoder = Encoder(BLOCK), Decoder()
        self.truth = OrderedDict[tuple[int, tuple[int, ...]], None]()

    def take(self, step: Step) -> None:
        kind, number, namespace, depth = step
        path = PATHS[number]
        if kind == "stored":
            self.told.stored(packed(path), namespace, TENANTS[namespace])
            self.truth[namespace, path] = None
            self.truth.move_to_end((namespace, path))
            while self.num_tokens() > MAX_TOKENS:
                self.truth.popitem(last=False)
        else:
            self.told.found(packed(path), depth, namespace)
            for each in list(self.truth):
                if each[0] == namespace and path[: len(each[1])] == each[1] and len(each[1]) > depth:
                    del self.truth[each]

    def num_tokens(self) -> int:
        return len({(space, path[:end]) for space, path in self.truth for end in range(1, len(path) + 1)})

    def send(self) -> list[Event]:
        payload = self.encoder.batch("w", 1, self.mirror.drain(), 0.0)
        batch = self.decoder.decode(payload, "w", 0)
        assert isinstance(batch, Batch)
        self.index.apply("w", batch.events)
        return list(batch.events)

    def num_stored_tokens(self, chain: Chain) -> int:
        return max((hit.num_tokens for hit in self.index.hits(chain.within(STORE)).values()), default=0)

    def check(self) -> None:
        self.told.check_invariants()
        self.index.check_invariants()
        assert self.index.stats.num_conflicting == 0
        for namespace, tenant in enumerate(TENANTS):
            for path in PATHS:
                there = [each for space, each in self.truth if space == namespace and path[: len(each)] == each]
                expected = max(map(len, there), default=0)
                assert self.num_stored_tokens(chain_of(path, tenant)) == expected, (path, tenant)


@settings(deadline=None)
@given(steps)
def test_a_router_knows_of_a_store_what_was_told_of_it(taken: list[Step]) -> None:
    run(taken)


def run(taken: list[Step]) -> None:
    world = World()
    for step in taken:
        world.take(step)
        world.send()
        world.check()


def test_a_device_and_its_store_hold_the_same_prefix_apart() -> None:
    world, path = World(), PATHS[4]
    (node,) = world.device.insert(packed(path), [len(path)])
    world.log.kept_state(node)
    world.send()
    chain = chain_of(path, Tenant())
    assert (world.index.hits(chain)["w"].num_tokens, world.num_stored_tokens(chain)) == (len(path), 0)
    world.take(("stored", 4, 0, 0))
    world.send()
    world.device.evict(node)
    world.send()
    assert (world.index.hits(chain), world.num_stored_tokens(chain)) == ({}, len(path))
    assert world.index.hits(chain.within(STORE + 1)) == {}
    held = tuple(world.mirror.held())
    assert {type(each) for each in held} == {KvStored, StateStored}
    assert all(is_in_store(each.namespace) for each in held if isinstance(each, KvStored | StateStored))


def test_a_store_that_is_left_or_emptied_leaves_nothing_and_may_come_again() -> None:
    world = World()
    for _ in range(2):
        world.take(("stored", 2, 0, 0))
        world.send()
        world.check()
        world.told.forget()
        world.truth.clear()
        world.send()
        world.check()
        assert list(world.mirror.held()) == []
        world.told = StoreLog(world.log, STORE, MAX_TOKENS)


def test_other_consumers_are_told_of_no_block_in_a_store() -> None:
    """Of a log's second reader, which is SGLang's own publisher, and of one that knows SGLang's events alone."""
    also = TreeLog()
    log = TreeLog(also)
    StoreLog(log, STORE).stored(packed(PATHS[4]), 0, Tenant())
    assert (len(log.changes), len(also.changes)) == (2, 0)
    payload = Encoder(BLOCK).batch("w", 1, Mirror(log, BLOCK, "m").drain(), 0.0)
    _, events, _ = msgspec.msgpack.decode(payload)
    assert [event["type"] for event in events] == ["BlockRemoved"] * len(events)
    assert all(event["block_hashes"] == [] for event in events)


def test_control_a_block_in_no_store_is_told() -> None:
    stored = KvStored((1,), None, b"", BLOCK)
    _, events, _ = msgspec.msgpack.decode(Encoder(BLOCK).batch("w", 1, [Published(stored)], 0.0))
    assert events[1]["type"] == "BlockStored"


def test_a_log_that_hears_of_nothing_that_is_gone_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StoreLog, "found", lambda *_: None)
    with pytest.raises(AssertionError):
        run([("stored", 1, 0, 0), ("found", 1, 0, 0)])
