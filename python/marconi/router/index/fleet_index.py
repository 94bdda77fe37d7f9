"""The index of a fleet: which worker holds which blocks of KV, and after which of them a state.

Both ways: a block knows its holders (`blocks`), a worker its blocks (`holding`), so that what a worker tells costs what
it tells, and its restart nothing. A snapshot is compared with what the worker is known to hold and only the difference
is written, in pieces as small as the caller likes (`replacement`): at every moment in between the worker is answered
for by what it held before or holds now. Room is bounded twice: what one worker may hold (the rest is refused), and how
many blocks there are at all (the coldest leaves are forgotten). Neither makes a wrong hit, only a missed one.

One thread. What events say is believed if it is possible and counted if it is not (`Counters`).
"""

from collections import deque
from collections.abc import Iterable, Iterator

from marconi.router.events.base import (
    MAX_HASH,
    Cleared,
    Event,
    KvRemoved,
    KvStored,
    StateRemoved,
    StateStored,
)
from marconi.router.index.base import Chain, Counters, Hit
from marconi.router.index.blocks import UNKNOWN, Blocks
from marconi.router.index.holding import Holding
from marconi.router.index.lookup import look_up
from marconi.router.index.replacement import Replacement
from marconi.router.index.store import store

MAX_BLOCKS = 4_000_000
MAX_ENTRIES_PER_WORKER = 1_000_000


