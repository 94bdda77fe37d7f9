"""From workers' sockets into the fleet's index, without a user's request waiting for it.

    thread   Subscriber.poll: sockets, msgpack                      hands over lists of messages
    loop     Fleet.receive, then Fleet.work a piece at a time       hands over what `Fleet.requests` says

A worker has a name of its own in its events; the fleet knows it by another, its URL. Sockets belong to the thread, so
requests go there as calls and are made at its next turn.

Owner: the event loop that calls `start`.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import zmq

from marconi.events.address import Keys
from marconi.router.sync.fleet import Fleet
from marconi.router.sync.subscriber import Message, Subscriber, WorkerSockets

logger = logging.getLogger(__name__)

_POLL_S: Final = 0.02
_REQUEST_S: Final = 0.1
"""Between two looks at what to request, where nothing arrives."""


class EventFeed:
    """Feeds a fleet with its workers' events."""

    def __init__(self, keys: Keys | None = None) -> None:
        self.subscriber = Subscriber(keys)
        self._fleet: Callable[[], Fleet] | None = None
        self._calls: deque[Callable[[], None]] = deque()
        self._names: dict[str, str] = {}
        """A worker's name in its events -> its name in the fleet."""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="marconi-router-events", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_working = False
        self._timer: asyncio.TimerHandle | None = None

    def start(self, fleet: Callable[[], Fleet]) -> None:
        """Feed from now on, on the running loop, what is `fleet` at the time."""
        self._fleet = fleet
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._request_again()

    def close(self) -> None:
        """Close the sockets."""
        if self._timer is not None:
            self._timer.cancel()
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def follow(self, name: str, sockets: WorkerSockets) -> None:
        """Subscribe to the worker that the fleet knows as `name`; `ValueError` if another publishes by its name."""
        other = self._names.get(sockets.worker)
        if other is not None:
            raise ValueError(f"{name}: publishes its events as {sockets.worker!r}, and so does {other}")
        self._names[sockets.worker] = name
        self._calls.append(lambda: self.subscriber.add(sockets))

    def leave(self, worker: str) -> None:
        """Unsubscribe from the worker that publishes as `worker`, if it is followed."""
        if self._names.pop(worker, None) is not None:
            self._calls.append(lambda: self.subscriber.remove(worker))

    # The thread

    def _poll(self) -> None:
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
            # The fleet counts what still comes of a worker that was left.
            fleet.receive(replace(message, worker=name or message.worker), now_s)
        self._request()
        if not self._is_working:
            self._work()

    def _work(self) -> None:
        assert self._loop is not None
        assert self._fleet is not None
        self._is_working = self._fleet().work()
        if self._is_working:
            self._loop.call_soon(self._work)

    def _request(self) -> None:
        assert self._fleet is not None
        published_as = {name: worker for worker, name in self._names.items()}
        for name, first_batch in self._fleet().requests(time.monotonic()):
            if name in published_as:
                self._calls.append(partial(self._request_of, published_as[name], first_batch))

    def _request_of(self, worker: str, first_batch: int | None) -> None:
        if worker in self.subscriber.workers:
            self.subscriber.request(worker, first_batch)

    def _request_again(self) -> None:
        assert self._loop is not None
        self._request()
        self._timer = self._loop.call_later(_REQUEST_S, self._request_again)
