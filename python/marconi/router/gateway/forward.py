"""A request's way: read, dispatch, try, answer.

    body -> JSON -> the tenant's salt -> token ids -> chain of hashes -> a worker -> its first byte -> relayed

Until a worker has sent a byte of an answer the request is this router's: a worker that cannot be reached, goes, says
that it is overloaded (502, 503, 504) or is taken for down while it is waited for has its request given to another,
`max_attempts` times in all. After that byte it is the client's: a stream that breaks ends with an event that says so.
An answer that is no stream is relayed when it is whole, so it cannot break. A client that goes closes its worker's
connection, at which SGLang aborts the request.

The prefill of a stream is over at its first byte. Of an answer that comes whole nobody can tell; it is taken to be over
when the model says.
"""

import asyncio
import json
import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from aiohttp import hdrs, web
from multidict import CIMultiDict

from marconi.router.dispatch import Prompt, Ticket
from marconi.router.gateway import access
from marconi.router.gateway.answers import error, event, refusal
from marconi.router.gateway.brain import Brain
from marconi.router.gateway.member import Member
from marconi.router.gateway.metrics import Metrics
from marconi.router.gateway.records import Record, Records
from marconi.router.gateway.settings import Settings
from marconi.router.prompts.base import Unreadable

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
_TELL_ALL: Final = frozenset({"/server_info", "/get_server_info"})
"""What SGLang was started with, keys included."""
_RELAYED: Final = (hdrs.CONTENT_TYPE, hdrs.CACHE_CONTROL, "X-Request-Id", hdrs.RETRY_AFTER)


class _Failed(Exception):
    """An attempt brought no byte; in words, why."""

    def __init__(self, why: str, answer: web.Response | None = None) -> None:
        super().__init__(why)
        self.answer = answer
        """What the worker said, where it said that it cannot."""


@dataclass(frozen=True, slots=True)
class _Stream:
    """An answer that has begun."""

    upstream: aiohttp.ClientResponse
    first: bytes


