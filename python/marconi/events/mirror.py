"""A copy of a tree in blocks, kept by its log (`tree_log.py`): the source of a worker's events and snapshots.

A block of `block_tokens` belongs to the node in whose span it ends, and is stored and removed with it; splitting and
joining spans moves blocks from one to the other, and makes no event. Where a state stands within a block, the tokens
before it in the block are published as a block of their own (a *part*), which is removed with the state.

    |---- block ----|---- block ----|-- part          tokens from the root
    |---- node a -------|--- node b --- S             b owns the second block and, for its state S, the part

Chains are of whole digests, so a node keeps 32 bytes and a hash for each of its blocks, and its key, which is the
tree's own. A change costs time in proportion to its tokens; a snapshot, to the nodes.

Owner: the publisher's thread.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from marconi.events.base import Cleared, Event, KvRemoved, KvStored, StateRemoved, StateStored
from marconi.events.codec import Published
from marconi.events.hashes import ID_BYTES, HashSpace
from marconi.events.tree_log import (
    MAX_CHANGES,
    Change,
    DroppedKv,
    DroppedState,
    Flushed,
    Joined,
    KeptKv,
    KeptState,
    Split,
    Tenant,
    TreeLog,
)

MAX_BLOCKS: Final = 256
"""Blocks of one event; a longer span takes several, so that making one keeps no other thread waiting."""


@dataclass(slots=True)
class _Span:
    """A node; depths in tokens from the root."""

    parent: "_Span | None"
    key: bytes
    start: int
    space: HashSpace
    digests: list[bytes] = field(default_factory=list)
    hashes: list[int] = field(default_factory=list)
    has_state: bool = False
    part: int | None = None
    """The hash of the part before the state; None where the state stands at a block's end."""
    last_walk: int = 0
    """The last walk of `held` that reached it."""

    @property
    def end(self) -> int:
        return self.start + len(self.key) // ID_BYTES


class LogClosed(RuntimeError):
    """A log in which changes are missing."""


