"""Events come back from the wire as they went, and nothing else gets through."""

from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("msgspec", reason="the router extra is not installed: pip install '.[router]'")
pytest.importorskip("zmq", reason="the router extra is not installed: pip install '.[router]'")

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from marconi.events.base import (
    MAX_HASH,
    Batch,
    Cleared,
    Event,
    FreeMemory,
    KvRemoved,
    KvStored,
    Snapshot,
    StateRemoved,
    StateStored,
    StoreReach,
    WorkerLoad,
)
from marconi.events.codec import DEVICE, FULL_ATTENTION, MLA_ATTENTION, Decoder, Encoder, Limits, Malformed, Published
from rig import vllm_events as vllm

from .wire import BLOCK_TOKENS, WORKER, events, states, stored


def encoded(told: list[Event], worker: str = WORKER, epoch: int = 7) -> bytes:
    return Encoder(BLOCK_TOKENS).batch(worker, epoch, map(Published, told), 1.5)


def wire(payload: bytes) -> list[dict[str, object]]:
    events: list[dict[str, object]] = msgspec.msgpack.decode(payload)[1]
    return events


@given(events, st.integers(0, (1 << 63) - 1), st.text(min_size=1, max_size=20))
def test_a_batch_comes_back_as_it_went(told: list[Event], epoch: int, worker: str) -> None:
    payload = encoded(told, worker, epoch)
    assert Decoder().decode(payload, "another", 3) == Batch(worker, epoch, 3, tuple(told))


amounts = st.integers(0, 1 << 40)
loads = st.builds(
    WorkerLoad,
    *(amounts, amounts, st.integers(1, 1 << 40), amounts),
    st.none() | st.builds(FreeMemory, amounts, amounts, amounts, amounts),
    st.floats(0, 1e9),
)


@given(events, loads)
def test_a_load_comes_back_with_its_batch(told: list[Event], load: WorkerLoad) -> None:
    payload = Encoder(BLOCK_TOKENS).batch(WORKER, 7, map(Published, told), 1.5, load)
    assert Decoder().decode(payload, WORKER, 3) == Batch(WORKER, 7, 3, tuple(told), load)


class FromWithoutLoad(msgspec.Struct, array_like=True, tag="from"):
    """A payload's first event, as decoders knew it before it told a load."""

    version: int
    worker: str
    epoch: int
    number: int | None


def test_a_decoder_that_knows_no_loads_reads_the_payload_and_one_that_does_reads_a_payload_without() -> None:
    load = WorkerLoad(1, 2, 3, 4, FreeMemory(5, 6, 7, 8), 0.5, StoreReach(9, 0.25, 2.0))
    payload = Encoder(BLOCK_TOKENS).batch(WORKER, 7, (), 1.5, load)
    (first,) = wire(payload)
    assert first["marconi"] == ["from", 1, WORKER, 7, None, [0.5, 1, 2, 3, 4, [5, 6, 7, 8], [9, 0.25, 2.0]]]
    carried = msgspec.msgpack.encode(first["marconi"])
    assert msgspec.msgpack.decode(carried, type=FromWithoutLoad) == FromWithoutLoad(1, WORKER, 7, None)
    before = {"type": "BlockRemoved", "block_hashes": [], "marconi": ["from", 1, WORKER, 7, None]}
    assert Decoder().decode(msgspec.msgpack.encode([1.5, [before], None]), "", 3) == Batch(WORKER, 7, 3, ())


@given(st.lists(stored | states, max_size=20), st.integers(0, 1 << 40), st.integers(-1, 1 << 40))
def test_a_snapshot_comes_back_as_it_went(held: list[Event], number: int, sequence: int) -> None:
    payload = Encoder(BLOCK_TOKENS, 3).snapshot(WORKER, 7, number, held, 1.5)
    assert Decoder().decode(payload, WORKER, sequence) == Snapshot(WORKER, 7, sequence, number, tuple(held))
    assert msgspec.msgpack.decode(payload)[::2] == [1.5, 3]


@given(events)
def test_only_whole_blocks_and_their_ends_are_told_in_the_words_of_kv_events(told: list[Event]) -> None:
    for event in wire(encoded(told)):
        if "marconi" in event:
            assert event["type"] == "BlockRemoved"
            assert event["block_hashes"] == []
        elif event["type"] == "BlockStored":
            assert event["block_size"] == BLOCK_TOKENS
            assert event["token_ids"] == []
        elif event["type"] == "BlockRemoved":
            assert event["medium"] == DEVICE


def test_the_end_of_a_part_of_a_block_is_told_beside_kv_events_and_that_of_a_block_among_them() -> None:
    told: list[Event] = [
        KvStored((1,), None, b"", BLOCK_TOKENS), KvStored((2,), 1, b"", 9), KvRemoved((2,)), KvRemoved((1,))
    ]  # fmt: skip
    plain = [event for event in wire(encoded(told)) if "marconi" not in event]
    assert [(event["type"], event["block_hashes"]) for event in plain] == [("BlockStored", [1]), ("BlockRemoved", [1])]


