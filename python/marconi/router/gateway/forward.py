"""A request's way: read, dispatch, try, answer.

    body -> JSON -> the tenant's salt -> token ids -> chain of hashes -> a worker -> its first byte -> relayed

Until a worker has sent a byte of an answer, the router may retry: if a worker cannot be reached, dies, is overloaded
(502, 503, 504) or goes down while it is waited for, its request is given to another, `max_attempts` times in all. A
worker that dies while it has a request may have died of it, and so would the next: after a second one there is no
retry, so that one body ends two workers at most and never a fleet. After the first byte there is no retry either: a
stream that breaks ends with an event that says so. An answer that is no stream is relayed when it is whole, so it
cannot break. When a client disconnects, the worker's connection is closed, at which SGLang aborts the request.

The prefill of a stream ends at its first byte. With an answer that comes whole its end cannot be seen; the latency
model estimates it. A request that a worker refuses, or dies with, was not served: none of it counts as the worker's.
"""

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

import aiohttp
from aiohttp import hdrs, web

from marconi.record import Ended, TraceRecorder
from marconi.router.core import RoutedRequest
from marconi.router.dispatch import Ticket
from marconi.router.gateway import access
from marconi.router.gateway.added import RANK, asking_for_state, wanted_rank
from marconi.router.gateway.errors import HttpRefusal, error, error_event
from marconi.router.gateway.gateway import Gateway
from marconi.router.gateway.stats import Metrics, Record
from marconi.router.gateway.upstream import (
    Failed,
    OutputLength,
    Stream,
    Upstream,
    num_cached_tokens,
    num_completion_tokens,
    relayed_headers,
    words,
)
from marconi.router.gateway.worker import Rank, Worker
from marconi.router.prompts import CHAT, MESSAGES

_SERVER_INFO: Final = frozenset({"/server_info", "/get_server_info"})
"""All flags of SGLang, keys included: for the administrator."""
_MAX_LOST: Final = 2
"""Workers that may die while they have one and the same request."""
_NO_RETRY: Final = {"x-should-retry": "false"}
"""OpenAI's clients repeat what got a 5xx without this header."""


