"""Advice from live traffic (`--marconi-advice`): what another division of memory would have hit.

    scheduler's thread      served: a copy of a finished request's tokens into a queue
    feeder                  starts the shadow with the first request, writes the queue to its stdin
    reader                  reads answers from its stdout until it ends
    child process           python -m marconi.replay.shadow, at the lowest priority; ends when its stdin does

The queue is bounded by bytes: a request that does not fit is counted and left out. A shadow that dies is logged once
and not restarted.
"""

import atexit
import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

from marconi.model.learned_latency import LearnedLatency
from marconi.policy.record import ServedRequest, ServerMemory, write_frame
from marconi.policy.request import Request

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

logger = logging.getLogger(__name__)

COMMAND: Final = (sys.executable, "-m", "marconi.replay.shadow")
MAX_WAITING_BYTES: Final = 32 << 20
_JOIN_S: Final = 10.0


class Advisor:
    """Feeds the shadow of one cache, and keeps its last answer."""

    def __init__(
        self,
        memory: Callable[[], ServerMemory],
        command: Sequence[str] = COMMAND,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        """Nothing is started before the first request; `memory` is called then."""
        self._memory = memory
        self._command = command
        self._max_waiting_bytes = max_waiting_bytes
        self._records = SimpleQueue[ServedRequest | None]()
        self._num_queued_bytes = 0
        """Written by the scheduler's thread alone."""
        self._num_sent_bytes = 0
        """Written by the feeder alone."""
        self.num_dropped = 0
        """Requests that did not fit into the queue."""
        self._latest: dict[str, Any] | None = None
        self._feeder: threading.Thread | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._is_closed = False
        self._has_ended = False

    def served(self, req: "Req", request: Request, latency: LearnedLatency) -> None:
        """Queue a finished request, whose prompt was matched as `request`; never waits, and never raises.

        `latency` is the server's, as it is known by now.
        """
        if self._has_ended or self._is_closed:
            return
        try:
            self._queue(req, request, latency)
        except Exception:  # The request that is served matters more than advice.
            self._has_ended = True
            logger.exception("marconi: --marconi-advice failed on a request: no more advice")

    def _queue(self, req: "Req", request: Request, latency: LearnedLatency) -> None:
        prompt, output = memoryview(req.origin_input_ids), memoryview(req.output_ids)
        num_bytes = prompt.nbytes + output.nbytes
        if self._num_queued_bytes - self._num_sent_bytes + num_bytes > self._max_waiting_bytes:
            self.num_dropped += 1
            return
        if self._feeder is None:
            self._feeder = threading.Thread(
                target=self._feed, args=(self._memory(),), name="marconi-advice", daemon=True
            )
            self._feeder.start()
        self._num_queued_bytes += num_bytes
        counts = (len(prompt), len(output), min(req.cached_tokens, len(prompt)))
        ids = b"".join((prompt, output))
        self._records.put(
            ServedRequest(request.arrival_s, *counts, request.namespace, ids, latency.overhead_s, latency.s_per_flop)
        )

    def status(self) -> dict[str, Any] | None:
        """The shadow's last answer, with how many requests it has missed; None before the first."""
        return None if self._latest is None else {**self._latest, "num_dropped": self.num_dropped}

    def close(self) -> None:
        """End the shadow; a second time does nothing."""
        with self._starting:
            self._is_closed = True
            child = self._child
        atexit.unregister(self.close)
        self._records.put(None)
        if child is not None and child.poll() is None:
            # It holds nothing that is worth keeping, and may be in the middle of a replay.
            child.kill()
        if self._feeder is not None:
            self._feeder.join(_JOIN_S)

    def _feed(self, memory: ServerMemory) -> None:
        try:
            with self._starting:
                if self._is_closed:
                    return
                self._child = child = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
                )
        except OSError as error:
            self._has_ended = True
            logger.error("marconi: the shadow of --marconi-advice cannot be started: %s", error)
            return
        atexit.register(self.close)
        reader = threading.Thread(target=self._read, args=(child,), name="marconi-advice-reader", daemon=True)
        reader.start()
        assert child.stdin is not None
        # A write to a shadow that has died fails, which the reader reports.
        with contextlib.suppress(OSError):
            write_frame(child.stdin, memory.to_bytes())
            while (record := self._records.get()) is not None:
                write_frame(child.stdin, record.to_bytes())
                self._num_sent_bytes += len(record.ids)
        with contextlib.suppress(OSError):
            child.stdin.close()
        reader.join()
        self._records = SimpleQueue()

    def _read(self, child: "subprocess.Popen[bytes]") -> None:
        assert child.stdout is not None
        with child.stdout as answers, contextlib.suppress(ValueError):
            for line in answers:
                self._latest = json.loads(line)
        child.kill()
        status = child.wait()
        self._has_ended = True
        self._records.put(None)
        if not self._is_closed:
            logger.error("marconi: the shadow of --marconi-advice has ended with status %d: no more advice", status)
