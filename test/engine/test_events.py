"""What the server's cache notes of itself leaves what its tree holds, and SGLang's consumers read the events."""

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

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
from sglang.srt.mem_cache.events import KVCacheEventRecorder, KvEventLoraNames
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import compute_node_event_hash_values, hash_str_to_int64

from marconi.engine.events.publishing import CachePublisher, ServedModel
from marconi.engine.events.sglang_events import KvEventRecorder
from marconi.engine.launch.flags import Flags
from marconi.engine.launch.policies import PolicyChoice
from marconi.engine.version import Refusal
from marconi.events.address import TcpAddress
from marconi.events.base import (
    Batch,
    Cleared,
    Event,
    FreeMemory,
    KvRemoved,
    KvStored,
    StateRemoved,
    StateStored,
    WorkerLoad,
)
from marconi.events.codec import MLA_ATTENTION, Decoder, Encoder, Published
from marconi.events.hashes import HashSpace
from marconi.events.mirror import Mirror
from marconi.events.tree_log import DroppedKv, DroppedState, KeptKv, KeptState, Tenant, TreeLog
from rig import vllm_events as vllm
from rig.events import EventCheck

from .host_replays import Setting, agents, forks, on_marconi
from .processes import free_ports
from .test_host_replay import SETTINGS

pytestmark = pytest.mark.usefixtures("sglang_configuration")

BLOCK = 64
BEST = PolicyChoice("best")
NAMES = (Tenant(), Tenant("a", None), Tenant(None, "s"), Tenant("a", "s"))


@pytest.mark.one_in(4)
@pytest.mark.parametrize("trace", [agents, forks])
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_events_leave_what_the_tree_holds_after_every_request(setting: Setting, trace: type) -> None:
    replay = on_marconi(setting, BEST, TreeLog())
    # The host replay names a space by its number.
    told = EventCheck(replay.cache, (Tenant(), Tenant("1")), BLOCK)
    for request in trace(seed=3):
        replay.serve(request)
        _, states = told.check()
    assert states
    assert sum(replay.cache.tree_core.hybrid.counters.num_evictions.values()) > 20
    replay.cache.reset()
    assert told.check() == (set(), {})


SERVED = ServedModel("tiny", page_tokens=1, max_context_tokens=4096, http_port=30000, rank=0, num_ranks=1)


def test_a_cache_that_ends_tells_what_waits_and_notes_nothing_more() -> None:
    cache = on_marconi(SETTINGS["little-kv"], BEST, TreeLog()).cache
    flags = Flags(events=TcpAddress("127.0.0.1", free_ports(2)))
    cache.publisher = CachePublisher(cache.log, flags, SERVED, KvEventLoraNames())
    assert flags.events is not None
    with pytest.raises(Refusal, match=f"--marconi-events: tcp://127.0.0.1:{flags.events.port}: Address already in use"):
        CachePublisher(TreeLog(), flags, SERVED, KvEventLoraNames())
    before = cache.status().events
    assert (before.is_publishing, before.block_tokens, before.model) == (True, 64, "tiny")
    cache.log.flushed()
    cache.release_host_resources()
    cache.release_host_resources()
    after = cache.status().events
    assert (after.is_publishing, after.num_waiting) == (False, 0)
    assert after.num_events > 0
    cache.reset()
    assert not cache.log.changes


@pytest.mark.parametrize("has_tokens", [False, True])
def test_an_adapter_is_named_with_the_tokens_by_what_sglang_knows_of_its_id(has_tokens: bool) -> None:
    names, log = KvEventLoraNames(), TreeLog()
    names.register(lora_id="1" * 32, lora_name="adapter")
    flags = Flags(events=TcpAddress("127.0.0.1", free_ports(2)), events_tokens=has_tokens)
    publisher = CachePublisher(log, flags, replace(SERVED, kv_kind=MLA_ATTENTION), names)
    log.changes += [
        KeptKv(1, 0, bytes(8 * BLOCK), Tenant(f"key{'1' * 32}")),
        KeptKv(2, 0, bytes(8 * BLOCK), Tenant("key")),
    ]
    publisher.close()
    payloads = [payload for _, payload in publisher._publisher._sent]
    events = [each for payload in payloads for each in msgspec.msgpack.decode(payload, type=vllm.KVEventBatch).events]
    found = [(each.lora_name, each.kv_cache_spec_kind) for each in events if isinstance(each, vllm.BlockStored)]
    assert found == [("adapter" if has_tokens else None, MLA_ATTENTION), (None, MLA_ATTENTION)]


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
    load = WorkerLoad(1, 2, 8, 300, FreeMemory(64, 128, 1, 2), 0.25)
    payload = Encoder(BLOCK, 1).batch("worker", 7, map(Published, told), 1.5, load)
    batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
    assert (batch.ts, batch.attn_dp_rank) == (1.5, 1)
    news = [each for each in batch.events if not isinstance(each, BlockRemoved) or each.block_hashes]
    assert news == [
        AllBlocksCleared(),
        BlockStored([1, -2], None, [], BLOCK, None, "GPU"),
        BlockRemoved([1, -2], "GPU"),
    ]
    assert Decoder().decode(payload, "worker", 0) == Batch("worker", 7, 0, tuple(told), load)


def test_what_sglang_encodes_is_read_as_what_it_said() -> None:
    batch = KVEventBatch(1.5, [BlockStored([1, -2], 5, [1, 2], 1, None, "GPU", session_id="s"), AllBlocksCleared()], 0)
    expected = (KvStored((1, (1 << 64) - 2), 5, b"", 1), Cleared())
    assert Decoder().decode(msgspec.msgpack.encode(batch), "stock", 3) == Batch("stock", 0, 3, expected)