def test_tokens_and_salts_are_told_only_where_they_are_given() -> None:
    told = [
        Published(KvStored((1,), None, b"", BLOCK_TOKENS), [5, 6], "tenant"),
        Published(KvStored((2,), 1, b"", BLOCK_TOKENS)),
    ]
    first, second = wire(Encoder(BLOCK_TOKENS).batch(WORKER, 7, told, 1.5))[1:]
    assert (first["token_ids"], first["cache_salt"]) == ([5, 6], "tenant")
    assert second["token_ids"] == []
    assert "cache_salt" not in second


def test_a_stock_worker_is_read_as_kv_of_epoch_0_on_the_device() -> None:
    payload = msgspec.msgpack.encode(
        [1.5, [
            {"type": "BlockStored", "block_hashes": [-1], "parent_block_hash": None, "token_ids": [1, 2],
             "block_size": 2, "lora_id": None, "medium": "GPU", "session_id": "s"},
            {"type": "BlockStored", "block_hashes": [5], "parent_block_hash": None, "token_ids": [[1, 2]],
             "block_size": 1, "lora_id": None, "medium": "CPU_PINNED"},
            {"type": "BlockRemoved", "block_hashes": [-1], "medium": "GPU"},
            {"type": "BlockRemoved", "block_hashes": [5], "medium": "CPU_PINNED"},
            {"type": "AllBlocksCleared"},
        ], 0]
    )  # fmt: skip
    expected = (KvStored((2**64 - 1,), None, b"", 2), KvRemoved((2**64 - 1,)), Cleared())
    assert Decoder().decode(payload, "stock", 4) == Batch("stock", 0, 4, expected)


EVERYTHING = [
    Published(KvStored((1, MAX_HASH), None, b"space", BLOCK_TOKENS), range(2 * BLOCK_TOKENS), "tenant", "adapter"),
    Published(KvStored((3,), MAX_HASH, b"space", 9)),
    Published(StateStored(3, 137, b"space")),
    Published(StateRemoved(3)),
    Published(KvRemoved((3,))),
    Published(KvRemoved((1, MAX_HASH))),
    Published(KvStored((4,), None, b"", BLOCK_TOKENS)),
    Published(Cleared()),
]
TAKEN = (vllm.BlockRemoved([], DEVICE),) * 4
"""What a decoder of vLLM's makes of states and of parts of blocks."""


@pytest.mark.parametrize("kind", [FULL_ATTENTION, MLA_ATTENTION])
def test_a_decoder_of_vllms_reads_kv_in_its_group_and_nothing_of_states(kind: str) -> None:
    load = WorkerLoad(1, 2, 8, 300, FreeMemory(64, 128, 1, 2), 0.25)
    payload = Encoder(BLOCK_TOKENS, 1, kind).batch(WORKER, 7, EVERYTHING, 1.5, load)
    group: dict[str, Any] = {"group_idx": 0, "kv_cache_spec_kind": kind}
    token_ids = list(range(2 * BLOCK_TOKENS))
    assert msgspec.msgpack.decode(payload, type=vllm.KVEventBatch) == vllm.KVEventBatch(
        1.5,
        [
            vllm.BlockRemoved([], DEVICE),
            vllm.BlockStored([1, -1], None, token_ids, BLOCK_TOKENS, None, DEVICE, "adapter", **group),
            *TAKEN,
            vllm.BlockRemoved([1, -1], DEVICE, 0),
            vllm.BlockStored([4], None, [], BLOCK_TOKENS, None, DEVICE, None, **group),
            vllm.AllBlocksCleared(),
        ],
        1,
    )


@given(events)
def test_a_decoder_of_vllms_reads_every_batch_and_snapshot(told: list[Event]) -> None:
    encoder = Encoder(BLOCK_TOKENS, 3)
    held = [event for event in told if isinstance(event, KvStored | StateStored)]
    for payload, num_events in (
        (encoder.batch(WORKER, 7, map(Published, told), 1.5), len(told)),
        (encoder.snapshot(WORKER, 7, 5, held, 1.5), len(held)),
    ):
        batch = msgspec.msgpack.decode(payload, type=vllm.KVEventBatch)
        assert (len(batch.events), batch.data_parallel_rank) == (1 + num_events, 3)
        for event in batch.events:
            assert isinstance(event, vllm.AllBlocksCleared) or event.medium == DEVICE
            assert isinstance(event, vllm.AllBlocksCleared) or not event.block_hashes or event.group_idx == 0


@pytest.mark.parametrize(
    "name", ["block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"]
)
def test_a_decoder_of_vllms_refuses_a_payload_without_a_field_that_it_requires(name: str) -> None:
    time_s, wires, dp_rank = msgspec.msgpack.decode(Encoder(BLOCK_TOKENS).batch(WORKER, 7, EVERYTHING, 1.5))
    for wire_event in wires:
        wire_event.pop(name, None)
    with pytest.raises(msgspec.ValidationError, match=f"missing required field `{name}`"):
        msgspec.msgpack.decode(msgspec.msgpack.encode([time_s, wires, dp_rank]), type=vllm.KVEventBatch)