class Mirror:
    """A `marconi.events.publisher.Source` of logged changes."""

    def __init__(
        self,
        log: TreeLog,
        block_tokens: int,
        model: str | None = None,
        has_tokens: bool = False,
        space_of: Callable[[Tenant], HashSpace] | None = None,
        adapter_of: Callable[[Tenant], str | None] = lambda _: None,
    ) -> None:
        """A copy in blocks of `block_tokens`.

        `has_tokens`: whether to publish tokens, salts and adapters beside hashes, for consumers that hash them anew.
        `space_of` gives a tenant's hash scheme; by default that of all workers of `model`. `adapter_of` names a
        tenant's adapter.
        """
        self._log = log
        self._block_tokens = block_tokens
        self._space_of = space_of or (lambda tenant: HashSpace.of(model, *tenant))
        self._has_tokens = has_tokens
        self._adapter_of = adapter_of
        self._spans: dict[int, _Span] = {}
        self._num_walks = 0

    @property
    def num_waiting(self) -> int:
        """Number of changes that are logged and not drained."""
        return len(self._log.changes)

    def drain(self) -> Iterator[Published]:
        """Yield the events of the logged changes; `LogClosed` where some changes were not logged."""
        changes = self._log.changes
        for _ in range(len(changes)):
            yield from self._apply(changes.popleft())
        if self._log.is_closed:
            raise LogClosed(f"changes that wait to be published must be at most {MAX_CHANGES}, got more")

    def close(self) -> None:
        """Close the log."""
        self._log.close()

    def held(self) -> Iterator[Event]:
        """Yield everything held, a prefix before its continuations; iterate it before the next `drain`."""
        self._num_walks += 1
        for span in self._spans.values():
            path: list[_Span] = []
            above: _Span | None = span
            while above is not None and above.last_walk != self._num_walks:
                above.last_walk = self._num_walks
                path.append(above)
                above = above.parent
            for each in reversed(path):
                if each.hashes:
                    yield self._stored(each, 0)
                if each.has_state:
                    yield from self._state(each)

    def _apply(self, change: Change) -> Iterator[Published]:
        spans = self._spans
        match change:
            case KeptKv():
                yield from self._hold(change)
            case KeptState(node):
                yield from map(Published, self._keep_state(spans[node]))
            case DroppedState(node):
                yield from map(Published, self._drop_state(spans[node]))
            case DroppedKv(node):
                span = spans.pop(node)
                if span.hashes:
                    yield Published(KvRemoved(tuple(span.hashes)))
            case Split(upper, lower, upper_key, lower_key):
                below = spans[lower]
                above = spans[upper] = _Span(below.parent, upper_key, below.start, below.space)
                num_blocks = above.end // self._block_tokens - above.start // self._block_tokens
                above.digests, below.digests = below.digests[:num_blocks], below.digests[num_blocks:]
                above.hashes, below.hashes = below.hashes[:num_blocks], below.hashes[num_blocks:]
                below.parent, below.key, below.start = above, lower_key, above.end
            case Joined(upper, lower, key):
                above, below = spans.pop(upper), spans[lower]
                below.parent, below.key, below.start = above.parent, key, above.start
                below.digests, below.hashes = above.digests + below.digests, above.hashes + below.hashes
            case Flushed():
                spans.clear()
                yield Published(Cleared())

    def _hold(self, change: KeptKv) -> Iterator[Published]:
        node, parent, key, tenant = change
        above = self._spans.get(parent)
        space = above.space if above is not None else self._space_of(tenant)
        span = self._spans[node] = _Span(above, key, 0 if above is None else above.end, space)
        pending = self._pending(span.parent, span.start) + key
        block_bytes = self._block_tokens * ID_BYTES
        end = len(pending) // block_bytes * block_bytes
        for start in range(0, end, MAX_BLOCKS * block_bytes):
            num_before = len(span.digests)
            packed = pending[start : min(start + MAX_BLOCKS * block_bytes, end)]
            digests = space.digests(self._digest(span, space), packed, self._block_tokens)
            span.digests += digests
            span.hashes += [space.hash(digest) for digest in digests]
            stored = self._stored(span, num_before)
            if self._has_tokens and not tenant.store:
                token_ids = np.frombuffer(packed, "<i8").tolist()
                yield Published(stored, token_ids, tenant.cache_salt, self._adapter_of(tenant))
            else:
                yield Published(stored)

    def _keep_state(self, span: _Span) -> list[Event]:
        assert not span.has_state, f"a second state at {span.end}"
        span.has_state = True
        if span.end % self._block_tokens:
            pending = self._pending(span, span.end)
            (digest,) = span.space.digests(self._digest(span, span.space), pending, self._block_tokens)
            span.part = span.space.hash(digest)
        return self._state(span)

    def _drop_state(self, span: _Span) -> list[Event]:
        assert span.has_state, f"no state at {span.end}"
        part, span.part, span.has_state = span.part, None, False
        return [
            StateRemoved(span.hashes[-1] if part is None else part),
            *([] if part is None else [KvRemoved((part,))]),
        ]

    def _stored(self, span: _Span, first: int) -> KvStored:
        """The event of a span's blocks from the `first` on."""
        above = span.hashes[first - 1] if first else self._last(span.parent)
        return KvStored(tuple(span.hashes[first:]), above, span.space.namespace, self._block_tokens)

    def _state(self, span: _Span) -> list[Event]:
        namespace, end = span.space.namespace, span.end
        if span.part is None:
            last = self._last(span)
            assert last is not None
            return [StateStored(last, end, namespace)]
        part = KvStored((span.part,), self._last(span), namespace, end % self._block_tokens)
        return [part, StateStored(span.part, end, namespace)]

    def _last(self, span: _Span | None) -> int | None:
        """The hash of the last block that ends in `span` or above it."""
        while span is not None and not span.hashes:
            span = span.parent
        return None if span is None else span.hashes[-1]

    def _digest(self, span: _Span | None, space: HashSpace) -> bytes:
        """The digest of that block; what the first one follows where there is none."""
        while span is not None and not span.digests:
            span = span.parent
        return space.start if span is None else span.digests[-1]

    def _pending(self, span: _Span | None, depth: int) -> bytes:
        """Packed ids of the tokens after the last block before `depth`, the end of `span`."""
        num_bytes = depth % self._block_tokens * ID_BYTES
        pieces: list[bytes] = []
        while num_bytes:
            assert span is not None
            piece = span.key[-num_bytes:]
            pieces.append(piece)
            num_bytes -= len(piece)
            span = span.parent
        return b"".join(reversed(pieces))