@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("page", [1, 16])
def test_blocks_are_told_under_the_hashes_that_sglangs_own_recorder_gives_them(names: Tenant, page: int) -> None:
    """Of a path of three nodes: in its `dynamo` format, which tells adapters and tenants apart."""
    log, told = TreeLog(), list[Published]()
    mirror = Mirror(log, page, has_tokens=True)
    recorder = KVCacheEventRecorder(enabled=True, page_size=page, dynamo_format=True)
    above = SimpleNamespace(key=[], parent=None, hash_value=[], event_hash_value=None)
    for number, num_pages in enumerate((3, 1, 2), start=1):
        ids = array("q", range(7 * number, 7 * number + num_pages * page))
        key = RadixKey(ids, *names[:1], cache_salt=names.cache_salt)
        above = SimpleNamespace(key=key, parent=above, hash_value=None, event_hash_value=None)
        recorder.record_store(above)
        log.changes.append(KeptKv(number, number - 1, ids.tobytes(), names))
        told += mirror.drain()
    recorder.record_remove(above)
    log.changes.append(DroppedKv(3))
    told += mirror.drain()
    payload = Encoder(page).batch("worker", 1, told, 0.0)
    ours = msgspec.msgpack.decode(payload, type=KVEventBatch).events[1:]
    theirs = recorder.take()
    assert list(blocks(ours)) == list(blocks(theirs))
    assert len(list(blocks(theirs))) == 6 + 2


@pytest.mark.parametrize("is_adapter", [False, True], ids=["", "adapter"])
@pytest.mark.parametrize("is_dynamo", [False, True], ids=["default", "dynamo"])
@pytest.mark.parametrize("names", NAMES)
@pytest.mark.parametrize("page", [1, 16])
def test_sglangs_publisher_is_given_what_its_own_recorder_would_give(
    page: int, names: Tenant, is_dynamo: bool, is_adapter: bool
) -> None:
    """Of a path of three nodes, the last of which goes, and a flush."""
    log, adapters = TreeLog(), KvEventLoraNames()
    if is_adapter:
        adapters.register(SimpleNamespace(extra_key=names.extra_key, lora_id="id"), "name")
    params = SimpleNamespace(page_size=page, dynamo_kv_event_format=is_dynamo, kv_event_lora_names=adapters)
    ours = KvEventRecorder(log, params)  # type: ignore[arg-type]
    theirs = KVCacheEventRecorder(enabled=True, page_size=page, dynamo_format=is_dynamo, lora_names=adapters)
    told: list[Any] = []
    above = SimpleNamespace(key=[], parent=None, hash_value=[], event_hash_value=None)
    for number, num_pages in enumerate((300, 1, 2), start=1):
        ids = array("q", range(7 * number, 7 * number + num_pages * page))
        ids[-1] += 1 << 40
        key = RadixKey(ids, names.extra_key, cache_salt=names.cache_salt)
        above = SimpleNamespace(key=key, parent=above, hash_value=None, event_hash_value=None)
        theirs.record_store(above)
        log.changes.append(KeptKv(number, number - 1, ids.tobytes(), names))
        told += ours.take()
    log.changes += [KeptState(3), DroppedState(3), DroppedKv(3)]
    theirs.record_remove(above)
    log.flushed()
    theirs.record_all_cleared()
    told += ours.take()
    assert ours.take() == []
    expected = theirs.take()
    assert told[-1] == expected[-1] == AllBlocksCleared()
    assert {getattr(each, "lora_name", None) for each in told[:-2]} == {getattr(expected[0], "lora_name", None)}
    assert list(blocks(told[:-1])) == list(blocks(expected[:-1]))


@pytest.mark.one_in(5)
@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_sglangs_consumers_know_of_the_kv_that_the_tree_holds_after_every_request(setting: Setting) -> None:
    """Through evictions; one that hears no removal is wrong."""
    replay = on_marconi(setting, BEST, TreeLog())
    core, page = replay.cache.tree_core, setting.page_tokens
    params = SimpleNamespace(page_size=page, dynamo_kv_event_format=True, kv_event_lora_names=KvEventLoraNames())
    replay.cache.event_recorder = KvEventRecorder(replay.cache.log, params)  # type: ignore[arg-type]
    known, ever = set[int](), set[int]()
    for request in forks(seed=3):
        replay.serve(request)
        for event in replay.cache.take_events():
            if isinstance(event, BlockStored):
                assert (
                    len(event.token_ids) == len(event.block_hashes) * event.block_size == len(event.block_hashes) * page
                )
                known.update(event.block_hashes)
                ever.update(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                known.difference_update(event.block_hashes)
        assert len(known) == core.hybrid.tree.num_tokens // page
    assert len(ever) > len(known) > 0
    replay.cache.reset()
    assert replay.cache.take_events() == [AllBlocksCleared()]


def blocks(events: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """What is stored and removed, a block at a time, however many come together."""
    for event in events:
        parent = getattr(event, "parent_block_hash", None)
        for block_hash in event.block_hashes:
            if isinstance(event, BlockStored):
                yield block_hash, parent, event.block_size, event.cache_salt, event.token_ids[: event.block_size]
                parent = block_hash
                event.token_ids = event.token_ids[event.block_size :]
            else:
                yield (block_hash,)


@pytest.mark.parametrize(("extra_key", "cache_salt"), [(each.extra_key, each.cache_salt) for each in NAMES])
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