class StoredBeforeGroups(msgspec.Struct, tag="BlockStored", frozen=True):
    """As our own decoders knew it before it named its group."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    cache_salt: str | None = None
    namespace: bytes = b""


class RemovedBeforeGroups(msgspec.Struct, tag="BlockRemoved", frozen=True):
    """As our own decoders knew it before it named its group."""

    block_hashes: list[int]
    medium: str | None = None
    marconi: list[Any] | None = None


def test_a_decoder_that_knows_no_groups_reads_the_payload_and_one_that_does_reads_a_payload_without() -> None:
    told = [each._replace(token_ids=(), cache_salt=None, lora_name=None) for each in EVERYTHING[:-1]]
    payload = Encoder(BLOCK_TOKENS).batch(WORKER, 7, told, 1.5)
    before: list[Any] = [
        msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=StoredBeforeGroups | RemovedBeforeGroups)
        for event in wire(payload)
    ]
    assert before[0] == RemovedBeforeGroups([], DEVICE, ["from", 1, WORKER, 7, None, None])
    assert before[1] == StoredBeforeGroups([1, -1], None, [], BLOCK_TOKENS, None, DEVICE, None, b"space")
    assert before[3] == RemovedBeforeGroups([], DEVICE, ["state", 3, 137, b"space"])
    again = msgspec.msgpack.encode([1.5, before, None])
    assert Decoder().decode(again, "", 3) == Decoder().decode(payload, "", 3)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_malformed(payload: bytes) -> None:
    with suppress(Malformed):
        assert isinstance(Decoder().decode(payload, WORKER, 0), Batch | Snapshot)


@given(events, st.data())
def test_a_payload_with_a_bit_flipped_or_an_end_missing_is_a_message_or_malformed(
    told: list[Event], data: st.DataObject
) -> None:
    payload = bytearray(encoded(told))
    at = data.draw(st.integers(0, len(payload) - 1))
    payload[at] ^= 1 << data.draw(st.integers(0, 7))
    for damaged in (bytes(payload), bytes(payload[:at])):
        with suppress(Malformed):
            assert isinstance(Decoder().decode(damaged, WORKER, 0), Batch | Snapshot)


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        ({"type": "Unheard"}, "Unheard"),
        ({"type": "BlockRemoved", "block_hashes": [1.5]}, "int"),
        ({"type": "BlockRemoved", "block_hashes": [], "marconi": ["state", 1, 0, b""]}, ">= 1"),
        ({"type": "BlockRemoved", "block_hashes": [], "marconi": ["state", 1, 5, b"x" * 65]}, "<= 64"),
        ({"type": "BlockRemoved", "block_hashes": [], "marconi": ["from", 2, "w", 1, None]}, "must be 1, got 2"),
        ({"type": "BlockRemoved", "block_hashes": [], "marconi": ["from", 1, "", 1, None]}, ">= 1"),
        ({"type": "BlockRemoved", "block_hashes": [], "marconi": ["from", 1, "w", -1, None]}, ">= 0"),
        (
            {
                "type": "BlockRemoved",
                "block_hashes": [],
                "marconi": ["from", 1, "w", 1, None, [0.0, -1, 0, 1, 0, None]],
            },
            ">= 0",
        ),
        (
            {"type": "BlockRemoved", "block_hashes": [], "marconi": ["from", 1, "w", 1, None, [0.0, 0, 0, 0, 0, None]]},
            ">= 1",
        ),
    ],
)
def test_what_an_event_cannot_be_is_malformed(event: dict[str, object], reason: str) -> None:
    with pytest.raises(Malformed, match=reason):
        Decoder().decode(msgspec.msgpack.encode([1.5, [event], None]), WORKER, 0)


def test_a_snapshot_that_removes_and_a_batch_that_names_two_workers_are_malformed() -> None:
    whose = {"type": "BlockRemoved", "block_hashes": [], "marconi": ["from", 1, "w", 1, 5]}
    for second, reason in ((whose, "must name its worker once"), ({"type": "AllBlocksCleared"}, "snapshot")):
        with pytest.raises(Malformed, match=reason):
            Decoder().decode(msgspec.msgpack.encode([1.5, [whose, second], None]), WORKER, 0)


def test_more_than_a_worker_may_send_is_malformed() -> None:
    told: list[Event] = [KvStored((1, 2, 3), None, b"", BLOCK_TOKENS), StateStored(3, 192, b""), StateRemoved(3)]
    payload = encoded(told)
    assert Decoder(Limits(len(payload), 4, 3)).decode(payload, WORKER, 0)
    for limits, reason in (
        (Limits(len(payload) - 1, 4, 3), "bytes"),
        (Limits(len(payload), 3, 3), "events, got 4"),
        (Limits(len(payload), 4, 2), "hashes, got 3"),
    ):
        with pytest.raises(Malformed, match=reason):
            Decoder(limits).decode(payload, WORKER, 0)
