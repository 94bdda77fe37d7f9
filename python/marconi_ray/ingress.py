"""The ingress: the routes of an SGLang server, in front of all replicas.

Until a replica has sent a byte of an answer the ingress may retry: where the replica or its server fails, or the server
is overloaded (502, 503, 504), another gets the request, `max_attempts` times in all. After it, a stream that breaks
ends with an event that says so.
"""

import json
from collections.abc import AsyncIterator
from typing import Any, Final

from ray.exceptions import RayActorError, RayError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from marconi.router.gateway.errors import error_body, error_event
from marconi.router.gateway.upstream import OVERLOADED
from marconi.router.prompts import ROUTES
from marconi_ray.call import Call, Headers, ResponseHead, ServerGone

REPLICA: Final = "x-marconi-replica"
REASON: Final = "x-marconi-reason"
"""Headers of every answer of a server: its replica, and why that was chosen."""
_PASSED_ON: Final = ("/v1/models", "/model_info", "/get_model_info", "/server_info", "/health")
_METHODS: Final = dict.fromkeys(ROUTES, "POST") | dict.fromkeys(_PASSED_ON, "GET")
_FORWARDED: Final = frozenset({"accept", "content-type", "authorization", "x-request-id", "user-agent", "traceparent"})


class Ingress:
    """Serve's deployment in front of the servers."""

    def __init__(self, servers: DeploymentHandle, max_body_bytes: int, max_attempts: int) -> None:
        self._forward = servers.options(method_name="forward", stream=True)
        self._max_body_bytes = max_body_bytes
        self._max_attempts = max_attempts

    async def __call__(self, request: Request) -> Response:
        """Handle a client's request."""
        path = request.scope["path"].removeprefix(request.scope.get("root_path", ""))
        if path not in _METHODS:
            return error(404, f"the path must be one of {', '.join(_METHODS)}, got {path}")
        if request.method != _METHODS[path]:
            return error(405, f"the method of {path} must be {_METHODS[path]}, got {request.method}")
        try:
            body = await self._body(request)
        except ClientDisconnect:
            return Response(status_code=499)
        if body is None:
            return error(413, f"the body must have at most {self._max_body_bytes} bytes")
        query = f"?{request.url.query}" if request.url.query else ""
        headers = tuple((name, value) for name, value in request.headers.items() if name in _FORWARDED)
        return await self._answer(request.method, f"{path}{query}", headers, body)

    async def _answer(self, method: str, path: str, headers: Headers, body: bytes) -> Response:
        tried: frozenset[str] = frozenset()
        last: Response | None = None
        why = "no replica answered"
        for _ in range(self._max_attempts):
            call = Call(method, path, headers, body, tried=tried)
            answer = self._forward.remote(call)
            try:
                head: ResponseHead = await anext(answer)
            except (RayActorError, ServerGone) as gone:
                why = str(gone).splitlines()[0]
            except (BackPressureError, DeploymentUnavailableError) as full:
                return error(503, str(full).splitlines()[0], {"retry-after": "1"})
            except BaseException:
                answer.cancel()
                raise
            else:
                if call.answered is not None:
                    call.answered()
                made = _response(head, answer, call.why)
                if head.status not in OVERLOADED:
                    return made
                last, why = made, f"answered {head.status}"
            if call.replica is not None:
                tried |= {call.replica}
        return last or error(502, f"tried {self._max_attempts} times: {why}")

    async def _body(self, request: Request) -> bytes | None:
        """A request's body; None for one that is too large."""
        chunks, num_bytes = [], 0
        async for chunk in request.stream():
            num_bytes += len(chunk)
            if num_bytes > self._max_body_bytes:
                return None
            chunks.append(chunk)
        return b"".join(chunks)


def error(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """An error as an answer, in the shape that OpenAI's clients read."""
    return Response(
        json.dumps(error_body(status, message)), status_code=status, media_type="application/json", headers=headers
    )


def _response(head: ResponseHead, answer: Any, why: str) -> Response:
    headers = {**dict(head.headers), REPLICA: head.replica, REASON: why}
    if not any(name.lower() == "content-type" and "text/event-stream" in value for name, value in head.headers):
        return Response(head.first, status_code=head.status, headers=headers)
    return StreamingResponse(_rest(head, answer), status_code=head.status, headers=headers)


async def _rest(head: ResponseHead, answer: Any) -> AsyncIterator[bytes]:
    is_whole = False
    try:
        yield head.first
        try:
            async for chunk in answer:
                yield chunk
        except (RayError, ServerGone):
            yield error_event(502, "the replica failed before it had answered to the end")
        is_whole = True
    finally:
        if not is_whole:
            # The client has gone: the replica closes its connection, and SGLang aborts the request.
            answer.cancel()
