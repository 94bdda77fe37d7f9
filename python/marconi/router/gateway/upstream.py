"""One attempt: a request is sent to a worker, until the first byte of its answer or the whole of it.

An attempt that brings no byte is

    refused      the connection was not made, or not a byte was written to it: the worker never had the request
    overloaded   502, 503, 504: the worker had it, and lives
    lost         the connection broke, nothing came in time, or the worker went down while it was waited for: the worker
                 had it, and may have died of it
"""

import asyncio
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

import aiohttp
from aiohttp import hdrs, web
from multidict import CIMultiDict

from marconi.router.gateway.added import RANK, RANK_HEADERS, with_fields
from marconi.router.gateway.worker import Worker

OVERLOADED: Final = frozenset({502, 503, 504})
_NOT_FORWARDED: Final = frozenset(
    name.lower()
    for name in (
        *("Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection", "TE", "Trailer"),
        *("Transfer-Encoding", "Upgrade", "Host", "Content-Length", "Accept-Encoding", "Expect"),
        "Content-Encoding",
    )
)
"""Headers of a connection, headers that are set anew, and the coding of a body that was decoded."""
STREAM: Final = "text/event-stream"
_RELAYED: Final = ("Content-Type", "Cache-Control", "X-Request-Id", "Retry-After")
NOTHING_ADDED: Final[Mapping[str, Any]] = MappingProxyType({})
_KEEPALIVE_S: Final = 3.0
"""For idle connections to workers: SGLang closes its end after 5 s, and a request sent just then is lost."""
_CACHED: Final = re.compile(rb'(?<!\\)"(?:cached_tokens|cache_read_input_tokens)": ?(\d{1,9})(?=\s*[,}])')
_COMPLETED: Final = re.compile(rb'(?<!\\)"(?:completion_tokens|output_tokens)": ?(\d{1,9})(?=\s*[,}])')
_MAX_READ_BYTES: Final = 256 << 10
"""The longest answer whose usage is read: one with log-probabilities may be many times as long."""


class Failed(Exception):
    """An attempt that brought no byte, with the reason in words."""

    def __init__(self, why: str, answer: web.Response | None = None, *, is_lost: bool = False) -> None:
        super().__init__(why)
        self.answer = answer
        """The worker's error, where it was overloaded."""
        self.is_lost = is_lost
        """Whether the worker may have died of it."""


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer that has begun."""

    upstream: aiohttp.ClientResponse
    first: bytes

    @property
    def status(self) -> int:
        """The answer's HTTP status."""
        return self.upstream.status

    @property
    def is_error(self) -> bool:
        """True if it begins with an error, which SGLang's `/generate` sends with the status 200."""
        return self.first.startswith(b'data: {"error":')


