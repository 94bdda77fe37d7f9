"""A chat's body as its model's template takes it: messages, calls whose arguments are objects, and tools.

SGLang gives calls and tools all their fields, those that are absent as null.
"""

import json
from collections.abc import Mapping
from typing import Any, Final

_OPTIONAL: Final = ("tool_call_id", "name", "reasoning_content")
_INTEGERS: Final = range(-(1 << 63), 1 << 64)
"""Whole numbers that every parser of JSON reads alike."""


def messages_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A chat's messages for its template; any error of reading for calls whose arguments are no JSON."""
    return [_message(message) for message in body["messages"]]


def tools_of(body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """A chat's tools for its template."""
    tools = body.get("tools") or ()
    return [{"type": "function", "function": tool["function"], "defer_loading": None} for tool in tools] or None


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    found = {"role": message["role"], "content": message.get("content") or ""}
    found |= {name: message[name] for name in _OPTIONAL if message.get(name) is not None}
    if message.get("tool_calls"):
        found["tool_calls"] = [_call(call) for call in message["tool_calls"]]
    return found


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):
        arguments = json.loads(arguments, parse_int=_integer)
    return {
        "id": call.get("id"),
        "index": call.get("index"),
        "type": "function",
        "function": {"name": function["name"], "arguments": arguments},
    }


def _integer(digits: str) -> int:
    number = int(digits)
    if number not in _INTEGERS:
        raise ValueError(f"a whole number must have 64 bits at most, got {digits}")
    return number
