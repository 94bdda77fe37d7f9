"""Saved states, loaded into the host tier while the server serves.

    thread       checks every file that may fit, then reads them, the most valuable first, a few ahead
    scheduler    between two steps, for `SLICE_S` or one page: writes pages to rows that nobody knows of yet; once a
                 state is whole, the tree holds it as a copy, and requests load it like any other

Nothing gives way to what is loaded: where the tier is full, loading ends. A state is left out if it is there already,
or if KV before it has been dropped meanwhile.
"""

import logging
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from queue import Empty, Full, Queue
from threading import Event, Thread
from typing import Final, NamedTuple

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName

from marconi.engine.persistence.files import Contents, SavedFile, Unusable, read_file, read_usable
from marconi.engine.persistence.stores import TierStore
from marconi.engine.persistence.weights import Weights

logger = logging.getLogger(__name__)

SLICE_S: Final = 0.02
"""How long a step waits for what is loaded."""
_NUM_AHEAD: Final = 2
"""Files that wait in memory."""
_PAGES_AT_ONCE: Final = 64
_POLL_S: Final = 0.1


class _Read(NamedTuple):
    """A file and what is in it."""

    file: SavedFile
    contents: Contents


class _Arrival:
    """A state that is being written to the host's pools."""

    def __init__(self, read: _Read, from_depth: int, rows: torch.Tensor, slot: torch.Tensor) -> None:
        self.file, contents = read
        self.path = contents.path
        self.kv, self.state = contents.copies
        self.from_depth = from_depth
        """Tokens whose KV the host had when it began."""
        self.rows = rows
        self.slot = slot
        self.num_written = 0
        """Pages."""


class BackgroundLoad:
    """The last server's states, on their way into the host tier."""

    def __init__(self, store: TierStore, folder: Path, identity: Mapping[str, str], weights: Weights) -> None:
        """Begin to check and to read the files of `folder`."""
        self._store = store
        self._folder = folder
        self._identity = dict(identity)
        self._weights = weights
        self._began_s = time.monotonic()
        self._read: Queue[_Read | Exception | None] = Queue(_NUM_AHEAD)
        self._stopped = Event()
        self._arrival: _Arrival | None = None
        self._num_states = self._num_tokens = 0
        assert store.core.tier is not None
        self._room = store.core.tier.room
        self._thread = Thread(target=self._run, name="marconi-load", daemon=True)
        self._thread.start()

    def advance(self) -> bool:
        """Load on for a slice; false once there is nothing more to load."""
        try:
            self._load_until(time.monotonic() + SLICE_S)
            return True
        except _End:
            pass
        except Unusable as error:
            logger.warning("marconi: %s; the cache starts empty", error)
            self.end()
            return False
        except Exception:
            logger.exception("marconi: --marconi-save-dir %s: not all states were loaded", self._folder)
        self.end()
        logger.info(
            "marconi: loaded %d states and %d KV tokens from %s to the host in %.1f s",
            *(self._num_states, self._num_tokens, self._folder, time.monotonic() - self._began_s),
        )
        return False

    def flushed(self) -> None:
        """The host's pools were cleared, and the rows of what was on its way with them; nothing more is loaded."""
        self._arrival = None
        self.end()

    def end(self) -> None:
        """Load nothing more; what is half written is given back."""
        self._stopped.set()
        if self._arrival is not None:
            self._store.pages.give_back(self._arrival.rows, self._arrival.slot)
            self._arrival = None
        self._thread.join()

    # The thread

    def _run(self) -> None:
        try:
            num_tokens, num_states = self._room
            weights, room = partial(self._weights.digest, self._is_going_on), (num_states, num_tokens)
            files = read_usable(self._folder, self._identity, weights, room, self._is_going_on)
            for file in files:
                self._put(_Read(file, read_file(self._folder, file)))
            self._put(None)
        except Exception as error:
            self._put(error)

    def _is_going_on(self) -> bool:
        return not self._stopped.is_set()

    def _put(self, item: _Read | Exception | None) -> None:
        while self._is_going_on():
            try:
                self._read.put(item, timeout=_POLL_S)
                return
            except Full:
                continue

    # The scheduler

    def _load_until(self, deadline_s: float) -> None:
        """Load what has been read, at least a part of a state; raises `_End` after the last."""
        while True:
            if self._arrival is None:
                self._arrival = self._next()
            if self._arrival is None or not self._write(self._arrival, deadline_s):
                return
            arrival, self._arrival = self._arrival, None
            self._hold(arrival)
            if time.monotonic() >= deadline_s:
                return

    def _next(self) -> _Arrival | None:
        """The next state that is to be written, with rows for it; None if none has been read yet."""
        tier = self._store.core.tier
        assert tier is not None
        while True:
            try:
                read = self._read.get_nowait()
            except Empty:
                return None
            if isinstance(read, Exception):
                raise read
            if read is None:
                raise _End
            file, path = read.file, read.contents.path
            depth = tier.copies.num_hosted_tokens(path, file.depth, file.namespace)
            if depth < file.start or self._is_known(path, file):
                continue
            if not tier.has_room(file.depth - depth):
                raise _End
            taken = self._store.pages.take(file.depth - depth)
            if taken is None:
                raise _End
            return _Arrival(read, depth, *taken)

    def _is_known(self, path: bytes, file: SavedFile) -> bool:
        hosted = self._store.core.hybrid.tree.match(path, file.depth, file.namespace).hosted
        return hosted is not None and hosted.depth == file.depth

    def _write(self, arrival: _Arrival, deadline_s: float) -> bool:
        """Write on until `deadline_s`; true once the state and its KV are there."""
        pages, page_tokens = self._store.pages, self._store.cache.page_size
        first = (arrival.from_depth - arrival.file.start) // page_tokens
        num_pages = len(arrival.rows) // page_tokens
        while arrival.num_written < num_pages:
            begin = arrival.num_written
            end = min(begin + _PAGES_AT_ONCE, num_pages)
            rows = arrival.rows[begin * page_tokens : end * page_tokens]
            pages.write(PoolName.KV, rows, arrival.kv[first + begin : first + end])
            arrival.num_written = end
            if time.monotonic() >= deadline_s:
                return False
        pages.write(PoolName.MAMBA, arrival.slot, arrival.state)
        return True

    def _hold(self, arrival: _Arrival) -> None:
        """Let the tree hold what was written, unless it cannot any more; `_End` if the tier is full."""
        core, file, path = self._store.core, arrival.file, arrival.path
        tier, rows = core.tier, core.rows
        assert tier is not None
        assert rows is not None
        depth = tier.copies.num_hosted_tokens(path, file.depth, file.namespace)
        has_room = tier.has_room(file.depth - depth)
        if depth < arrival.from_depth or not has_room or self._is_known(path, file):
            self._store.pages.give_back(arrival.rows, arrival.slot)
            if not has_room:
                raise _End
            return
        num_known = depth - arrival.from_depth
        self._store.pages.give_back(arrival.rows[:num_known])
        node = tier.adopt(path, file.namespace, file.depth, file.facts, self._store.cache.clock())
        rows.fill(node, arrival.rows[num_known:], arrival.slot)
        if file.is_end:
            rows.ends.add(node)
        self._num_states += 1
        self._num_tokens += file.depth - depth


class _End(Exception):
    """There is nothing more to load."""
