"""Connections of clients: how many there may be, how long one may be without a request, and errors of bad HTTP.

    up to `max_connections`     any request
    the next `RESERVE`          only health and the administrator's pages; others get 503, and the connection is closed
    more                        503, unread, and closed

So a client that takes all connections takes none of the reserve for long, and the limit is below the process's limit of
open files: each connection takes a descriptor, and its requests two more, for the worker that answers and one that is
kept for the next. Refused connections are logged at most every `_LOG_PERIOD_S`.

A connection that has not sent all headers of a request `idle_timeout_s` after its beginning, or after its last answer,
is closed, whether or not some of them have come: aiohttp's `keepalive_timeout`. One of the reserve has
`_RESERVE_TIMEOUT_S`. A request has at most `max_headers` headers of `max_header_bytes`. Bad HTTP is a 400 and a line in
the log. Shorter limits for headers are a proxy's: aiohttp's public interface has none.
"""

import asyncio
import json
import logging
import resource
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, cast

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

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


class Connection(web.RequestHandler):
    """One client's connection."""

    __slots__ = ("_deadline", "_is_counted", "_of", "is_reserved")

    def __init__(self, manager: web.Server, of: Connections, **options: Any) -> None:
        super().__init__(manager, **options)
        self._of = of
        self._deadline: asyncio.TimerHandle | None = None
        self._is_counted = False
        self.is_reserved = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count it and wait for its first request, or refuse it."""
        num_over = self._of.num_open - self._of.settings.max_connections
        if num_over >= RESERVE:
            self._of.refuse()
            # uvloop's transports are of no class of asyncio's.
            cast(asyncio.Transport, transport).write(_unread(self._of.why))
            transport.close()
            return
        self.is_reserved = num_over >= 0
        self._of.num_open += 1
        self._is_counted = True
        super().connection_made(transport)
        if self.is_reserved:
            self._deadline = asyncio.get_running_loop().call_later(_RESERVE_TIMEOUT_S, self.force_close)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Uncount it, if it was not refused."""
        if self._is_counted:
            self._of.num_open -= 1
            self.end_wait()
            super().connection_lost(exc)

    def end_wait(self) -> None:
        """Let a connection of the reserve take as long as its request does, now that it has one."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

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


class _Server(web.Server):
    """Serves as `other` does, with limited connections."""

    def __init__(self, other: web.Server, of: Connections) -> None:
        super().__init__(other.request_handler, request_factory=other.request_factory, handler_cancellation=True)
        self._of = of

    def __call__(self) -> Connection:
        settings = self._of.settings
        return Connection(
            self,
            self._of,
            loop=asyncio.get_running_loop(),
            access_log=None,
            keepalive_timeout=settings.idle_timeout_s,
            max_line_size=settings.max_header_bytes,
            max_field_size=settings.max_header_bytes,
            max_headers=settings.max_headers,
        )


@asynccontextmanager
async def running(app: web.Application, shutdown_timeout_s: float) -> AsyncIterator[web.ServerRunner]:
    """Run an application with the limits of its `CONNECTIONS`; the sites of the yielded runner accept connections."""
    parts = web.AppRunner(app)
    try:
        await parts.setup()
        assert parts.server is not None
        runner = web.ServerRunner(_Server(parts.server, app[CONNECTIONS]), shutdown_timeout=shutdown_timeout_s)
        await runner.setup()
        try:
            yield runner
        finally:
            await runner.cleanup()
    finally:
        await parts.cleanup()


def most_connections() -> int:
    """The number of connections for which this process may open enough files."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 1 << 30
    return max((limit - _OTHER_FILES) // _FILES_PER_CONNECTION - RESERVE, 1)


def _unread(message: str) -> bytes:
    body = json.dumps(error_body(503, message)).encode()
    head = f"HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Retry-After: 1\r\nConnection: close\r\n\r\n" + body
