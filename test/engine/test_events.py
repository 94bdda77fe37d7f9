"""What the server's cache notes of itself leaves what its tree holds, and SGLang's consumers read the events."""

from array import array
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="the server extra is not installed: pip install '.[server]'")
pytest.importorskip("zmq", reason="the router extra is not installed: pip install '.[router]'")

import msgspec
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEventBatch,
    kv_event_namespace_seed,
    namespaced_block_hash,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import compute_node_event_hash_values, hash_str_to_int64

from marconi.engine.core.tree_core import MarconiTreeCore
from marconi.engine.policies import EvictionName, PolicyChoice
from marconi.router.events.base import Batch, Cleared, Event, KvRemoved, KvStored, StateRemoved, StateStored
from marconi.router.events.codec import Decoder, Encoder, Told
from marconi.router.events.hashes import HashSpace
from marconi.router.events.mirror import Mirror
from marconi.router.events.tree_log import TreeLog
from marconi.tree import Node

from .host_replays import Setting, agents, forks, on_marconi
from .test_host_replay import SETTINGS

pytestmark = pytest.mark.usefixtures("sglang_configuration")

BLOCK = 64
BEST = PolicyChoice(EvictionName.BEST)


def heard(events: list[Event]) -> tuple[set[int], dict[int, int]]:
    """Blocks, and the depths of states by the hash before them, that a listener has after `events`."""
    kv: set[int] = set()
    states: dict[int, int] = {}
    for event in events:
        match event:
            case KvStored(hashes):
                assert kv.isdisjoint(hashes)
                kv.update(hashes)
            case KvRemoved(hashes):
                assert kv.issuperset(hashes)
                kv.difference_update(hashes)
            case StateStored(block_hash, depth):
                states[block_hash] = depth
            case StateRemoved(block_hash):
                del states[block_hash]
            case Cleared():
                kv.clear()
                states.clear()
    return kv, states


def held(core: MarconiTreeCore) -> tuple[set[int], dict[int, int]]:
    """The same, by walking the tree, each path hashed from its start."""
    kv: set[int] = set()
    states: dict[int, int] = {}
    for namespace, root in core.served.tree.roots.items():
        # The host replay names a space by its number.
        adapters = {0: None} if not namespace else {namespace: "1"}
        space = HashSpace.of(None, adapters[namespace], None)
        for node in root.walk():
            if node.is_live and node.parent is not None:
                hashes = [space.hash(each) for each in space.digests(b"", path(node), BLOCK)]
                kv.update(hashes[: node.depth // BLOCK])
                if node in core.memory.states:
                    kv.add(hashes[-1])
                    states[hashes[-1]] = node.depth
    return kv, states


def path(node: Node | None) -> bytes:
    key = b""
    while node is not None:
        key, node = node.key + key, node.parent
    return key


@pytest.mark.parametrize("trace", [agents, forks])
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_events_leave_what_the_tree_holds_after_every_request(setting: Setting, trace: type) -> None:
    log = TreeLog()
    replay, mirror = on_marconi(setting, BEST, log), Mirror(log, BLOCK)
    core, events = replay.cache.tree_core, list[Event]()
    for request in trace(seed=3):
        replay.serve(request)
        events.extend(each.event for each in mirror.drain())
        expected = held(core)
        assert heard(events) == expected
        assert heard(list(mirror.held())) == expected
    assert expected[1]
    assert sum(core.served.counters.num_evictions.values()) > 20
    replay.cache.reset()
    assert [each.event for each in mirror.drain()] == [Cleared()]
    assert mirror.held() == ()


def test_sglangs_decoder_reads_the_kv_of_our_stream_and_skips_the_rest() -> None:
    told: list[Event] = [
        Cleared(),
        KvStored((1, (1 << 64) - 2), None, b"space", BLOCK),
        KvStored((3,), (1 << 64) - 2, b"space", 9),
        StateStored(3, 137, b"space"),
        StateRemoved(3),
        KvRemoved((3,)),
        KvRemoved((1, (1 << 64) - 2)),
    ]
    payload = Encoder(BLOCK, 1).batch("worker", 7, map(Told, told), 1.5)
    batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
    assert (batch.ts, batch.attn_dp_rank) == (1.5, 1)
    news = [each for each in batch.events if not isinstance(each, BlockRemoved) or each.block_hashes]
    assert news == [
        AllBlocksCleared(),
        BlockStored([1, -2], None, [], BLOCK, None, "GPU"),
        BlockRemoved([1, -2], "GPU"),
    ]
    assert Decoder().decode(payload, "worker", 0) == Batch("worker", 7, 0, tuple(told))


def test_what_sglang_encodes_is_read_as_what_it_said() -> None:
    batch = KVEventBatch(1.5, [BlockStored([1, -2], 5, [1, 2], 1, None, "GPU", session_id="s"), AllBlocksCleared()], 0)
    expected = (KvStored((1, (1 << 64) - 2), 5, b"", 1), Cleared())
    assert Decoder().decode(msgspec.msgpack.encode(batch), "stock", 3) == Batch("stock", 0, 3, expected)


@pytest.mark.parametrize(("extra_key", "cache_salt"), [(None, None), ("a", None), (None, "s"), ("a", "s")])
def test_hashes_are_sglangs_own_in_its_format_that_tells_adapters_and_tenants_apart(
    extra_key: str | None, cache_salt: str | None
) -> None:
    ids = array("q", [7, 1, 2, 1 << 40, 5, 6, 7, 8, 9, 10])
    above = SimpleNamespace(key=[], parent=None, hash_value=[], event_hash_value=None)
    key = RadixKey(ids, extra_key, cache_salt=cache_salt)
    node = SimpleNamespace(key=key, parent=above, hash_value=None, event_hash_value=None)
    seed = kv_event_namespace_seed(extra_key=extra_key, cache_salt=cache_salt)
    theirs = [
        namespaced_block_hash(hash_str_to_int64(each), namespace_seed=seed)
        for each in compute_node_event_hash_values(node, 4)
    ]
    space = HashSpace.of("model", extra_key, cache_salt)
    ours = [space.hash(each) for each in space.digests(space.start, ids.tobytes(), 4)]
    assert ours == [each % (1 << 64) for each in theirs]
    assert len(ours) == 3
