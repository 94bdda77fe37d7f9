"""A router's own error answers, one line each, in the shape that OpenAI's clients and SGLang's read."""

import json
from collections.abc import Mapping
from typing import Any

from aiohttp import web


def error_body(status: int, message: str) -> dict[str, Any]:
    """The JSON of an error."""
    kind = "invalid_request_error" if 400 <= status < 500 else "server_error"
    return {"object": "error", "error": {"message": message, "type": kind, "code": status}}


def error(status: int, message: str, headers: Mapping[str, str] | None = None) -> web.Response:
    """An error as an answer."""
    return web.json_response(error_body(status, message), status=status, headers=headers)


def error_event(status: int, message: str) -> bytes:
    """An error as a server-sent event, for a stream that has begun."""
    return b"data: " + json.dumps(error_body(status, message)).encode() + b"\n\n"


def refusal(status: int, message: str) -> web.HTTPException:
    """An error to be raised."""
    classes: dict[int, type[web.HTTPException]] = {
        400: web.HTTPBadRequest,
        401: web.HTTPUnauthorized,
        404: web.HTTPNotFound,
        408: web.HTTPRequestTimeout,
        409: web.HTTPConflict,
    }
    return classes[status](text=json.dumps(error_body(status, message)), content_type="application/json")
