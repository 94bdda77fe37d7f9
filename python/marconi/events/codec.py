"""Events as bytes: SGLang's KV events, and beside them those of states, which SGLang has none of.

A payload is SGLang's `KVEventBatch` (`srt/disaggregation/kv_events.py`), msgpack:

    [time_s, [event, ...], dp_rank]         an event: a map, its "type" the name of SGLang's class

`KvStored` of whole blocks is a `BlockStored`, `KvRemoved` a `BlockRemoved`, `Cleared` an `AllBlocksCleared`. Decoders
of those fail as a whole on an unknown type, and a Rust one on a fourth element of the array; all of them skip unknown
keys of a map. So everything else is a key of an empty removal:

    {"type": "BlockRemoved", "block_hashes": [], "marconi": [kind, ...]}

    "from"      version, worker, epoch, number of the snapshot or nil, load      the first event of every payload
    "state"     hash, depth, namespace         `StateStored`
    "no-state"  hash                           `StateRemoved`
    "part"      hashes, parent, namespace, block_tokens      `KvStored` of less than a block, which only a state needs
    "no-part"   hashes                         `KvRemoved` of those

The load (`WorkerLoad`) is nil, or left out:

    [age_s, num_running, num_waiting, max_running, num_prefill_tokens, memory, store]
    memory      nil, or [free_tokens, evictable_tokens, free_slots, evictable_slots]
    store       nil, or [store, s_per_token, s_per_state]

It ends an array, whose further elements decoders skip, so one that knows no loads reads the payload all the same.

Beside SGLang's fields are those of vLLM's events (`vllm/distributed/kv_events.py`), whose layout is the same:
`lora_name` and the `medium` of removals, which its decoders require even where they are nil, and the group of the KV,
`group_idx` 0 with its `kv_cache_spec_kind`. States have no group: SGLang's decoders ignore groups, and would take the
removal of a state for that of the KV before it. As in vLLM, KV on the device has no `locality` and no `ownership`.

Hashes are signed on the wire, as SGLang's, and unsigned in the records. Sequence numbers travel beside the payload.
Without "from" a payload is stock SGLang's: epoch 0, its worker that of the socket, no states; events of KV that is not
on the device are skipped.

Tokens (`token_ids`, and so users' texts), salts and adapters' names are in it only with a worker's flag; nothing here
needs them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Annotated, Final, NamedTuple, TypeAlias, assert_never

import msgspec

from marconi.events.base import (
    MAX_HASH,
    Batch,
    Cleared,
    Event,
    KvRemoved,
    KvStored,
    Snapshot,
    StateRemoved,
    StateStored,
    WorkerLoad,
    is_in_store,
)

VERSION: Final = 1
DEVICE: Final = "GPU"
"""SGLang's `StorageMedium` of KV on the device, and vLLM's."""
FULL_ATTENTION: Final = "full_attention"
"""vLLM's kind of KV of keys and values."""
MLA_ATTENTION: Final = "mla_attention"
"""vLLM's kind of KV of latents."""
_KV_GROUP: Final = 0

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1 << 40)]
_Digest: TypeAlias = Annotated[bytes, msgspec.Meta(max_length=64)]
_Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Epoch: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Amount: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
_Store64: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
_Age: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]


class Malformed(ValueError):
    """A payload that cannot be decoded, or is above the limits."""


class Published(NamedTuple):
    """An event, and the tokens and names of a `KvStored` where they are published too."""

    event: Event
    token_ids: Sequence[int] = ()
    cache_salt: str | None = None
    lora_name: str | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """The most that one payload may hold."""

    max_bytes: int = 64 << 20
    max_events: int = 1 << 20
    max_hashes: int = 1 << 22


class _Memory(msgspec.Struct, array_like=True, frozen=True):
    free_tokens: _Amount
    evictable_tokens: _Amount
    free_slots: _Amount
    evictable_slots: _Amount


class _Store(msgspec.Struct, array_like=True, frozen=True):
    store: _Store64
    s_per_token: _Age
    s_per_state: _Age


class _Load(msgspec.Struct, array_like=True, frozen=True):
    age_s: _Age
    num_running: _Amount
    num_waiting: _Amount
    max_running: _Count
    num_prefill_tokens: _Amount
    memory: _Memory | None
    store: _Store | None = None


class _From(msgspec.Struct, array_like=True, tag="from", frozen=True):
    version: int
    worker: _Name
    epoch: _Epoch
    number: _Epoch | None
    load: _Load | None = None


class _State(msgspec.Struct, array_like=True, tag="state", frozen=True):
    block_hash: int
    depth: _Count
    namespace: _Digest


class _NoState(msgspec.Struct, array_like=True, tag="no-state", frozen=True):
    block_hash: int


