"""A request's way: read, dispatch, try, answer.

    body -> JSON -> the tenant's salt -> token ids -> chain of hashes -> a worker -> its first byte -> relayed

Until a worker has sent a byte of an answer the request is this router's: a worker that cannot be reached, goes, says
that it is overloaded (502, 503, 504) or is taken for down while it is waited for has its request given to another,
`max_attempts` times in all. A worker that went with a request may have died of it, and so would the next: a second one
that goes is the last, so that one body ends two workers at most and never a fleet. After that byte it is the client's:
a stream that breaks ends with an event that says so. An answer that is no stream is relayed when it is whole, so it
cannot break. A client that goes closes its worker's connection, at which SGLang aborts the request.

The prefill of a stream is over at its first byte. Of an answer that comes whole nobody can tell; it is taken to be over
when the model says. What a worker refuses, or goes with, it has not served: nothing of it counts as the worker's.
"""

import asyncio
import json
import math
import time
from collections.abc import Collection
from typing import Any, Final

import aiohttp
from aiohttp import hdrs, web

from marconi.router.dispatch import Prompt, Ticket
from marconi.router.gateway import access
from marconi.router.gateway.answers import error, event, num_answered, refusal, refuses
from marconi.router.gateway.brain import Brain
from marconi.router.gateway.member import Member
from marconi.router.gateway.metrics import Metrics
from marconi.router.gateway.records import Record, Records
from marconi.router.gateway.settings import Settings
from marconi.router.gateway.upstream import Failed, Stream, Upstream, kept, words

_TELL_ALL: Final = frozenset({"/server_info", "/get_server_info"})
"""What SGLang was started with, keys included."""
_MAX_LOST: Final = 2
"""Workers that may go with one request."""
_NOT_AGAIN: Final = {"x-should-retry": "false"}
"""OpenAI's clients send again what got a 5xx, unless they are told not to."""


class Forwarding:
    """Answers what is asked of workers."""

    def __init__(self, brain: Brain, session: aiohttp.ClientSession, settings: Settings, metrics: Metrics) -> None:
        self.records = Records(settings.num_recent)
        self._brain = brain
        self._upstream = Upstream(session, settings.first_byte_timeout_s)
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
                opened = await self._upstream.open(member, request, body)
            except Failed as failure:
                failed = failure.answer or failed
                continue
            return await self._stream(request, member, opened) if isinstance(opened, Stream) else opened
        return failed or self._nobody()

    async def _generate(self, request: web.Request, record: Record, came_s: float) -> web.StreamResponse:
        body = await _body(request, self._settings.body_timeout_s)
        read_s = time.monotonic()
        asked = _object(body)
        if self._settings.tenant_header is not None:
            try:
                asked = access.salted(asked, access.tenant_of(request, self._settings.tenant_header))
                body = json.dumps(asked).encode()
            except ValueError as wrong:
                raise refusal(400, str(wrong)) from None
            except RecursionError:
                raise refusal(400, "the body is nested too deeply") from None
        wanted = await self._brain.admit(request.path, asked, len(body), self._session_of(request))
        record.num_prompt_tokens = wanted.prompt.num_tokens if wanted.is_known else None
        self._metrics.to_dispatch_s.observe(time.monotonic() - read_s)
        tried: list[str] = []
        num_lost = 0
        last: web.Response | None = None
        while len(tried) < self._settings.max_attempts:
            ticket = self._dispatch(wanted.prompt, tried, record)
            if ticket is None:
                break
            try:
                return await self._attempt(request, body, ticket, wanted.is_stream, record, came_s)
            except Failed as failure:
                self._brain.refused(ticket)
                tried.append(ticket.worker)
                record.fail(f"{ticket.worker}: {failure}")
                self._metrics.failures.labels(ticket.worker).inc()
                last = failure.answer or last
                num_lost += failure.is_lost
                if num_lost == _MAX_LOST:
                    why = f"{num_lost} workers went while they had this request: no other gets it"
                    return error(502, why, _NOT_AGAIN)
            finally:
                self._brain.ended(ticket)
        return last or self._nobody(tried)

    def _session_of(self, request: web.Request) -> str | None:
        header = self._settings.session_header
        return None if header is None else request.headers.get(header)

    def _dispatch(self, prompt: Prompt, tried: Collection[str], record: Record) -> Ticket | None:
        ticket = self._brain.dispatch_to_free(prompt, tried)
        if ticket is None:
            return None
        record.attempt(ticket)
        self._metrics.decisions.labels(ticket.worker, str(ticket.decision.reason)).inc()
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
        opened = await self._upstream.open(member, request, body)
        record.ttft_s = round(time.monotonic() - came_s, 6)
        self._metrics.ttft_s.observe(record.ttft_s)
        if opened.status >= 400 or (isinstance(opened, Stream) and refuses(opened.first)):
            self._brain.refused(ticket)
        else:
            self._count(ticket, record)
            if isinstance(opened, Stream):
                self._brain.first_token(ticket)
            else:
                answer = opened.body
                assert isinstance(answer, bytes)
                self._brain.answered_whole(ticket, lambda: num_answered(answer))
        if not isinstance(opened, Stream):
            return opened
        return await self._stream(request, member, opened)

    def _count(self, ticket: Ticket, record: Record) -> None:
        if record.num_prompt_tokens is not None:
            self._metrics.prompt_tokens.inc(ticket.prompt.num_tokens)
            self._metrics.hit_tokens.inc(ticket.decision.worker.num_hit_tokens)

    async def _stream(self, request: web.Request, member: Member, opened: Stream) -> web.StreamResponse:
        upstream = opened.upstream
        try:
            answer = web.StreamResponse(status=upstream.status, headers=kept(upstream.headers))
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
                    member.failed(words(broken))
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
