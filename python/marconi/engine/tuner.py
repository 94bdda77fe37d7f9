"""The first rank's end of online tuning: it tells the tuner's process what was served, and asks what that decides.

    scheduler's thread   observe: a finished request's tokens into a queue, by reference: a copy of a long prompt costs
                         more than the whole budget. Nobody changes them any more: only streaming sessions go on in the
                         same array (`session_controller.py:_share_token_arrays`), and those are refused
    writer's thread      a record of hashes of each, into the process's standard input; most of it without the GIL
    reader's thread      the process's decisions, as they come
    scheduler's thread   poll: the last decision's alpha goes into the next tick (`tick.py`)

So the scheduler waits for nothing and hashes nothing. A process that is busy with trials takes no records: then the
queue grows to a bound, and what comes beyond it is dropped and counted. A process that ends costs one warning: the
alpha that was adopted last stays, and nothing else changes.

The process (`replay/online_tuner.py`) has the lowest priority, imports neither SGLang nor torch, and ends with this one
however that ends.
"""

import contextlib
import json
import logging
import os
import subprocess
import sys
from array import array
from collections import deque
from queue import SimpleQueue
from threading import Thread
from typing import Any, Final

import numpy as np

from marconi.engine.status import TunerCounts
from marconi.replay.online_tuner import Assignment
from marconi.tuning.record import Encoder, forget

logger = logging.getLogger(__name__)

MAX_WAITING_TOKENS: Final = 1 << 23
"""Tokens of finished requests that wait for the process: 64 MiB."""
NUM_REMEMBERED: Final = 64
"""Decisions that are told (`GET /marconi`)."""
_END_S: Final = 5.0


class OnlineTuner:
    """A process beside the scheduler, and a thread for each of the two pipes to it."""

    def __init__(self, assignment: Assignment) -> None:
        """Start the process; `OSError` if that fails."""
        self.counts = TunerCounts()
        self.history: deque[dict[str, Any]] = deque(maxlen=NUM_REMEMBERED)
        """The latest decisions: alpha, what it was before, the requests seen, and the scores that decided."""
        self._encoder = Encoder(assignment.block_tokens)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "marconi.replay.online_tuner"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self._waiting: SimpleQueue[_Finished | bytes | None] = SimpleQueue()
        self._arrived: deque[dict[str, Any]] = deque()
        # Each of the two has one writer, so their difference needs no lock.
        self._num_queued_tokens = 0
        self._num_taken_tokens = 0
        self._waiting.put(assignment.to_json().encode() + b"\n")
        self._writer = Thread(target=self._write, name="marconi-tuner-writer", daemon=True)
        self._reader = Thread(target=self._read, name="marconi-tuner-reader", daemon=True)
        self._writer.start()
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of requests that the process has not been told of yet."""
        return self._num_queued_tokens - self._num_taken_tokens

    def observe(
        self,
        token_ids: "array[int]",
        num_prompt_tokens: int,
        namespace: int,
        arrival_s: float,
        coefficients: tuple[float, float],
    ) -> None:
        """A request has finished.

        `token_ids`, its prompt and answer, must not change any more; `coefficients` are what a prefill takes.
        """
        counts = self.counts
        if not counts.is_alive:
            return
        if self.num_waiting_tokens > MAX_WAITING_TOKENS:
            counts.num_records_dropped += 1
            return
        counts.num_records += 1
        self._num_queued_tokens += len(token_ids)
        self._waiting.put((token_ids, num_prompt_tokens, namespace, arrival_s, coefficients))

    def forget(self) -> None:
        """The cache was flushed."""
        if self.counts.is_alive:
            self._waiting.put(forget())

    def poll(self) -> float | None:
        """The alpha to go on with; None if nothing new was decided."""
        alpha = None
        while self._arrived:
            decision = self._arrived.popleft()
            self.history.append(decision)
            self.counts.num_decisions += 1
            alpha = decision["alpha"]
            if decision["failure"]:
                logger.warning("marconi: trials failed (%s), alpha stays %g", decision["failure"], alpha)
            elif alpha != decision["previous"]:
                logger.info("marconi: alpha is %g now, was %g", alpha, decision["previous"])
        if self.counts.is_alive and not self._reader.is_alive():
            self.close()
            status = self._process.returncode
            logger.warning("marconi: the tuner's process is gone (exit status %s), alpha stays as it is", status)
        return alpha

    def close(self) -> None:
        """End the process and the threads, and wait until they have ended."""
        self.counts.is_alive = False
        self._waiting.put(None)
        self._process.terminate()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in (self._writer, self._reader):
            thread.join(_END_S)

    def _write(self) -> None:
        sink = self._process.stdin
        assert sink is not None
        # A pipe that nobody reads any more: the reader's thread finds that out, too.
        with contextlib.suppress(OSError), sink:
            while (item := self._waiting.get()) is not None:
                if isinstance(item, bytes):
                    sink.write(item)
                else:
                    token_ids, num_prompt_tokens, namespace, arrival_s, coefficients = item
                    self._num_taken_tokens += len(token_ids)
                    tokens = np.frombuffer(token_ids, np.int64)
                    sink.write(self._encoder.encode(tokens, num_prompt_tokens, namespace, arrival_s, coefficients))
                sink.flush()

    def _read(self) -> None:
        source = self._process.stdout
        assert source is not None
        with source:
            for line in source:
                self._arrived.append(json.loads(line))


_Finished = tuple[array, int, int, float, tuple[float, float]]
"""Tokens, prompt tokens, name space, arrival in seconds, and what a prefill takes."""
