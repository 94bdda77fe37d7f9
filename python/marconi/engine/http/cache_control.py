"""Marks in the body of a chat: `cache_control` and its `ttl`, as clients write them, and `prompt_cache_retention`.

    both routes     tools[i]    messages[i]    messages[i].content[j]    the body itself: the end of its last message
    /v1/messages    system[i]    messages[i].content[j].content[k]: the end of that tool's result

SGLang's models of requests drop the fields, so they are read from the raw body. A tool's mark and one on the last block
of the system prompt end where tools and system prompt end. SGLang converts Anthropic's messages to a chat, by rules of
its own: to find which of the chat's messages come before a mark, the body up to it is converted as well.

A `ttl` of an hour retains the state at the mark, by an action of `kv_hints` (`policy/kv_hints.py`): its own name space
pays. One of five minutes, or none, retains nothing: states are evicted by their worth. On OpenAI's route a
`prompt_cache_retention` of "24h" is a mark of an hour on the body itself: longer nothing is retained.
Sources: `srt/entrypoints/anthropic/serving.py`, `srt/managers/kv_hints.py`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import dropwhile, takewhile
from typing import Any, Final, NamedTuple

from marconi.policy.retention import MAX_RETAIN_S

FIELD: Final = "cache_control"
SYSTEM: Final = -1
"""In the place of a message: the system prompt and the tools."""
RETENTION: Final = "prompt_cache_retention"
_LONG: Final = "24h"
_RETENTIONS: Final = ("in_memory", "in-memory", _LONG)
"""OpenAI's guide and its schema spell the first in two ways."""
_TYPE: Final = "ephemeral"
_TTLS: Final = {"5m": False, "1h": True}
"""Whether each retains."""
_CHAT: Final = "/v1/chat/completions"
_ANTHROPIC: Final = "/v1/messages"
_SYSTEM_ROLES: Final = ("system", "developer")


class Mark(NamedTuple):
    """A message, or a part of one, that is marked."""

    message: int
    """Which of the body's messages, or `SYSTEM`,"""
    num_parts: int | None
    """and how many parts of its content; None for all of it."""
    retains: bool = False


class Marked(NamedTuple):
    """A body and its marks."""

    body: Mapping[str, Any]
    is_anthropic: bool
    marks: Sequence[Mark]

    def before(self, serving: Any, request: Any, mark: Mark) -> list[Any]:
        """The messages of the chat `request` up to a `mark`; none for the whole system prompt.

        Raises what SGLang raises for a part of a body that it cannot convert.
        """
        if mark[:2] == (SYSTEM, None):
            return []
        if self.is_anthropic:
            return self._converted(serving, request, mark)
        *before, last = request.messages[: mark.message + 1]
        if mark.num_parts is not None:
            last = last.model_copy(update={"content": last.content[: mark.num_parts]})
        return [*before, last]

    def _converted(self, serving: Any, request: Any, mark: Mark) -> list[Any]:
        if mark.message == SYSTEM:
            return _chat(serving, {"system": self.body["system"][: mark.num_parts], "messages": []})
        *before, last = self.body["messages"][: mark.message + 1]
        if mark.num_parts is not None:
            last = {**last, "content": last["content"][: mark.num_parts]}
        # SGLang moves system messages to the front where the template has no place for them, also from behind a mark.
        messages = _chat(serving, {"messages": [*before, last]})
        return [*system_of(request), *dropwhile(_is_system, messages)]


def read_marks(raw_request: Any) -> Marked | None:
    """The marks of a request that has been read; None if it has none.

    Raises `ValueError`, in one line, for a value that is not understood.
    """
    if raw_request is None or not raw_request.url.path.endswith((_CHAT, _ANTHROPIC)):
        return None
    text = body_of(raw_request)
    if FIELD.encode() not in text and RETENTION.encode() not in text:
        return None
    body, is_anthropic = json.loads(text), raw_request.url.path.endswith(_ANTHROPIC)
    marks: dict[tuple[int, int | None], Mark] = {}
    for mark in marks_of(body, is_anthropic=is_anthropic):
        place = mark.message, mark.num_parts
        marks[place] = mark._replace(retains=mark.retains or (place in marks and marks[place].retains))
    return Marked(body, is_anthropic, [*marks.values()]) if marks else None