def client_session(connect_timeout_s: float) -> aiohttp.ClientSession:
    """A session for requests to workers, whose answers are relayed as they come."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
        # A worker's cookies are one client's, and this session is shared by all.
        cookie_jar=aiohttp.DummyCookieJar(),
        # Else the library accepts compressed answers, and an answer's compression is not relayed.
        headers={"Accept-Encoding": "identity"},
        auto_decompress=False,
        trust_env=False,
        read_bufsize=1 << 16,
        trace_configs=[_tracing()],
    )


def _tracing() -> aiohttp.TraceConfig:
    """The tracing that a session needs for attempts to know whether they sent a byte."""

    async def sends(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        if isinstance(context.trace_request_ctx, asyncio.Event):
            context.trace_request_ctx.set()

    tracing = aiohttp.TraceConfig()
    tracing.on_request_headers_sent.append(sends)
    return tracing


class Upstream:
    """Sends requests to workers over `session`, a `client_session`."""

    def __init__(self, session: aiohttp.ClientSession, first_byte_timeout_s: float) -> None:
        self._session = session
        self._first_byte_timeout_s = first_byte_timeout_s

    async def open(
        self, worker: Worker, request: web.Request, body: bytes, added: Mapping[str, Any] = NOTHING_ADDED
    ) -> web.Response | Stream:
        """Send a request with fields `added` to its body; returns a whole answer or a stream that has begun.

        A rank among them replaces the client's own, in headers as well. Raises `Failed` where no byte came.
        """
        upstream: aiohttp.ClientResponse | None = None
        # Set as soon as a byte was written to the worker's connection.
        sent = asyncio.Event()
        try:
            async with asyncio.timeout(self._first_byte_timeout_s) as deadline:
                worker.waiting.add(deadline)
                try:
                    upstream = await self._session.request(
                        request.method,
                        f"{worker.url}{request.rel_url}",
                        data=with_fields(body, added) or None,
                        headers=_forwarded(request, RANK_HEADERS if RANK in added else ()),
                        # A worker may redirect to a server that was never described.
                        allow_redirects=False,
                        trace_request_ctx=sent,
                    )
                    first = await _first(upstream) if upstream.content_type == STREAM else None
                    whole = await _relay(upstream) if first is None else None
                finally:
                    worker.waiting.discard(deadline)
        except BaseException as problem:
            if upstream is not None:
                upstream.close()
            if isinstance(problem, TimeoutError | aiohttp.ClientError | ConnectionError):
                raise self._failure(worker, problem, sent.is_set()) from None
            raise
        if upstream.status in OVERLOADED:
            upstream.close()
            worker.overloaded(f"answered {upstream.status}")
            raise Failed(f"answered {upstream.status}", whole)
        worker.health.succeeded()
        if whole is not None:
            return whole
        assert first is not None
        return Stream(upstream, first)

    def _failure(self, worker: Worker, problem: Exception, is_sent: bool) -> Failed:
        if not worker.is_up:
            return Failed(f"down: {worker.health.why}", is_lost=is_sent)
        if isinstance(problem, TimeoutError) and not isinstance(problem, aiohttp.ClientError):
            why = f"no byte within {self._first_byte_timeout_s:g} s"
        else:
            why = words(problem)
        worker.broke(problem, why)
        return Failed(why, is_lost=is_sent)


def _forwarded(request: web.Request, left_out: Collection[str]) -> CIMultiDict[str]:
    named = {name.strip().lower() for value in request.headers.getall(hdrs.CONNECTION, ()) for name in value.split(",")}
    named.update(name.lower() for name in left_out)
    return CIMultiDict(
        (name, value)
        for name, value in request.headers.items()
        if name.lower() not in _NOT_FORWARDED and name.lower() not in named and _is_text(value)
    )


def _is_text(value: str) -> bool:
    """True if a header can be written; a byte that is not UTF-8 was read as half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def relayed_headers(headers: Mapping[str, str]) -> dict[str, str]:
    """The headers of a worker's answer that are relayed."""
    return {name: headers[name] for name in _RELAYED if name in headers}


async def _relay(upstream: aiohttp.ClientResponse) -> web.Response:
    body = await upstream.read()
    return web.Response(body=body, status=upstream.status, headers=relayed_headers(upstream.headers))


async def _first(upstream: aiohttp.ClientResponse) -> bytes:
    """The first bytes of an answer; `ClientPayloadError` where it ends without one."""
    chunk = await upstream.content.readany()
    if not chunk:
        raise aiohttp.ClientPayloadError("the stream ended before it began")
    return chunk


def words(problem: BaseException) -> str:
    """An error in one line."""
    text = str(problem).splitlines()
    return text[0][:200] if text else type(problem).__name__


def num_cached_tokens(answer: bytes) -> int | None:
    """Prompt tokens that came from the worker's cache, as its answer or the beginning of it says; None where none does.

    `/generate` says so in each event, the others in their usage, if the worker has `--enable-cache-report`. In a text
    the quotation marks would be escaped.
    """
    found = _CACHED.search(answer[:_MAX_READ_BYTES])
    return None if found is None else int(found[1])


@dataclass(slots=True)
class OutputLength:
    """Tokens of an answer that is relayed: as it says itself, or else one an event of its stream."""

    _num_told: int | None = None
    _num_events: int = 0

    def see(self, chunk: bytes) -> None:
        """Take the next bytes of the answer; a stream's last is no token."""
        self._num_events += chunk.count(b"data: {")
        if found := _COMPLETED.findall(chunk[-_MAX_READ_BYTES:]):
            self._num_told = int(found[-1])

    @property
    def num_tokens(self) -> int:
        """So far."""
        return self._num_events if self._num_told is None else self._num_told


def num_completion_tokens(body: bytes) -> int | None:
    """Tokens of a whole answer by its own usage; None where it has none, or answers more than one prompt."""
    if len(body) > _MAX_READ_BYTES:
        return None
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return None
    for name in ("meta_info", "usage"):
        usage = answer.get(name) if isinstance(answer, dict) else None
        number = usage.get("completion_tokens", usage.get("output_tokens")) if isinstance(usage, dict) else None
        if type(number) is int and number > 0:
            return number
    return None
