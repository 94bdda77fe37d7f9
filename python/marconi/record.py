"""The record of served requests: a line each, which `marconi plan` and `marconi replay` read.

    who serves    add: a copy of a finished request's tokens into a queue
    writer        hashes them in blocks, appends the line, rotates

A server writes it (`--marconi-record FILE`), or a router (`marconi router --record FILE`), which knows no answer's
tokens. A line is Mooncake's (`replay/trace/mooncake.py`), with the blocks beside it that a known answer completes. A
hash stands for its block and all before it, under a key that is drawn at the start and never leaves memory: neither can
a guess be tested against a file, nor do the files of two starts join. The name space of a request goes in front of its
first block, so that name spaces have no hash in common.

The queue is bounded by bytes: a request that does not fit is counted and left out. Nothing that fails here reaches who
serves: one line in the log, and recording has ended.
"""

import contextlib
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, NamedTuple

logger = logging.getLogger(__name__)

BLOCK_TOKENS: Final = 64
MAX_FILE_BYTES: Final = 64 << 20
"""A line that would take the file beyond makes it `FILE.1`, in place of the one before."""
MAX_WAITING_BYTES: Final = 32 << 20
_TOKEN_BYTES: Final = 8
_HASH_BYTES: Final = 8
_PAUSE_EVERY: Final = 128
_PAUSE_S: Final = 1e-4
_JOIN_S: Final = 10.0


class Ended(NamedTuple):
    """A request that has ended."""

    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    namespace: int
    """Below 2**128."""
    ids: bytes
    """Tokens of prompt and output, or of the prompt alone, eight bytes each."""


class TraceRecorder:
    """Appends what was served to a file."""

    def __init__(
        self,
        path: Path,
        started_s: float,
        flag: str,
        max_file_bytes: int = MAX_FILE_BYTES,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        """Begin a new file, and keep one that is there as its predecessor; times count from `started_s`.

        `flag` asked for it: the log's lines begin with it.
        """
        self._path = path
        self._flag = flag
        self._started_s = started_s
        self._max_file_bytes = max_file_bytes
        self._max_waiting_bytes = max_waiting_bytes
        self._key = secrets.token_bytes(blake2b.MAX_KEY_SIZE)
        self._queue = SimpleQueue[Ended | None]()
        self._num_queued_bytes = 0
        """Written by the thread that serves alone."""
        self._num_written_bytes = 0
        """Written by the writer alone."""
        self.num_dropped = 0
        """Requests that did not fit into the queue."""
        self._has_ended = False
        self._writer = threading.Thread(target=self._write, name="marconi-record", daemon=True)
        self._writer.start()

    def add(self, read: Callable[[], Ended | None]) -> None:
        """Queue the finished request that `read` gives, if it gives one; never waits, and never raises."""
        if self._has_ended:
            return
        try:
            if (ended := read()) is not None:
                self._enqueue(ended)
        except Exception as error:  # The request that is served matters more than its record.
            self._fail(error)

    def close(self) -> None:
        """Write what waits, and end; a second time does nothing."""
        self._queue.put(None)
        self._writer.join(_JOIN_S)
        self._has_ended = True

    def _enqueue(self, ended: Ended) -> None:
        num_bytes = len(ended.ids)
        if self._num_queued_bytes - self._num_written_bytes + num_bytes > self._max_waiting_bytes:
            if not self.num_dropped:
                logger.warning("marconi: %s cannot keep up: some requests are left out", self._flag)
            self.num_dropped += 1
            return
        self._num_queued_bytes += num_bytes
        self._queue.put(ended)

    def _fail(self, error: Exception) -> None:
        self._has_ended = True
        why = " ".join(f"{type(error).__name__}: {error}".split())
        logger.error("marconi: %s %s: %s: nothing more is recorded", self._flag, self._path, why)

    def _write(self) -> None:
        try:
            file = _begun(self._path)
            try:
                size = 0
                while (ended := self._queue.get()) is not None and not self._has_ended:
                    line = self._line(ended)
                    if size and size + len(line) > self._max_file_bytes:
                        os.close(file)
                        file, size = _begun(self._path), 0
                    _append(file, line, size)
                    size += len(line)
                    self._num_written_bytes += len(ended.ids)
            finally:
                os.close(file)
        except Exception as error:  # A disk that is full, a folder that is gone.
            self._fail(error)
        self._queue = SimpleQueue()

    def _line(self, ended: Ended) -> bytes:
        num_prompt, num_known = ended.num_prompt_tokens, len(ended.ids) // _TOKEN_BYTES
        chain = blake2b(ended.namespace.to_bytes(16, "little"), digest_size=_HASH_BYTES, key=self._key)
        ids, start, hashes = memoryview(ended.ids), 0, list[int]()
        for end in sorted({*range(BLOCK_TOKENS, num_known + 1, BLOCK_TOKENS), num_prompt}):
            chain.update(ids[start * _TOKEN_BYTES : end * _TOKEN_BYTES])
            hashes.append(int.from_bytes(chain.digest(), "little"))
            start = end
            if not len(hashes) % _PAUSE_EVERY:
                # So little is hashed at a time that the interpreter's lock is never given up for it.
                time.sleep(_PAUSE_S)
        num_blocks = -(-num_prompt // BLOCK_TOKENS)
        record: dict[str, Any] = {
            "timestamp": max(round(1000 * (ended.arrival_s - self._started_s)), 0),
            "input_length": num_prompt,
            "output_length": ended.num_output_tokens,
            "cached_tokens": ended.num_cached_tokens,
            "block_tokens": BLOCK_TOKENS,
            "hash_ids": hashes[:num_blocks],
        }
        if num_known == num_prompt + ended.num_output_tokens:
            record["output_hash_ids"] = hashes[num_blocks:]
        return json.dumps(record, separators=(",", ":")).encode() + b"\n"


def _begun(path: Path) -> int:
    """A new file that its owner alone may read; one of the same name becomes its predecessor."""
    with contextlib.suppress(FileNotFoundError):
        path.replace(path.with_name(f"{path.name}.1"))
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)


def _append(file: int, line: bytes, size: int) -> None:
    """Append `line` to a file of `size` bytes, whole or not at all."""
    try:
        if os.write(file, line) < len(line):
            raise OSError("the disk is full")
    except OSError:
        os.ftruncate(file, size)
        raise
