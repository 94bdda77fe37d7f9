"""Connections of clients: how many there may be, how long they may wait, and errors of bad HTTP.

    up to `max_connections`     any request
    the next `RESERVE`          only health and the administrator's pages; others get 503, and the connection is closed
    more                        503, unread, and closed

So a client that takes all connections takes none of the reserve for long, and the limit is below the process's limit of
open files: each connection takes a descriptor, and its requests two more, for the worker that answers and one that is
kept for the next. Refused connections are logged at most every `_LOG_PERIOD_S`.

A connection that has not sent its request's headers in `headers_timeout_s` from their first byte (or from its own
beginning), or sends more than `max_head_bytes` of them, is closed; one that is idle after `idle_timeout_s`. Bad HTTP is
a 400 and a line in the log.

Sources: aiohttp 3.14 `web_protocol.py:RequestHandler`, which has no such limits; `_waiter` is pending from the end of
an answer until the headers of the next request are there.
"""

import asyncio
import json
import logging
import resource
import time
from typing import Any, Final, cast

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler

from marconi.router.gateway.errors import error, error_body
from marconi.router.gateway.settings import Settings

logger = logging.getLogger(__name__)

RESERVE: Final = 16
_OTHER_FILES: Final = 128
"""Descriptors of this process that belong to no connection."""
_FILES_PER_CONNECTION: Final = 3
_RESERVE_TIMEOUT_S: Final = 2.0
_LOG_PERIOD_S: Final = 10.0


class Connections:
    """The connections of one router, with the limits of `settings`."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.num_open = 0
        self.num_refused = 0
        self._num_logged = 0
        self._logged_s = -_LOG_PERIOD_S

    @property
    def is_full(self) -> bool:
        """True if one more belongs to the reserve."""
        return self.num_open >= self.settings.max_connections

    @property
    def has_none_left(self) -> bool:
        """True if one more is refused unread."""
        return self.num_open >= self.settings.max_connections + RESERVE

    @property
    def why(self) -> str:
        """The reason for a refusal, in words."""
        return f"the router has {self.settings.max_connections} connections, as many as it may have"

    def refuse(self) -> None:
        """Count a refused connection, and log the count now and then."""
        self.num_refused += 1
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_PERIOD_S:
            number = self.num_refused - self._num_logged
            logger.warning("marconi: %s (--max-connections): %d refused", self.why, number)
            self._logged_s, self._num_logged = now_s, self.num_refused


CONNECTIONS: Final = web.AppKey("connections", Connections)


class Connection(RequestHandler):
    """One client's connection."""

    __slots__ = ("_deadline", "_is_counted", "_num_head_bytes", "_of", "is_reserved")

    def __init__(self, manager: web.Server, of: Connections, **options: Any) -> None:
        super().__init__(manager, **options)
        self._of = of
        self._deadline: asyncio.TimerHandle | None = None
        self._num_head_bytes = 0
        self._is_counted = False
        self.is_reserved = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count it and wait for its first request, or refuse it."""
        if self._of.has_none_left:
            self._of.refuse()
            # uvloop's transports are of no class of asyncio's.
            cast(asyncio.Transport, transport).write(_unread(503, self._of.why))
            transport.close()
            self._force_close = True
            return
        self.is_reserved = self._of.is_full
        self._of.num_open += 1
        self._is_counted = True
        super().connection_made(transport)
        self._begin()

    def connection_lost(self, exc: BaseException | None) -> None:
        """Uncount it."""
        self._of.num_open -= self._is_counted
        self._end()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes of a request, up to the limit of its headers."""
        super().data_received(data)
        if not self._is_waiting:
            self._end()
            return
        self._num_head_bytes += len(data)
        if self._num_head_bytes > self._of.settings.max_head_bytes:
            limit = self._of.settings.max_head_bytes
            self._give_up(431, f"the headers must have at most {limit} bytes")
        elif self._deadline is None:
            self._begin()

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Answer bad HTTP, repeating none of its bytes, here or in the log."""
        what = type(exc).__name__
        if isinstance(exc, LineTooLong):
            message = f"a header, and the request's line, must have at most {self.max_field_size} bytes"
        elif status < 500:
            message = f"the request must be HTTP/1.1 ({what})"
        else:
            message = f"a fault of this router's ({what})"
        logger.warning("marconi: %s: %s", request.remote, message)
        self.keep_alive(False)
        answer = error(status, message)
        answer.force_close()
        return answer

    def log_exception(self, *args: Any, **kw: Any) -> None:
        """Log the end of a connection in one line: a client's faults are not this router's."""
        logger.warning("marconi: a connection ends: %s", type(kw.get("exc_info")).__name__)

    @property
    def _is_waiting(self) -> bool:
        """True if it waits for the headers of a request, of which some may have come."""
        if self._request_count == 0:
            return True
        return self._waiter is not None and not self._waiter.done()

    def _begin(self) -> None:
        timeout_s = self._of.settings.headers_timeout_s
        if self.is_reserved:
            timeout_s = min(timeout_s, _RESERVE_TIMEOUT_S)
        self._deadline = self._loop.call_later(timeout_s, self._is_late, timeout_s)

    def _end(self) -> None:
        self._num_head_bytes = 0
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _is_late(self, timeout_s: float) -> None:
        self._deadline = None
        if self._is_waiting and self._num_head_bytes:
            self._give_up(408, f"the headers must come in within {timeout_s:g} s")
        elif self._is_waiting:
            # A client that has sent nothing would take an error for the answer to its next request.
            self.force_close()

    def _give_up(self, status: int, message: str) -> None:
        if self.transport is not None:
            self.transport.write(_unread(status, message))
        self.force_close()


class _Server(web.Server):
    """A server like `other`, with limited connections."""

    def __init__(self, other: web.Server, of: Connections) -> None:
        super().__init__(
            other.request_handler,
            request_factory=other.request_factory,
            handler_cancellation=other.handler_cancellation,
            **other._kwargs,
        )
        self._of = of

    def __call__(self) -> Connection:
        return Connection(self, self._of, loop=self._loop, **self._kwargs)


class Runner(web.AppRunner):
    """Runs an application with the limits of its `CONNECTIONS`."""

    __slots__ = ()

    def __init__(self, app: web.Application, shutdown_timeout_s: float) -> None:
        settings = app[CONNECTIONS].settings
        super().__init__(
            app,
            access_log=None,
            handler_cancellation=True,
            shutdown_timeout=shutdown_timeout_s,
            keepalive_timeout=settings.idle_timeout_s,
            max_line_size=settings.max_header_bytes,
            max_field_size=settings.max_header_bytes,
            max_headers=settings.max_headers,
        )

    async def _make_server(self) -> web.Server:
        return _Server(await super()._make_server(), self.app[CONNECTIONS])


def most_connections() -> int:
    """The number of connections for which this process may open enough files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 1 << 30
    return max((limit - _OTHER_FILES) // _FILES_PER_CONNECTION - RESERVE, 1)


def _unread(status: int, message: str) -> bytes:
    body = json.dumps(error_body(status, message)).encode()
    phrase = {408: "Request Timeout", 431: "Request Header Fields Too Large", 503: "Service Unavailable"}[status]
    head = f"HTTP/1.1 {status} {phrase}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Retry-After: 1\r\nConnection: close\r\n\r\n" + body