def marks_of(body: Mapping[str, Any], *, is_anthropic: bool) -> Iterator[Mark]:
    """Yield the marks in a `body`, in the order of the prompt.

    Raises `ValueError`, in one line, for a value that is not understood.
    """
    for index, tool in enumerate(body.get("tools") or []):
        yield from _at(tool, f"tools[{index}].", Mark(SYSTEM, None))
    if is_anthropic:
        yield from _in_blocks(body.get("system"), "system", SYSTEM)
    for index, message in enumerate(body["messages"]):
        yield from _in_blocks(message.get("content"), f"messages[{index}].content", index)
        yield from _at(message, f"messages[{index}].", Mark(index, None))
    end = Mark(len(body["messages"]) - 1, None)
    yield from _at(body, "", end)
    if not is_anthropic and _is_long(body.get(RETENTION)):
        yield end._replace(retains=True)


def retaining(positions: Sequence[int]) -> dict[str, Any]:
    """The `kv_hints` that retain the states at `positions`, in tokens, for an hour."""
    actions = [
        {
            "action_id": f"{FIELD}-{position}",
            "action_type": "retain",
            "action_version": "1.0",
            "payload": {"seconds": MAX_RETAIN_S, "num_tokens": position},
        }
        for position in positions
    ]
    return {"protocol_version": "0.1", "message_id": FIELD, "actions": actions}


def system_of(request: Any) -> list[Any]:
    """The messages that a chat `request` begins with, up to the first of another role than the system's."""
    return list(takewhile(_is_system, request.messages))


def _in_blocks(blocks: object, where: str, message: int) -> Iterator[Mark]:
    parts = blocks if isinstance(blocks, list) else []
    for number, part in enumerate(parts, start=1):
        if isinstance(part, Mapping):
            mark = Mark(message, None if number == len(parts) else number)
            at = f"{where}[{number - 1}]."
            for inner in _in_blocks(part.get("content"), f"{at}content", message):
                yield mark._replace(retains=inner.retains)
            yield from _at(part, at, mark)


def _at(holder: Mapping[str, Any], where: str, mark: Mark) -> Iterator[Mark]:
    """Yield the `mark` if its `holder` is marked."""
    value = holder.get(FIELD)
    if value is None:
        return
    if not isinstance(value, Mapping) or value.get("type") != _TYPE:
        raise ValueError(f"{where}{FIELD} must be {json.dumps({'type': _TYPE})}, got {_shown(value)}")
    ttl = value.get("ttl")
    if ttl is not None and (not isinstance(ttl, str) or ttl not in _TTLS):
        raise ValueError(f"{where}{FIELD}.ttl must be {' or '.join(map(json.dumps, _TTLS))}, got {_shown(ttl)}")
    yield mark._replace(retains=ttl is not None and _TTLS[ttl])


def _is_long(value: object) -> bool:
    if value is not None and value not in _RETENTIONS:
        raise ValueError(f'{RETENTION} must be "in_memory" or "{_LONG}", got {_shown(value)}')
    return value == _LONG


def _shown(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)[:80]


def _is_system(message: Any) -> bool:
    return message.role in _SYSTEM_ROLES


def _chat(serving: Any, fields: Mapping[str, Any]) -> list[Any]:
    """The messages of the chat that SGLang makes of Anthropic's `fields`."""
    from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from sglang.srt.entrypoints.anthropic.serving import AnthropicServing

    request = AnthropicMessagesRequest.model_validate({"model": "any", "max_tokens": 1, **fields})
    messages: list[Any] = AnthropicServing(serving)._convert_to_chat_completion_request(request).messages
    return messages


def body_of(raw_request: Any) -> bytes:
    """The body of a request that has been read: nothing is waited for."""
    try:
        raw_request.body().send(None)
    except StopIteration as done:
        body: bytes = done.value
        return body
    raise AssertionError("a body that was parsed has not been read")
