"""What a router itself answers: errors in the shape that OpenAI's clients and SGLang's read, one line each."""

import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web


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
