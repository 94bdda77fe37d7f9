"""What a router itself answers, and what it reads of a worker's answer.

Errors are in the shape that OpenAI's clients and SGLang's read, one line each.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from aiohttp import web

_REFUSES: Final = b'data: {"error":'
_MAX_READ_BYTES: Final = 256 << 10
"""Of an answer that is read for what it says of itself: one with log-probabilities may be many times as long."""


def error(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """An answer that says in a line what went wrong."""
    return web.json_response(error_body(status, message), status=status, headers=headers)


def error_body(status: int, message: str) -> dict[str, Any]:
    """Its body."""
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    return {"object": "error", "error": {"message": message, "type": kind, "code": status}}


def refusal(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.HTTPException:
    """The same, to be raised."""
    classes: dict[int, type[web.HTTPException]] = {
        400: web.HTTPBadRequest,
        401: web.HTTPUnauthorized,
        404: web.HTTPNotFound,
        408: web.HTTPRequestTimeout,
        409: web.HTTPConflict,
    }
    made = classes[status](text=json.dumps(error_body(status, message)), content_type="application/json")
    made.headers.update(headers or {})
    return made


def event(status: int, message: str) -> bytes:
    """The same as a server-sent event, for a stream that has begun."""
    return b"data: " + json.dumps(error_body(status, message)).encode() + b"\n\n"


def refuses(first: bytes) -> bool:
    """Whether a stream that begins so is a worker's refusal: SGLang's `/generate` gives it the status 200."""
    return first.startswith(_REFUSES)


def num_answered(body: bytes) -> int | None:
    """Tokens of a whole answer, as it says itself; None where it does not, or is no answer to one prompt."""
    if len(body) > _MAX_READ_BYTES:
        return None
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return None
    for name in ("meta_info", "usage"):
        told = answer.get(name) if isinstance(answer, dict) else None
        number = told.get("completion_tokens") if isinstance(told, dict) else None
        if type(number) is int and number > 0:
            return number
    return None
