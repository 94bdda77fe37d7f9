"""What workers tell, from their sockets into the fleet's index, without a request waiting for it.

    thread   Subscriber.poll: sockets, msgpack              hands over lists of records
    loop     Fleet.receive, then Fleet.work a piece at a time, requests in between; what is missing is asked for again

A worker names itself in its events; the fleet knows it by another name, its URL. Sockets belong to the thread, so what
is asked of them goes there as a call and is done at its next turn.

Owner: the event loop that calls `start`.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import zmq

from marconi.router.consistency import Fleet
from marconi.router.events.address import Keys
from marconi.router.events.subscriber import Message, Subscriber, WorkerSockets

logger = logging.getLogger(__name__)

_POLL_S = 0.02
_REPAIR_S = 0.5
"""Between two looks at what is missing."""


class Listening:
    """Keeps a fleet's index what its workers hold."""

    def __init__(self, keys: Keys | None = None, snapshot_period_s: float = 5.0) -> None:
        self.subscriber = Subscriber(keys, snapshot_period_s)
        self._fleet: Callable[[], Fleet] | None = None
        self._calls: deque[Callable[[], None]] = deque()
        self._names: dict[str, str] = {}
        """By which a worker tells -> by which the fleet knows it."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="marconi-router-events", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_working = False
        self._repair: asyncio.TimerHandle | None = None

    def start(self, fleet: Callable[[], Fleet]) -> None:
        """Listen from now on; what comes is for the present `fleet`, on the running loop."""
        self._fleet = fleet
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._mend()

    def close(self) -> None:
        """Listen no more."""
        if self._repair is not None:
            self._repair.cancel()
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def follow(self, name: str, sockets: WorkerSockets) -> None:
        """Listen to a worker, which the fleet knows as `name`; `ValueError` if another tells by the same name."""
        other = self._names.get(sockets.worker)
        if other is not None:
            raise ValueError(f"{name}: tells its events as {sockets.worker!r}, and so does {other}")
        self._names[sockets.worker] = name
        self._calls.append(lambda: self.subscriber.add(sockets))

    def leave(self, worker: str) -> None:
        """Listen no more to the worker that tells as `worker`, if it is listened to."""
        if self._names.pop(worker, None) is not None:
            self._calls.append(lambda: self.subscriber.remove(worker))

    # The thread

    def _listen(self) -> None:
        assert self._loop is not None
        try:
            while not self._closing.is_set():
                while self._calls:
                    self._call(self._calls.popleft())
                messages = self.subscriber.poll(_POLL_S)
                if messages:
                    self._loop.call_soon_threadsafe(self._receive, messages)
        except RuntimeError:
            if not self._loop.is_closed():
                raise
        finally:
            self.subscriber.close()

    def _call(self, call: Callable[[], None]) -> None:
        try:
            call()
        except (ValueError, KeyError, zmq.ZMQError):
            # Addresses were checked before; what is left must not end everybody's events.
            logger.exception("marconi: a worker's events cannot be followed")

    # The loop

    def _receive(self, messages: Sequence[Message]) -> None:
        assert self._fleet is not None
        fleet, now_s = self._fleet(), time.monotonic()
        for message in messages:
            name = self._names.get(message.worker)
            # A worker that was left is not known any more: the fleet counts what still comes of it.
            fleet.receive(replace(message, worker=name or message.worker), now_s)
        if not self._is_working:
            self._work()

    def _work(self) -> None:
        assert self._loop is not None
        assert self._fleet is not None
        self._is_working = self._fleet().work()
        if self._is_working:
            self._loop.call_soon(self._work)

    def _mend(self) -> None:
        assert self._loop is not None
        assert self._fleet is not None
        known = {name: worker for worker, name in self._names.items()}
        for gap in self._fleet().missing(time.monotonic()):
            worker = known.get(gap.worker)
            if worker is not None:
                self._calls.append(lambda worker=worker, first=gap.first: self._ask_again(worker, first))  # type: ignore[misc]
        self._repair = self._loop.call_later(_REPAIR_S, self._mend)

    def _ask_again(self, worker: str, first: int) -> None:
        if worker in self.subscriber.workers:
            self.subscriber.ask_again(worker, first)