class Forwarding:
    """Handles the requests that workers answer."""

    def __init__(
        self,
        gateway: Gateway,
        session: aiohttp.ClientSession,
        metrics: Metrics,
        records: deque[Record],
        recorder: TraceRecorder | None = None,
    ) -> None:
        self._gateway = gateway
        self._settings = gateway.settings
        self._upstream = Upstream(session, gateway.settings.first_byte_timeout_s)
        self._metrics = metrics
        self._records = records
        self._recorder = recorder
        """The record of served requests, under `--record`."""

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Handle a request with a prompt."""
        came_s = time.monotonic()
        record = Record(time.time(), request.path)
        self._records.append(record)
        try:
            answer = await self._generate(request, record, came_s)
            record.status = answer.status
        except (HttpRefusal, web.HTTPException) as refused:
            record.status = refused.status
            raise
        except (asyncio.CancelledError, ConnectionResetError):
            # A worker's broken connection is handled before this.
            self._metrics.clients_gone.inc()
            raise
        except Exception:
            # A fault of this router's: the middleware answers with this status.
            record.status = 500
            raise
        finally:
            if record.status is not None:
                self._metrics.requests.labels(request.path, str(record.status)).inc()
        return answer

    async def pass_on(self, request: web.Request) -> web.StreamResponse:
        """Handle a request about the model, which any worker answers alike."""
        if request.path in _SERVER_INFO:
            access.require_administrator(request, self._settings.token)
        body = await _body(request, self._settings.body_timeout_s)
        failed: web.Response | None = None
        for worker in self._gateway.up():
            try:
                opened = await self._upstream.open(worker, request, body)
            except Failed as failure:
                failed = failure.answer or failed
                continue
            return await self._stream(request, worker, opened) if isinstance(opened, Stream) else opened
        return failed or self._unavailable()

    async def _generate(self, request: web.Request, record: Record, came_s: float) -> web.StreamResponse:
        settings = self._settings
        body = await _body(request, settings.body_timeout_s)
        read_s = time.monotonic()
        fields = _object(body)
        if settings.tenant_header is not None:
            if request.path == MESSAGES:
                raise HttpRefusal(
                    400,
                    f"with --tenant-header, chats must be posted to {CHAT}, got {MESSAGES}, where workers drop the "
                    "cache_salt that keeps tenants apart",
                )
            try:
                fields = access.salted(fields, access.tenant_of(request, settings.tenant_header))
                body = json.dumps(fields).encode()
            except ValueError as wrong:
                raise HttpRefusal(400, str(wrong)) from None
            except RecursionError:
                raise HttpRefusal(400, "the body is nested too deeply") from None
        session = None if settings.session_header is None else request.headers.get(settings.session_header)
        routed = await self._gateway.admit(request.path, fields, len(body), session)
        record.num_prompt_tokens = routed.prompt.num_tokens if routed.is_known else None
        self._metrics.to_dispatch_s.observe(time.monotonic() - read_s)
        wanted = wanted_rank(fields, request.headers)
        asked = _Asked(request, body, fields, routed, record, came_s, OutputLength() if self._recorder else None)
        tried: list[str] = []
        num_lost = 0
        last: web.Response | None = None
        while len(tried) < settings.max_attempts:
            ticket = self._gateway.dispatch_to_free(routed.prompt, tried, wanted)
            if ticket is None:
                break
            record.attempt(ticket)
            self._metrics.decisions.labels(ticket.worker, str(ticket.decision.reason)).inc()
            rank = self._gateway.ranks[ticket.worker]
            try:
                answer = await self._attempt(asked, ticket, rank)
                if self._recorder is not None and answer.status < 400:
                    self._recorder.add(asked.ended)
                return answer
            except Failed as failure:
                self._gateway.refused(ticket)
                tried.append(rank.worker.url)
                record.fail(f"{ticket.worker}: {failure}")
                self._metrics.failures.labels(ticket.worker).inc()
                last = failure.answer or last
                num_lost += failure.is_lost
                if num_lost == _MAX_LOST:
                    return error(
                        502, f"{num_lost} workers failed while they had this request: no other gets it", _NO_RETRY
                    )
            finally:
                self._gateway.ended(ticket)
        return last or self._unavailable(tried)

    def _unavailable(self, tried: Collection[str] = ()) -> web.Response:
        """The answer where no worker takes a request."""
        headers = {str(hdrs.RETRY_AFTER): str(max(math.ceil(self._gateway.soonest_free_s()), 1))}
        if not self._gateway.up():
            return error(503, "no worker is up", headers)
        if len(tried) < self._settings.max_attempts:
            limit = self._settings.max_requests_per_worker
            return error(503, f"every worker has {limit} requests, as many as it may have", headers)
        return error(502, f"tried {len(tried)} times, and no worker answered", headers)

    # One attempt

    async def _attempt(self, asked: "_Asked", ticket: Ticket, rank: Rank) -> web.StreamResponse:
        gateway, record, length = self._gateway, asked.record, asked.length
        added = {} if rank.number is None else {RANK: rank.number}
        if (num_tokens := ticket.decision.shared_tokens) and rank.events is not None:
            added |= asking_for_state(asked.request.path, asked.fields, num_tokens)
        if not asked.routed.is_stream:
            gateway.expect_whole_answer(ticket)
        opened = await self._upstream.open(rank.worker, asked.request, asked.body, added)
        record.ttft_s = round(time.monotonic() - asked.came_s, 6)
        self._metrics.ttft_s.observe(record.ttft_s)
        if opened.status >= 400 or (isinstance(opened, Stream) and opened.is_error):
            gateway.refused(ticket)
        else:
            if isinstance(opened, Stream):
                gateway.stream_began(ticket)
                self._metrics.stream_began(ticket, time.monotonic() - ticket.dispatched_s)
                answer = opened.first
            else:
                assert isinstance(opened.body, bytes)
                answer = opened.body
                gateway.whole_answer_came(ticket, lambda: num_completion_tokens(answer))
            if record.num_prompt_tokens is not None:
                record.num_cached_tokens = num_cached_tokens(answer)
                self._metrics.accepted(ticket, record.num_cached_tokens)
        if not isinstance(opened, Stream):
            if length is not None and isinstance(opened.body, bytes):
                length.see(opened.body)
            return opened
        return await self._stream(asked.request, rank.worker, opened, length)

    async def _stream(
        self, request: web.Request, worker: Worker, opened: Stream, length: OutputLength | None = None
    ) -> web.StreamResponse:
        upstream = opened.upstream
        try:
            answer = web.StreamResponse(status=upstream.status, headers=relayed_headers(upstream.headers))
            await answer.prepare(request)
            chunk = opened.first
            held: list[bytes] = []
            while chunk:
                if length is not None:
                    length.see(chunk)
                # Only whole lines are written: the error event must not follow half an event.
                end = chunk.rfind(b"\n") + 1
                if end:
                    await answer.write(b"".join((*held, chunk[:end])))
                    held.clear()
                held.append(chunk[end:])
                try:
                    async with asyncio.timeout(self._settings.first_byte_timeout_s):
                        chunk = await upstream.content.readany()
                except (aiohttp.ClientError, ConnectionError, TimeoutError) as broken:
                    # A host that vanished closes no connection: only its silence shows it.
                    worker.failed(words(broken))
                    self._metrics.cut_off.inc()
                    await answer.write(error_event(502, "the worker failed before it had answered to the end"))
                    break
            else:
                await answer.write(b"".join(held))
            await answer.write_eof()
            return answer
        finally:
            # After an answer that was read to its end this closes nothing.
            upstream.close()


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request with a prompt, in all its attempts."""

    request: web.Request
    body: bytes
    fields: Mapping[str, Any]
    """The body as JSON."""
    routed: RoutedRequest
    record: Record
    came_s: float
    length: OutputLength | None
    """The length of the answer, counted under `--record`."""

    def ended(self) -> Ended | None:
        """The request as it is recorded once it was served; None where its prompt's tokens are not known.

        What was cached is what its answer says, or else what was expected.
        """
        routed, told = self.routed, self.record.num_cached_tokens
        if routed.ids is None or self.length is None:
            return None
        namespace = int.from_bytes(routed.prompt.chain.namespace, "little")
        num_prompt = routed.prompt.num_tokens
        num_cached = min((self.record.num_hit_tokens or 0) if told is None else told, num_prompt)
        return Ended(self.came_s, num_prompt, self.length.num_tokens, num_cached, namespace, routed.ids)


async def _body(request: web.Request, timeout_s: float) -> bytes:
    """A request's body, decoded; a 400 where its coding is wrong, a 408 after `timeout_s`."""
    try:
        async with asyncio.timeout(timeout_s):
            return await request.read()
    except TimeoutError:
        raise HttpRefusal(408, f"the body must come in within {timeout_s:g} s") from None
    except web.RequestPayloadError:
        raise HttpRefusal(400, "the body must be coded as Content-Encoding and Transfer-Encoding say") from None


def _object(body: bytes) -> dict[str, Any]:
    """The JSON object that a body is; a 400 for another."""
    try:
        # As a worker reads it: whole numbers of any size, and NaN.
        fields = json.loads(body)
    except (ValueError, RecursionError) as wrong:
        raise HttpRefusal(400, f"the body must be JSON: {str(wrong)[:200]}") from None
    if not isinstance(fields, dict):
        raise HttpRefusal(400, f"the body must be a JSON object, got a {type(fields).__name__}")
    return fields
