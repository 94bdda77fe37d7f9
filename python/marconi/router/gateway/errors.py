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


class HttpRefusal(Exception):
    """An error to be raised where a request is handled: the server answers with it."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
