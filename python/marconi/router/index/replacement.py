"""A snapshot on its way into the index, in pieces.

What the worker is known to hold is set aside as `old`; every entry of the snapshot that is found there moves over,
every other one is stored; what is left of `old` in the end is not in the snapshot and is removed. Each entry keeps its
bits until then, so the worker is answered for all the time: at any moment it has what it had before, or has now, of
each block. A piece costs as much as it has entries. What a snapshot brings is as cold as can be: it was not used now.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from marconi.router.events.base import Event, KvStored, StateStored
from marconi.router.index.holding import Holding

if TYPE_CHECKING:
    from marconi.router.index.fleet_index import FleetIndex

PIECE_BLOCKS = 256
"""A longer event is stored in several."""


class Replacement:
    """Begun by `FleetIndex.replace`, gone on with by `step` until `is_done`; one at a time for a worker."""

    def __init__(self, index: "FleetIndex", holding: Holding, events: Iterable[Event]) -> None:
        assert not holding.old_kv, "one snapshot of a worker at a time"
        assert not holding.old_states, "one snapshot of a worker at a time"
        self._index = index
        self._holding = holding
        self._events = self._pieces(events)
        self._is_read = False
        holding.old_kv, holding.kv = holding.kv, {}
        holding.old_states, holding.states = holding.states, {}

    @property
    def is_done(self) -> bool:
        """Whether the worker holds exactly what the snapshot says."""
        return self._is_read and not self._holding.old_kv and not self._holding.old_states

    def step(self, max_entries: int) -> int:
        """Go on by about so many entries, by `PIECE_BLOCKS` more at most; returns how many it were."""
        num_entries = 0
        index, holding = self._index, self._holding
        while not self._is_read and num_entries < max_entries:
            event = next(self._events, None)
            if event is None:
                self._is_read = True
            elif isinstance(event, KvStored):
                index.store_kv(holding, event, is_news=False)
                num_entries += len(event.block_hashes)
            else:
                index.store_state(holding, event, is_news=False)
                num_entries += 1
        if not self._is_read:
            return num_entries
        while holding.old_states and num_entries < max_entries:
            index.blocks.remove_state(holding.old_states.popitem()[1], holding.bit)
            num_entries += 1
        while holding.old_kv and num_entries < max_entries:
            index.blocks.remove_kv(holding.old_kv.popitem()[1], holding)
            num_entries += 1
        return num_entries

    def _pieces(self, events: Iterable[Event]) -> Iterator[KvStored | StateStored]:
        for event in events:
            if isinstance(event, StateStored):
                yield event
            elif not isinstance(event, KvStored):
                self._index.counters.num_malformed += 1
            elif len(event.block_hashes) <= PIECE_BLOCKS:
                yield event
            else:
                parent = event.parent_hash
                for start in range(0, len(event.block_hashes), PIECE_BLOCKS):
                    piece = event.block_hashes[start : start + PIECE_BLOCKS]
                    yield KvStored(piece, parent, event.namespace, event.block_tokens)
                    parent = piece[-1]
