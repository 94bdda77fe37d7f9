"""One attempt: a request is sent to a worker, until the first byte of its answer or the whole of it.

What comes of an attempt that brings no byte:

    refused     the connection was not made, or not a byte was written to it: the worker never had the request
    turned away 502, 503, 504: the worker had it, and lives
    lost        the connection broke, nothing came in time, or the worker was taken for down while it was waited for:
                the worker had it, and may have died of it
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Final

import aiohttp
from aiohttp import hdrs, web
from multidict import CIMultiDict

from marconi.router.gateway.member import Member

_OVERLOADED: Final = frozenset({502, 503, 504})
_NOT_FORWARDED: Final = frozenset(
    name.lower()
    for name in (
        *("Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Proxy-Connection", "TE", "Trailer"),
        *("Transfer-Encoding", "Upgrade", "Host", "Content-Length", "Accept-Encoding", "Expect"),
        "Content-Encoding",
    )
)
"""Of a connection, not of a request; what is set anew; and how a body came that was read."""
_STREAM: Final = "text/event-stream"
_RELAYED: Final = (hdrs.CONTENT_TYPE, hdrs.CACHE_CONTROL, "X-Request-Id", hdrs.RETRY_AFTER)


class Failed(Exception):
    """An attempt brought no byte; in words, why."""

    def __init__(self, why: str, answer: web.Response | None = None, *, is_lost: bool = False) -> None:
        super().__init__(why)
        self.answer = answer
        """What the worker said, where it said that it cannot."""
        self.is_lost = is_lost
        """Whether the worker may have died of it."""


@dataclass(frozen=True, slots=True)
class Stream:
    """An answer that has begun."""

    upstream: aiohttp.ClientResponse
    first: bytes

    @property
    def status(self) -> int:
        """Of the answer."""
        return self.upstream.status


@dataclass(slots=True)
class _Sent:
    """Whether anything of a request was written to its worker's connection."""

    is_sent: bool = False


def tracing() -> aiohttp.TraceConfig:
    """What a session needs for attempts to know whether they sent anything."""

    async def sends(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        if isinstance(context.trace_request_ctx, _Sent):
            context.trace_request_ctx.is_sent = True

    tracing = aiohttp.TraceConfig()
    tracing.on_request_headers_sent.append(sends)
    return tracing


class Upstream:
    """Sends requests to workers over `session`, which has `tracing`."""

    def __init__(self, session: aiohttp.ClientSession, first_byte_timeout_s: float) -> None:
        self._session = session
        self._first_byte_timeout_s = first_byte_timeout_s

    async def open(self, member: Member, request: web.Request, body: bytes) -> web.Response | Stream:
        """A whole answer or a stream that has begun; `Failed` where there is none, or the worker cannot."""
        upstream: aiohttp.ClientResponse | None = None
        sent = _Sent()
        try:
            async with asyncio.timeout(self._first_byte_timeout_s) as deadline:
                member.wait_with(deadline)
                try:
                    upstream = await self._session.request(
                        request.method,
                        f"{member.url}{request.rel_url}",
                        data=body or None,
                        headers=_forwarded(request),
                        # Where a worker sends to is no worker that was asked what it is.
                        allow_redirects=False,
                        trace_request_ctx=sent,
                    )
                    first = await _first(upstream) if upstream.content_type == _STREAM else None
                    whole = await _relay(upstream) if first is None else None
                finally:
                    member.wait_no_more(deadline)
        except BaseException as problem:
            if upstream is not None:
                upstream.close()
            if isinstance(problem, TimeoutError | aiohttp.ClientError | ConnectionError):
                raise self._failure(member, problem, sent.is_sent) from None
            raise
        if upstream.status in _OVERLOADED:
            upstream.close()
            member.turned_away(f"answered {upstream.status}")
            raise Failed(f"answered {upstream.status}", whole)
        member.health.succeeded()
        if whole is not None:
            return whole
        assert first is not None
        return Stream(upstream, first)

    def _failure(self, member: Member, problem: Exception, is_sent: bool) -> Failed:
        if not member.is_up:
            return Failed(f"down: {member.health.why}", is_lost=is_sent)
        if isinstance(problem, TimeoutError) and not isinstance(problem, aiohttp.ClientError):
            why = f"no byte within {self._first_byte_timeout_s:g} s"
        else:
            why = words(problem)
        member.broke(problem, why)
        return Failed(why, is_lost=is_sent)


def _forwarded(request: web.Request) -> CIMultiDict[str]:
    named = {name.strip().lower() for value in request.headers.getall(hdrs.CONNECTION, ()) for name in value.split(",")}
    return CIMultiDict(
        (name, value)
        for name, value in request.headers.items()
        if name.lower() not in _NOT_FORWARDED and name.lower() not in named and _is_text(value)
    )


def _is_text(value: str) -> bool:
    """Whether it can be written; a byte that is not of UTF-8 was read as half of a surrogate pair."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def kept(headers: Mapping[str, str]) -> dict[str, str]:
    """Of a worker's headers those that are relayed."""
    return {name: headers[name] for name in _RELAYED if name in headers}


async def _relay(upstream: aiohttp.ClientResponse) -> web.Response:
    body = await upstream.read()
    return web.Response(body=body, status=upstream.status, headers=kept(upstream.headers))


async def _first(upstream: aiohttp.ClientResponse) -> bytes:
    """The first bytes of an answer; `ClientPayloadError` where it ends without one."""
    chunk = await upstream.content.readany()
    if not chunk:
        raise aiohttp.ClientPayloadError("the stream ended before it began")
    return chunk


def words(problem: BaseException) -> str:
    """What went wrong, in a line."""
    text = str(problem).splitlines()
    return text[0][:200] if text else type(problem).__name__
