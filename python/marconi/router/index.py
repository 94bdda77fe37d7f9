"""The index of a fleet: a plain map from the hash of a block to the set of workers that hold it, a map a namespace.

    hit of a worker  =  the deepest position of a prompt where it keeps a state and holds the KV of every block before

    blocks[hash]    workers that hold the block's KV         a bit a worker, and `MARKED` where a state or part follows
    states[hash]    workers that keep a state after it       a bit a worker

Attention needs all tokens before a position, a recurrent layer the one state that stands there. A hash stands for the
whole prefix up to its block's end, so no tree is needed; a prompt is walked block by block:

    usable = all workers;  for each block of the prompt:  usable &= blocks[hash]
    hit of a worker = the deepest marked block at which it is still usable and keeps the state

A hole needs no special case: its worker is not usable behind it. Blocks that the same workers stored one after the
other share one object as their mask, so the walk compares objects and computes only where holders change.

A state may stand within a block. The tokens before it in the block are a block of their own with fewer tokens, a
*part*. The lengths of parts are noted at the full block before them, and `Chain.tail` hashes a part of that length of
the prompt.

A *holding* is one life of a worker and has a bit of its own. A restart, a removal and a snapshot end a holding: its bit
is not live from that moment on, and its entries are swept in pieces. A snapshot is loaded in pieces into a new holding,
which takes the old one's place when it is complete. What does not fit is refused and counted: a missed hit, never a
wrong one. One thread.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Final, NamedTuple

from marconi.events.base import (
    MAX_HASH,
    Cleared,
    Event,
    KvRemoved,
    KvStored,
    Namespace,
    StateRemoved,
    StateStored,
    namespace_in,
)
from marconi.router.space import MARKED, Holding, IndexStats, Space

MAX_BLOCKS: Final = 4_000_000
MAX_ENTRIES_PER_WORKER: Final = 1_000_000
PIECE_BLOCKS: Final = 256
"""The most blocks of a snapshot that are stored at once."""


@dataclass(frozen=True, slots=True)
class Chain:
    """The positions of a prompt that a request may start from, all before its last token: that one is always computed.

    Hashes are chained, so one that is equal says that all before it are.
    """

    namespace: Namespace
    hashes: Sequence[int]
    """Hashes of the full blocks: the one at `index` ends `(index + 1) * block_tokens` deep."""
    tail: Callable[[int], int | None] | None = None
    """The hash of the part of a block that ends at a depth; None past the prompt's end. Called only for lengths of
    parts that a worker holds there."""

    def within(self, store: int) -> "Chain":
        """The same prompt in a store."""
        tail = self.tail

        def in_store(depth: int) -> int | None:
            part = None if tail is None else tail(depth)
            return None if part is None else part ^ store

        hashes = tuple([each ^ store for each in self.hashes])
        return Chain(namespace_in(store, self.namespace), hashes, None if tail is None else in_store)


class Hit(NamedTuple):
    """The tokens of a chain that a worker has."""

    num_tokens: int
    """Not computed again: the depth of the deepest state with all KV before it; 0 if there is none."""
    num_kv_tokens: int
    """Tokens whose KV is held without a hole from the first on, in whole blocks or up to the hit: what an index that
    knows no states would promise."""


NO_HIT: Final = Hit(0, 0)


class FleetIndex:
    """A fleet's index; see the module.

    `ValueError` for a size below 1. `KeyError` for a worker that was not added.
    """

    def __init__(
        self, block_tokens: int, *, max_blocks: int = MAX_BLOCKS, max_entries_per_worker: int = MAX_ENTRIES_PER_WORKER
    ) -> None:
        self.block_tokens = block_tokens
        self.max_blocks = max_blocks
        self.max_entries_per_worker = max_entries_per_worker
        for name in ("block_tokens", "max_blocks", "max_entries_per_worker"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        self.stats = IndexStats()
        self.num_blocks = 0
        """Blocks whose KV any worker holds."""
        self._spaces: defaultdict[Namespace, Space] = defaultdict(Space)
        self._holdings: dict[str, Holding] = {}
        """The present one of each worker."""
        self._retired: deque[Holding] = deque()
        self._by_bit: dict[int, Holding] = {}
        """All of them, and those that are being loaded."""
        self._worker_of: dict[int, str] = {}
        """Bit -> worker, of present holdings."""
        self._live = 0
        """The bits of present holdings."""

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of all workers, in the order in which they were added."""
        return tuple(self._holdings)

    @property
    def num_retired_entries(self) -> int:
        """Entries of holdings that have ended and are not swept yet."""
        return sum(holding.num_entries for holding in self._retired)

    def holding(self, worker: str) -> Holding:
        """The present holding of a worker."""
        return self._holdings[worker]

    def holds(self, worker: str, namespace: Namespace, block_hash: int) -> bool:
        """True if a worker holds the KV of a block."""
        return self._holdings[worker].kv.get(block_hash) == namespace

    def add_worker(self, worker: str) -> None:
        """Add a worker that holds nothing yet; `ValueError` if it is known."""
        if worker in self._holdings:
            raise ValueError(f"a worker must be new, got {worker!r} again")
        self._set_holding(worker, self._new_holding())

    def remove_worker(self, worker: str) -> None:
        """Forget a worker at once; what it held is swept later."""
        self._retire(self._holdings.pop(worker))

    def clear(self, worker: str) -> None:
        """Forget at once what a worker holds; it is swept later."""
        if self._holdings[worker].num_entries:
            self._set_holding(worker, self._new_holding())

    def apply(self, worker: str, events: Iterable[Event]) -> None:
        """Apply the events of a worker, in order."""
        for event in events:
            if isinstance(event, Cleared):
                self.clear(worker)
            else:
                self._apply(self._holdings[worker], event)

    def load(self, worker: str, events: Iterable[Event]) -> Generator[int, None, None]:
        """Replace what a worker holds by `events`, a snapshot of it; yields the number of entries after each piece.

        Lookups see what it held before until the iterator ends. Closed earlier, nothing changes.
        """
        loading = self._new_holding()
        try:
            for event in events:
                for piece in _pieces(event):
                    self._apply(loading, piece)
                    yield len(piece.block_hashes) if isinstance(piece, KvStored) else 1
        except GeneratorExit:
            self._retire(loading)
            raise
        self._set_holding(worker, loading)

    def sweep(self, max_entries: int) -> int:
        """Free up to `max_entries` of holdings that have ended; returns how many it freed."""
        num_swept = 0
        while self._retired and num_swept < max_entries:
            holding = self._retired[0]
            for entries, remove in ((holding.states, self._remove_states), (holding.kv, self._remove_kv)):
                num_entries = min(len(entries), max_entries - num_swept)
                remove((entries.popitem() for _ in range(num_entries)), holding.bit)
                num_swept += num_entries
            if not holding.num_entries:
                del self._by_bit[self._retired.popleft().bit]
        return num_swept

    def hits(self, chain: Chain) -> dict[str, Hit]:
        """Look up what each worker has of a chain; workers that have nothing are left out."""
        space = self._spaces.get(chain.namespace)
        if space is None:
            return {}
        ends, marked = self._walk(space, chain)
        hit_tokens = self._hit_tokens(space, chain, marked)
        hits: dict[str, Hit] = {}
        for num_blocks, mask in ends:
            num_kv_tokens = num_blocks * self.block_tokens
            for bit in _bits(mask):
                num_tokens = hit_tokens.get(bit, 0)
                if num_tokens or num_kv_tokens:
                    hits[self._worker_of[bit]] = Hit(num_tokens, max(num_tokens, num_kv_tokens))
        return hits

    def check_invariants(self) -> None:
        """Raise `AssertionError` where the maps and the holdings disagree; walks all of them."""
        assert self._worker_of == {holding.bit: worker for worker, holding in self._holdings.items()}
        assert self._live == sum(self._worker_of)
        held: dict[Namespace, Counter[int]] = {namespace: Counter() for namespace in self._spaces}
        kept: dict[Namespace, Counter[int]] = {namespace: Counter() for namespace in self._spaces}
        for bit, holding in self._by_bit.items():
            assert bit == holding.bit
            assert holding.num_entries <= self.max_entries_per_worker
            for entries, masks in ((holding.kv, held), (holding.states, kept)):
                for block_hash, namespace in entries.items():
                    masks[namespace][block_hash] += bit
        for namespace, space in self._spaces.items():
            assert space.blocks or space.states, "an empty namespace is forgotten"
            space.check_invariants(held[namespace], kept[namespace])
        assert self.num_blocks == sum(len(space.blocks) for space in self._spaces.values())
        assert self.num_blocks <= self.max_blocks

    # Holdings

    def _new_holding(self) -> Holding:
        bit = MARKED << 1
        while bit in self._by_bit:
            bit <<= 1
        holding = self._by_bit[bit] = Holding(bit)
        return holding

    def _set_holding(self, worker: str, holding: Holding) -> None:
        if worker in self._holdings:
            self._retire(self._holdings[worker])
        self._holdings[worker] = holding
        self._worker_of[holding.bit] = worker
        self._live |= holding.bit

    def _retire(self, holding: Holding) -> None:
        self._live &= ~holding.bit
        self._worker_of.pop(holding.bit, None)
        self._retired.append(holding)

    # Writing

    def _apply(self, holding: Holding, event: Event) -> None:
        if isinstance(event, KvStored):
            self._store_kv(holding, event)
        elif isinstance(event, StateStored):
            self._store_state(holding, event)
        elif isinstance(event, KvRemoved):
            self._remove_kv(self._popped(holding.kv, event.block_hashes), holding.bit)
        elif isinstance(event, StateRemoved):
            self._remove_states(self._popped(holding.states, (event.block_hash,)), holding.bit)
        else:
            self.stats.num_malformed += 1

    def _store_kv(self, holding: Holding, event: KvStored) -> None:
        hashes, namespace, stats = event.block_hashes, event.namespace, self.stats
        if not self._is_possible(event):
            stats.num_malformed += max(1, len(hashes))
            return
        space = self._spaces[namespace]
        is_part, place = event.block_tokens < self.block_tokens, (event.parent_hash, event.block_tokens)
        if is_part and space.part_of.get(hashes[0], place) != place:
            stats.num_conflicting += 1
            return
        blocks, own, bit = space.blocks, holding.kv, holding.bit
        room = self.max_entries_per_worker - holding.num_entries
        before = after = 0
        for num_done, block_hash in enumerate(hashes):
            if block_hash in own:
                stats.num_conflicting += own[block_hash] != namespace
                continue
            held = blocks.get(block_hash)
            if room < 1 or (held is None and self.num_blocks >= self.max_blocks):
                # Those behind could not be reached without it.
                stats.num_over_limit += len(hashes) - num_done
                break
            room -= 1
            own[block_hash] = namespace
            if held is None:
                blocks[block_hash] = bit | MARKED if space.is_marked(block_hash) else bit
                self.num_blocks += 1
                continue
            if held is not before:
                before, after = held, held | bit
            blocks[block_hash] = after
        if is_part and hashes[0] in blocks and hashes[0] not in space.part_of:
            space.add_part(hashes[0], *place)
        self._drop_if_empty(namespace)

    def _store_state(self, holding: Holding, event: StateStored) -> None:
        block_hash, namespace, stats = event.block_hash, event.namespace, self.stats
        if event.depth < 1 or not _are_hashes((block_hash,)):
            stats.num_malformed += 1
        elif block_hash in holding.states:
            stats.num_conflicting += holding.states[block_hash] != namespace
        elif holding.num_entries >= self.max_entries_per_worker:
            stats.num_over_limit += 1
        else:
            holding.states[block_hash] = namespace
            self._spaces[namespace].add_state(block_hash, holding.bit)

    def _popped(self, entries: dict[int, Namespace], hashes: Iterable[int]) -> Iterator[tuple[int, Namespace]]:
        for block_hash in hashes:
            namespace = entries.pop(block_hash, None)
            if namespace is None:
                self.stats.num_unknown_removals += 1
            else:
                yield block_hash, namespace

    def _remove_kv(self, entries: Iterable[tuple[int, Namespace]], bit: int) -> None:
        before = after = 0
        for block_hash, namespace in entries:
            space = self._spaces[namespace]
            held = space.blocks[block_hash]
            if held is not before:
                before, after = held, held ^ bit
            if after > MARKED:
                space.blocks[block_hash] = after
                continue
            del space.blocks[block_hash]
            self.num_blocks -= 1
            if block_hash in space.part_of:
                space.remove_part(block_hash)
            self._drop_if_empty(namespace)

    def _remove_states(self, entries: Iterable[tuple[int, Namespace]], bit: int) -> None:
        for block_hash, namespace in entries:
            self._spaces[namespace].remove_state(block_hash, bit)
            self._drop_if_empty(namespace)

    def _drop_if_empty(self, namespace: Namespace) -> None:
        space = self._spaces[namespace]
        if not space.blocks and not space.states:
            del self._spaces[namespace]

    def _is_possible(self, event: KvStored) -> bool:
        hashes, num_tokens = event.block_hashes, event.block_tokens
        is_part = 0 < num_tokens < self.block_tokens and len(hashes) == 1
        parent = () if event.parent_hash is None else (event.parent_hash,)
        return bool(hashes) and (is_part or num_tokens == self.block_tokens) and _are_hashes((*parent, *hashes))

    # Looking up

    def _walk(self, space: Space, chain: Chain) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """`(blocks, workers whose KV ends there)` and `(blocks, workers that can use a state or part there)`."""
        usable, before = self._live, None
        ends: list[tuple[int, int]] = []
        marked = [(0, usable)] if None in space.parts else []
        for num_blocks, held in enumerate(map(space.blocks.get, chain.hashes, repeat(0))):
            if held is before:
                continue
            if usable & held != usable:
                ends.append((num_blocks, usable & ~held))
                usable &= held
                if not usable:
                    return ends, marked
            before = held
            if held & MARKED:
                marked.append((num_blocks + 1, usable))
                # The next block may have this very mask, and be marked itself.
                before = None
        ends.append((len(chain.hashes), usable))
        return ends, marked

    def _hit_tokens(self, space: Space, chain: Chain, marked: list[tuple[int, int]]) -> dict[int, int]:
        """Depth of the deepest state that each worker, by its bit, can start from."""
        found: dict[int, int] = {}
        remaining = marked[0][1] if marked else 0
        for num_blocks, usable in reversed(marked):
            for num_tokens, keepers in self._states_after(space, chain, num_blocks):
                hit = keepers & usable & remaining
                remaining ^= hit
                found.update((bit, num_tokens) for bit in _bits(hit))
            if not remaining:
                break
        return found

    def _states_after(self, space: Space, chain: Chain, num_blocks: int) -> Iterator[tuple[int, int]]:
        """`(depth, workers that can start there)` of the states after `num_blocks` of a chain, deepest first."""
        block_hash = chain.hashes[num_blocks - 1] if num_blocks else None
        depth = num_blocks * self.block_tokens
        if chain.tail is not None:
            for num_tokens in sorted(space.parts.get(block_hash, ()), reverse=True):
                part = chain.tail(depth + num_tokens)
                if part in space.part_of:
                    yield depth + num_tokens, space.states.get(part, 0) & space.blocks[part]
        if block_hash is not None:
            yield depth, space.states.get(block_hash, 0)


def _pieces(event: Event) -> Iterator[Event]:
    if not isinstance(event, KvStored) or len(event.block_hashes) <= PIECE_BLOCKS:
        yield event
        return
    for start in range(0, len(event.block_hashes), PIECE_BLOCKS):
        yield replace(event, block_hashes=event.block_hashes[start : start + PIECE_BLOCKS])


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


def _are_hashes(hashes: tuple[int, ...]) -> bool:
    try:
        return min(hashes) >= 0 and max(hashes) <= MAX_HASH
    except TypeError:
        return False