class Forwarding:
    """Answers what is asked of workers."""

    def __init__(self, brain: Brain, session: aiohttp.ClientSession, settings: Settings, metrics: Metrics) -> None:
        self.records = Records(settings.num_recent)
        self._brain = brain
        self._session = session
        self._settings = settings
        self._metrics = metrics

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """A request with a prompt."""
        came_s = time.monotonic()
        record = self.records.begin(time.time(), request.path)
        try:
            answer = await self._generate(request, record, came_s)
            record.status = answer.status
        except web.HTTPException as refused:
            record.status = refused.status
            raise
        except (asyncio.CancelledError, ConnectionResetError):
            # Of a worker's connection nothing comes up to here.
            self._metrics.clients_gone.inc()
            raise
        except Exception:
            # A fault of this router's, which its client is told of so.
            record.status = 500
            raise
        finally:
            if record.status is not None:
                self._metrics.requests.labels(request.path, str(record.status)).inc()
        return answer

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """A request about the model, which any worker answers alike."""
        if request.path in _TELL_ALL:
            access.require_administrator(request, self._settings.token)
        body = await _body(request, self._settings.body_timeout_s)
        failed: web.Response | None = None
        for member in self._brain.up():
            try:
                opened = await self._open(member, request, body)
            except _Failed as failure:
                failed = failure.answer or failed
                continue
            return await self._stream(request, member, opened) if isinstance(opened, _Stream) else opened
        return failed or self._nobody()

    async def _generate(self, request: web.Request, record: Record, came_s: float) -> web.StreamResponse:
        body = await _body(request, self._settings.body_timeout_s)
        read_s = time.monotonic()
        asked = _object(body)
        if self._settings.tenant_header is not None:
            try:
                asked = access.salted(asked, access.tenant_of(request, self._settings.tenant_header))
            except Unreadable as wrong:
                raise refusal(400, str(wrong)) from None
            body = json.dumps(asked).encode()
        wanted = await self._brain.asked(request.path, asked, len(body), self._session_of(request))
        record.num_prompt_tokens = wanted.prompt.num_tokens if wanted.is_known else None
        self._metrics.to_dispatch_s.observe(time.monotonic() - read_s)
        tried: list[str] = []
        last: web.Response | None = None
        while len(tried) < self._settings.max_attempts:
            ticket = self._dispatch(wanted.prompt, tried, record)
            if ticket is None:
                break
            try:
                return await self._attempt(request, body, ticket, wanted.is_stream, record, came_s)
            except _Failed as failure:
                tried.append(ticket.worker)
                record.fail(f"{ticket.worker}: {failure}")
                self._metrics.failures.labels(ticket.worker).inc()
                last = failure.answer or last
            finally:
                self._brain.ended(ticket)
        return last or self._nobody(tried)

    def _session_of(self, request: web.Request) -> str | None:
        header = self._settings.session_header
        return None if header is None else request.headers.get(header)

    def _dispatch(self, prompt: Prompt, tried: Collection[str], record: Record) -> Ticket | None:
        ticket = self._brain.dispatch(prompt, tried)
        if ticket is None:
            return None
        record.attempt(ticket)
        self._metrics.decisions.labels(ticket.worker, str(ticket.decision.reason)).inc()
        if len(tried) == 0 and record.num_prompt_tokens is not None:
            self._metrics.prompt_tokens.inc(prompt.num_tokens)
            self._metrics.hit_tokens.inc(ticket.decision.worker.num_hit_tokens)
        return ticket

    def _nobody(self, tried: Collection[str] = ()) -> web.Response:
        """The answer where no worker takes a request."""
        up, after_s = self._brain.up(), self._brain.soonest_free_s()
        headers = {str(hdrs.RETRY_AFTER): str(max(math.ceil(after_s), 1))}
        if not up:
            return error(503, "no worker is up", headers)
        if len(tried) < self._settings.max_attempts:
            limit = self._settings.max_requests_per_worker
            return error(503, f"every worker has {limit} requests, as many as it may have", headers)
        return error(502, f"tried {len(tried)} times, and no worker answered", headers)

    # One attempt

    async def _attempt(
        self, request: web.Request, body: bytes, ticket: Ticket, is_stream: bool, record: Record, came_s: float
    ) -> web.StreamResponse:
        if not is_stream:
            self._brain.answers_whole(ticket)
        member = self._brain.members[ticket.worker]
        opened = await self._open(member, request, body)
        record.ttft_s = round(time.monotonic() - came_s, 6)
        self._metrics.ttft_s.observe(record.ttft_s)
        if not isinstance(opened, _Stream):
            return opened
        self._brain.answered(ticket)
        return await self._stream(request, member, opened)

    async def _open(self, member: Member, request: web.Request, body: bytes) -> web.Response | _Stream:
        """A whole answer or a stream that has begun; `_Failed` where there is none, or the worker cannot."""
        upstream: aiohttp.ClientResponse | None = None
        try:
            async with asyncio.timeout(self._settings.first_byte_timeout_s) as deadline:
                member.wait_with(deadline)
                try:
                    upstream = await self._session.request(
                        request.method,
                        f"{member.url}{request.rel_url}",
                        data=body or None,
                        headers=_forwarded(request),
                        # Where a worker sends to is no worker that was asked what it is.
                        allow_redirects=False,
                    )
                    first = await _first(upstream) if upstream.content_type == _STREAM else None
                    whole = await _relay(upstream) if first is None else None
                finally:
                    member.wait_no_more(deadline)
        except BaseException as problem:
            if upstream is not None:
                upstream.close()
            if isinstance(problem, TimeoutError | aiohttp.ClientError | ConnectionError):
                raise self._failure(member, problem) from None
            raise
        if upstream.status in _OVERLOADED:
            upstream.close()
            member.turned_away(f"answered {upstream.status}")
            raise _Failed(f"answered {upstream.status}", whole)
        member.health.succeeded()
        if whole is not None:
            return whole
        assert first is not None
        return _Stream(upstream, first)

    def _failure(self, member: Member, problem: Exception) -> _Failed:
        if not member.is_up:
            return _Failed(f"down: {member.health.why}")
        if isinstance(problem, TimeoutError) and not isinstance(problem, aiohttp.ClientError):
            why = f"no byte within {self._settings.first_byte_timeout_s:g} s"
        else:
            why = _words(problem)
        member.broke(problem, why)
        return _Failed(why)

    async def _stream(self, request: web.Request, member: Member, opened: _Stream) -> web.StreamResponse:
        upstream = opened.upstream
        try:
            answer = web.StreamResponse(status=upstream.status, headers=_kept(upstream.headers))
            await answer.prepare(request)
            chunk = opened.first
            held: list[bytes] = []
            while chunk:
                # A line goes on when it is whole: an event that breaks off would swallow the one that says so.
                end = chunk.rfind(b"\n") + 1
                if end:
                    await answer.write(b"".join((*held, chunk[:end])))
                    held.clear()
                held.append(chunk[end:])
                try:
                    async with asyncio.timeout(self._settings.first_byte_timeout_s):
                        chunk = await upstream.content.readany()
                except (aiohttp.ClientError, ConnectionError, TimeoutError) as broken:
                    # A host that vanished, or a chunk that is none, ends no connection: silence does.
                    member.failed(_words(broken))
                    self._metrics.cut_off.inc()
                    await answer.write(event(502, "the worker went before it had answered to the end"))
                    break
            else:
                await answer.write(b"".join(held))
            await answer.write_eof()
            return answer
        finally:
            # Of an answer that was read to its end this closes nothing.
            upstream.close()


async def _body(request: web.Request, timeout_s: float) -> bytes:
    """A request's body as its client had it.

    A 400 where it is not coded as its headers say, a 408 where it has not come in after `timeout_s`.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except TimeoutError:
        raise refusal(408, f"the body has not come in within {timeout_s:g} s") from None
    except web.RequestPayloadError:
        raise refusal(400, "the body is not coded as its headers say (Content-Encoding, Transfer-Encoding)") from None


def _object(body: bytes) -> dict[str, Any]:
    """The JSON object that a body is; a 400 for another."""
    try:
        # As a worker reads it: whole numbers of any size, and NaN.
        asked = json.loads(body)
    except (ValueError, RecursionError) as wrong:
        raise refusal(400, f"the body is not JSON: {str(wrong)[:200]}") from None
    if not isinstance(asked, dict):
        raise refusal(400, f"the body is a JSON {type(asked).__name__}; an object is right")
    return asked


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


def _kept(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: headers[name] for name in _RELAYED if name in headers}


async def _relay(upstream: aiohttp.ClientResponse) -> web.Response:
    body = await upstream.read()
    return web.Response(body=body, status=upstream.status, headers=_kept(upstream.headers))


async def _first(upstream: aiohttp.ClientResponse) -> bytes:
    """The first bytes of an answer; `ClientPayloadError` where it ends without one."""
    chunk = await upstream.content.readany()
    if not chunk:
        raise aiohttp.ClientPayloadError("the stream ended before it began")
    return chunk


def _words(problem: BaseException) -> str:
    text = str(problem).splitlines()
    return text[0][:200] if text else type(problem).__name__