class _Part(msgspec.Struct, array_like=True, tag="part", frozen=True):
    block_hashes: list[int]
    parent: int | None
    namespace: _Digest
    block_tokens: _Count


class _NoPart(msgspec.Struct, array_like=True, tag="no-part", frozen=True):
    block_hashes: list[int]


_More: TypeAlias = _From | _State | _NoState | _Part | _NoPart


class _BlockStored(msgspec.Struct, tag="BlockStored", omit_defaults=True, frozen=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: msgspec.Raw
    block_size: _Count
    lora_id: msgspec.Raw = msgspec.Raw(b"\xc0")
    medium: str | None = None
    cache_salt: str | None = None
    namespace: _Digest = b""
    lora_name: str | msgspec.UnsetType | None = msgspec.UNSET
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _BlockRemoved(msgspec.Struct, tag="BlockRemoved", omit_defaults=True, frozen=True):
    block_hashes: list[int]
    medium: str | None = None
    marconi: _More | None = None
    group_idx: int | None = None


class _AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", frozen=True):
    pass


_Wire: TypeAlias = _BlockStored | _BlockRemoved | _AllBlocksCleared


class _Payload(msgspec.Struct, array_like=True, frozen=True):
    time_s: float
    events: list[_Wire]
    dp_rank: int | None = None


_NIL = msgspec.Raw(b"\xc0")
_NO_TOKENS = msgspec.Raw(b"\x90")


class Encoder:
    """Encodes the payloads of one worker, in order; remembers which hashes are those of parts."""

    def __init__(self, block_tokens: int, dp_rank: int | None = None, kv_kind: str = FULL_ATTENTION) -> None:
        """`block_tokens` is the size of a whole block, `kv_kind` vLLM's kind of the KV."""
        self._block_tokens = block_tokens
        self._dp_rank = dp_rank
        self._kv_kind = kv_kind
        self._parts: set[int] = set()
        self._msgpack = msgspec.msgpack.Encoder()

    def batch(
        self, worker: str, epoch: int, published: Iterable[Published], time_s: float, load: WorkerLoad | None = None
    ) -> bytes:
        """Encode the next batch."""
        wire: list[_Wire] = [_carried(_From(VERSION, worker, epoch, None, None if load is None else _on_wire(load)))]
        for each in published:
            wire.append(self._event(each))
            self._note(each.event)
        return self._msgpack.encode(_Payload(time_s, wire, self._dp_rank))

    def snapshot(self, worker: str, epoch: int, number: int, events: Iterable[Event], time_s: float) -> bytes:
        """Encode a snapshot, whose events are taken one by one."""
        encode = self._msgpack.encode
        pieces = [encode(_carried(_From(VERSION, worker, epoch, number)))]
        pieces.extend(encode(self._event(Published(event))) for event in events)
        # As `_Payload`, but piece by piece: encoding all events at once would hold the interpreter's lock.
        head = b"\x93" + encode(time_s) + b"\xdd" + len(pieces).to_bytes(4, "big")
        return b"".join([head, *pieces, encode(self._dp_rank)])

    def _note(self, event: Event) -> None:
        match event:
            case KvStored() if self._is_carried(event):
                self._parts.update(event.block_hashes)
            case KvRemoved():
                self._parts.difference_update(event.block_hashes)
            case Cleared():
                self._parts.clear()
            case _:
                pass

    def _is_carried(self, stored: KvStored) -> bool:
        """True for parts, and for what is in a store: to other decoders either would be a block on the device."""
        return stored.block_tokens != self._block_tokens or is_in_store(stored.namespace)

    def _is_part(self, removed: KvRemoved) -> bool:
        return bool(removed.block_hashes) and self._parts.issuperset(removed.block_hashes)

    def _event(self, published: Published) -> _Wire:
        event = published.event
        match event:
            case KvStored(hashes, parent, namespace, block_tokens):
                block_hashes, above = signed(hashes), None if parent is None else _to_signed(parent)
                if self._is_carried(event):
                    return _carried(_Part(block_hashes, above, namespace, block_tokens))
                token_ids = list(published.token_ids)
                tokens = msgspec.Raw(self._msgpack.encode(token_ids)) if token_ids else _NO_TOKENS
                # Equal to the default, and so left out, `lora_id` would be a missing field to SGLang.
                return _BlockStored(
                    block_hashes,
                    above,
                    tokens,
                    block_tokens,
                    _NIL,
                    medium=DEVICE,
                    cache_salt=published.cache_salt,
                    namespace=namespace,
                    lora_name=published.lora_name,
                    group_idx=_KV_GROUP,
                    kv_cache_spec_kind=self._kv_kind,
                )
            case KvRemoved(hashes):
                if self._is_part(event):
                    return _carried(_NoPart(signed(hashes)))
                return _BlockRemoved(signed(hashes), DEVICE, group_idx=_KV_GROUP)
            case StateStored(block_hash, depth, namespace):
                return _carried(_State(_to_signed(block_hash), depth, namespace))
            case StateRemoved(block_hash):
                return _carried(_NoState(_to_signed(block_hash)))
            case Cleared():
                return _AllBlocksCleared()
            case never:
                assert_never(never)


class Decoder:
    """Decodes the payloads of any worker."""

    def __init__(self, limits: Limits = Limits()) -> None:
        self._limits = limits
        self._msgpack = msgspec.msgpack.Decoder(_Payload)

    def decode(self, payload: bytes, worker: str, sequence: int) -> Batch | Snapshot:
        """Decode a payload with its number; from `worker` where it names none. Raises `Malformed`."""
        limits = self._limits
        if len(payload) > limits.max_bytes:
            raise Malformed(f"a payload must have at most {limits.max_bytes} bytes, got {len(payload)}")
        try:
            wire = self._msgpack.decode(payload).events
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise Malformed(str(error)) from None
        if len(wire) > limits.max_events:
            raise Malformed(f"a payload must have at most {limits.max_events} events, got {len(wire)}")
        num_hashes = sum(map(_num_hashes, wire))
        if num_hashes > limits.max_hashes:
            raise Malformed(f"a payload must have at most {limits.max_hashes} hashes, got {num_hashes}")
        first = wire[0].marconi if wire and isinstance(wire[0], _BlockRemoved) else None
        if not isinstance(first, _From):
            return Batch(worker, 0, sequence, _records(wire))
        if first.version != VERSION:
            raise Malformed(f"the version of events must be {VERSION}, got {first.version}")
        events = _records(wire[1:])
        if first.number is None:
            load = msgspec.convert(first.load, WorkerLoad | None, from_attributes=True)
            return Batch(first.worker, first.epoch, sequence, events, load)
        if not all(isinstance(event, KvStored | StateStored) for event in events):
            raise Malformed("a snapshot must hold stored KV and states only")
        return Snapshot(first.worker, first.epoch, sequence, first.number, events)


def _carried(more: _More) -> _BlockRemoved:
    return _BlockRemoved([], DEVICE, more)


def _on_wire(load: WorkerLoad) -> _Load:
    """A load as it is sent, unchecked: one that is not possible is refused where it is decoded."""
    memory = None if load.memory is None else _Memory(*astuple(load.memory))
    store = None if load.store is None else _Store(*astuple(load.store))
    counts = load.num_running, load.num_waiting, load.max_running, load.num_prefill_tokens
    return _Load(load.age_s, *counts, memory, store)


def _num_hashes(wire: _Wire) -> int:
    if isinstance(wire, _AllBlocksCleared):
        return 0
    more = wire.marconi if isinstance(wire, _BlockRemoved) else None
    return len(wire.block_hashes) + (len(more.block_hashes) if isinstance(more, _Part | _NoPart) else 0)


def _records(wire: Iterable[_Wire]) -> tuple[Event, ...]:
    return tuple([event for each in wire if (event := _record(each)) is not None])


def _record(wire: _Wire) -> Event | None:
    match wire:
        case _AllBlocksCleared():
            return Cleared()
        case _BlockStored():
            if wire.medium not in (None, DEVICE):
                return None
            parent = None if wire.parent_block_hash is None else wire.parent_block_hash & MAX_HASH
            return KvStored(_unsigned(wire.block_hashes), parent, wire.namespace, wire.block_size)
        case _BlockRemoved(marconi=None):
            return KvRemoved(_unsigned(wire.block_hashes)) if wire.medium in (None, DEVICE) else None
        case _BlockRemoved(marconi=_From()):
            raise Malformed("a payload must name its worker once, got it twice")
        case _BlockRemoved(marconi=_State() as state):
            return StateStored(state.block_hash & MAX_HASH, state.depth, state.namespace)
        case _BlockRemoved(marconi=_NoState() as state):
            return StateRemoved(state.block_hash & MAX_HASH)
        case _BlockRemoved(marconi=_Part() as part):
            parent = None if part.parent is None else part.parent & MAX_HASH
            return KvStored(_unsigned(part.block_hashes), parent, part.namespace, part.block_tokens)
        case _BlockRemoved(marconi=_NoPart() as part):
            return KvRemoved(_unsigned(part.block_hashes))
        case _:
            raise AssertionError(wire)


def _to_signed(block_hash: int) -> int:
    return block_hash - (MAX_HASH + 1) if block_hash > MAX_HASH >> 1 else block_hash


def signed(hashes: Iterable[int]) -> list[int]:
    """Hashes as they are on the wire."""
    return [_to_signed(each) for each in hashes]


def _unsigned(hashes: Iterable[int]) -> tuple[int, ...]:
    return tuple([each & MAX_HASH for each in hashes])