class FleetIndex:
    """Who holds what; see the module.

    `ValueError` for a size below 1. `KeyError` for a worker that was not added.
    """

    def __init__(
        self,
        block_tokens: int,
        *,
        max_blocks: int = MAX_BLOCKS,
        max_entries_per_worker: int = MAX_ENTRIES_PER_WORKER,
    ) -> None:
        for name, value in (
            ("block_tokens", block_tokens),
            ("max_blocks", max_blocks),
            ("max_entries_per_worker", max_entries_per_worker),
        ):
            if value < 1:
                raise ValueError(f"{name}={value}: give 1 or more")
        self.block_tokens = block_tokens
        self.max_blocks = max_blocks
        self.max_entries_per_worker = max_entries_per_worker
        self.counters = Counters()
        self.blocks = Blocks()
        self.holdings: list[Holding | None] = []
        """By number; None where it is free."""
        self.live = 0
        """The bits that are answered for."""
        self._of_worker: dict[str, Holding] = {}
        self._retired: deque[Holding] = deque()

    @property
    def workers(self) -> tuple[str, ...]:
        """All that were added, in order."""
        return tuple(self._of_worker)

    @property
    def num_blocks(self) -> int:
        """Blocks that anybody holds, and those that stand for what is not known between them."""
        return self.blocks.num_rows - len(self.blocks.spaces)

    @property
    def num_retired_entries(self) -> int:
        """Held by former lives of workers, answered for no more, and not yet swept."""
        return sum(holding.num_entries for holding in self._retired)

    def holding(self, worker: str) -> Holding:
        """What a worker holds."""
        return self._of_worker[worker]

    def has_state(self, worker: str, namespace: bytes, block_hash: int) -> bool:
        """Whether a worker holds the state after a block; `KeyError` for a worker that was not added."""
        row, space = self._of_worker[worker].states.get(block_hash), self.blocks.spaces.get(namespace)
        return row is not None and space is not None and self.blocks.root[row] == space.root

    def add_worker(self, worker: str) -> None:
        """A worker that holds nothing yet; `ValueError` if it is known."""
        if worker in self._of_worker:
            raise ValueError(f"worker {worker!r}: is known already")
        number = self.holdings.index(None) if None in self.holdings else len(self.holdings)
        self.holdings[number : number + 1] = [Holding(worker, number)]
        self._begin(worker, number)

    def remove_worker(self, worker: str) -> None:
        """Forget a worker at once; what it held is swept later."""
        self._retire(self._of_worker.pop(worker))

    def clear(self, worker: str) -> None:
        """The worker holds nothing, at once; what it held is swept later."""
        if self._of_worker[worker].num_entries:
            self.remove_worker(worker)
            self.add_worker(worker)

    def apply(self, worker: str, events: Iterable[Event]) -> None:
        """What a worker tells, in order. Not while a snapshot of it is being applied."""
        holding = self._of_worker[worker]
        for event in events:
            if isinstance(event, KvStored):
                self.store_kv(holding, event)
            elif isinstance(event, KvRemoved):
                self._remove_kv(holding, event.block_hashes)
            elif isinstance(event, StateStored):
                self.store_state(holding, event)
            elif isinstance(event, StateRemoved):
                self._remove_state(holding, event.block_hash)
            elif isinstance(event, Cleared):
                self.clear(worker)
                holding = self._of_worker[worker]
            else:
                self.counters.num_malformed += 1

    def replace(self, worker: str, events: Iterable[Event]) -> Replacement:
        """Begin to make what a worker holds exactly `events`, a snapshot of it; see `Replacement`."""
        return Replacement(self, self._of_worker[worker], events)

    def sweep(self, max_entries: int) -> int:
        """Free up to so many entries of former lives; returns how many it were."""
        num_swept = 0
        while self._retired and num_swept < max_entries:
            holding = self._retired[0]
            bit, blocks = holding.bit, self.blocks
            for states in (holding.states, holding.old_states):
                while states and num_swept < max_entries:
                    blocks.remove_state(states.popitem()[1], bit)
                    num_swept += 1
            for kv in (holding.kv, holding.old_kv):
                while kv and num_swept < max_entries:
                    blocks.strike(kv.popitem()[1], bit)
                    num_swept += 1
            if not holding.num_entries:
                self._retired.popleft()
                self.holdings[holding.number] = None
        return num_swept

    def hits(self, chain: Chain) -> dict[str, Hit]:
        """What each worker has of a chain; workers without its first block are left out. Counts as a use of it."""
        space = self.blocks.spaces.get(chain.namespace)
        if space is None:
            return {}
        kv, found = look_up(self.blocks, space, chain, self.live, self.block_tokens)
        hit_tokens: dict[int, int] = {}
        for num_tokens, mask in found:
            while mask:
                bit = mask & -mask
                hit_tokens[bit] = num_tokens
                mask ^= bit
        hits: dict[str, Hit] = {}
        for num_blocks, mask in kv:
            num_kv_tokens = num_blocks * self.block_tokens
            for holding in self._in(mask):
                num_tokens = hit_tokens.pop(holding.bit, 0)
                hits[holding.worker] = Hit(num_tokens, max(num_tokens, num_kv_tokens))
        for bit, num_tokens in hit_tokens.items():  # of prompts shorter than a block
            for holding in self._in(bit):
                hits[holding.worker] = Hit(num_tokens, num_tokens)
        return hits

    def store_kv(self, holding: Holding, event: KvStored, *, is_news: bool = True) -> None:
        """KV of consecutive blocks; those that are no news are not warmed."""
        hashes, tokens = event.block_hashes, event.block_tokens
        is_tail = tokens != self.block_tokens
        if (
            not hashes
            or (is_tail and (not 0 < tokens < self.block_tokens or len(hashes) > 1))
            or not _are_hashes(hashes)
        ):
            self.counters.num_malformed += max(1, len(hashes))
            return
        blocks = self.blocks
        space = blocks.space_of(event.namespace)
        if event.parent_hash is None:
            parent = space.root
        elif not _are_hashes((event.parent_hash,)):
            self.counters.num_malformed += len(hashes)
            blocks.end(space)
            return
        else:
            found = space.rows.get(event.parent_hash)
            parent = blocks.add(space, event.parent_hash, UNKNOWN) if found is None else found
        room = self.max_entries_per_worker - len(holding.kv) - len(holding.states)
        stored = store(blocks, holding, space, parent, hashes, tokens if is_tail else 0, room)
        self.counters.num_over_limit += stored.num_over_limit
        self.counters.num_conflicting += stored.num_conflicting
        self._settle(stored.last, is_news=is_news)

    def store_state(self, holding: Holding, event: StateStored, *, is_news: bool = True) -> None:
        """A state after a block; one that is no news does not warm it."""
        block_hash = event.block_hash
        if event.depth < 1 or not _are_hashes((block_hash,)):
            self.counters.num_malformed += 1
            return
        blocks, states = self.blocks, holding.states
        space = blocks.space_of(event.namespace)
        row = space.rows.get(block_hash)
        if block_hash in states:
            self.counters.num_conflicting += states[block_hash] != row
            blocks.end(space)
            return
        if len(holding.kv) + len(states) >= self.max_entries_per_worker:
            self.counters.num_over_limit += 1
            blocks.end(space)
            return
        if row is None:
            row = blocks.add(space, block_hash, UNKNOWN)
        states[block_hash] = row
        if holding.old_states.get(block_hash) == row:
            del holding.old_states[block_hash]
        else:
            blocks.add_state(row, holding.bit)
        self._settle(row, is_news=is_news)

    def _remove_kv(self, holding: Holding, hashes: tuple[int, ...]) -> None:
        for block_hash in hashes:
            row = holding.kv.pop(block_hash, None)
            if row is None:
                self.counters.num_unknown_removals += 1
            else:
                self.blocks.remove_kv(row, holding)

    def _remove_state(self, holding: Holding, block_hash: int) -> None:
        row = holding.states.pop(block_hash, None)
        if row is None:
            self.counters.num_unknown_removals += 1
        else:
            self.blocks.remove_state(row, holding.bit)

    def _settle(self, row: int, *, is_news: bool) -> None:
        """After a store that ended at `row`: it is the warmest, or freed if nothing came of it; then make room."""
        blocks = self.blocks
        if is_news:
            blocks.coldest.touch(row)
        blocks.prune(row)
        while self.num_blocks > self.max_blocks:
            coldest = blocks.coldest.pop(blocks.is_leaf)
            assert coldest is not None, "a forest without a leaf"
            self._forget(coldest)

    def _forget(self, row: int) -> None:
        blocks = self.blocks
        block_hash = blocks.hash[row]
        self.counters.num_forgotten += 1
        held, states = blocks.held[row], blocks.states.get(row, 0)
        for holding in self._in(states):
            _strike_out(row, block_hash, holding.states, holding.old_states)
            blocks.remove_state(row, holding.bit)
        for holding in self._in(held):
            _strike_out(row, block_hash, holding.kv, holding.old_kv)
            blocks.remove_kv(row, holding)

    def _in(self, mask: int) -> Iterator[Holding]:
        while mask:
            low = mask & -mask
            holding = self.holdings[low.bit_length() - 1]
            assert holding is not None
            yield holding
            mask ^= low

    def _begin(self, worker: str, number: int) -> None:
        holding = self.holdings[number]
        assert holding is not None
        self._of_worker[worker] = holding
        self.live |= holding.bit

    def _retire(self, holding: Holding) -> None:
        self.live &= ~holding.bit
        self._retired.append(holding)


def _strike_out(row: int, block_hash: int, entries: dict[int, int], old_entries: dict[int, int]) -> None:
    del (entries if entries.get(block_hash) == row else old_entries)[block_hash]


def _are_hashes(hashes: tuple[int, ...]) -> bool:
    try:
        return min(hashes) >= 0 and max(hashes) <= MAX_HASH
    except TypeError:
        return False
