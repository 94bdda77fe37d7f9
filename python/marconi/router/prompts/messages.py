"""A chat's messages, as a chat template sees them.

    body's message --validated, in the order of the worker's fields, nulls left out-->
                   --assistant: `tool_calls[].function.arguments` from JSON text to objects-->
                   --content parts: as a list of texts, or one text joined by spaces, as the template reads them-->

Images, video and audio are `Unknowable`. The reasoning parts of an assistant's content are dropped, as the worker does.

Sources: `srt/entrypoints/openai/protocol.py:ChatCompletionMessageGenericParam` and its neighbours,
`srt/entrypoints/openai/serving_chat.py:_apply_jinja_template`,
`srt/parser/jinja_template_utils.py:process_content_for_template_format`.
"""

from typing import Any, Final, NamedTuple

import msgspec

from marconi.router.prompts.base import Unknowable, Unreadable
from marconi.router.prompts.fields import optional_flag, optional_list, optional_text, shown
from marconi.router.prompts.tools import tools_of

_ROLES: Final = frozenset({"system", "assistant", "tool", "function", "developer", "latest_reminder", "root"})
_MAY_BRING_TOOLS: Final = frozenset({"root", "system", "developer"})
_MEDIA: Final = frozenset({"image_url", "video_url", "audio_url", "input_audio"})
_MIN_INTEGER, _MAX_INTEGER = -(1 << 63), (1 << 64) - 1


class Messages(NamedTuple):
    """What a template is given, and what the messages bring beside their text."""

    shown: list[dict[str, Any]]
    tools: list[dict[str, Any]]


def messages_of(value: Any, takes_parts: bool) -> Messages:
    """The messages of a body; `takes_parts` where the template iterates over a message's content."""
    if not isinstance(value, list) or not value:
        raise Unreadable(f"messages: {shown(value)}; a list of at least one message is right")
    found = [_message(each, takes_parts) for each in value]
    tools = [tool for each in found if each["role"] in _MAY_BRING_TOOLS for tool in each.get("tools") or ()]
    return Messages(found, tools)


def _message(value: Any, takes_parts: bool) -> dict[str, Any]:
    role = value.get("role") if isinstance(value, dict) else None
    if role == "user":
        content = value.get("content")
        if not isinstance(content, str | list):
            raise Unreadable(f"messages: content {shown(content)} of a user; a text or a list of parts is right")
        message = {"role": role}
    else:
        if not isinstance(role, str) or role.lower() not in _ROLES:
            raise Unreadable(f"messages: role {shown(role)}; system, user, assistant or tool is right")
        role = role.lower()
        content = value.get("content")
        message = {"role": role, "content": content}
        for name in ("tool_call_id", "name", "phase", "reasoning_content"):
            message[name] = optional_text(value, name, "messages: ")
        if message["phase"] not in (None, "commentary", "final_answer"):
            raise Unreadable(f"messages: phase {shown(message['phase'])}; commentary or final_answer is right")
        calls = optional_list(value, "tool_calls", "messages: ")
        message["tool_calls"] = None if calls is None else [_call(call, role) for call in calls]
        tools = optional_list(value, "tools", "messages: ")
        message["tools"] = None if tools is None else tools_of(tools)
        message["prefix"] = optional_flag(value, "prefix")
        message = {name: given for name, given in message.items() if given is not None or name == "content"}
    if content is None:
        content = ""
    if isinstance(content, list):
        content = _content(content, role, takes_parts)
        if takes_parts:
            # A worker puts the parts back after the other fields.
            message.pop("content", None)
    elif not isinstance(content, str):
        raise Unreadable(f"messages: content {shown(content)}; a text or a list of parts is right")
    message["content"] = content
    return message


def _content(parts: list[Any], role: str, takes_parts: bool) -> str | list[dict[str, Any]]:
    kept = [part for part in (_part(each, role) for each in parts) if part is not None]
    is_text = all(part["type"] == "text" for part in kept)
    if not takes_parts or (role == "tool" and is_text):
        return " ".join(part["text"] for part in kept if part["type"] == "text")
    return kept


def _part(value: Any, role: str) -> dict[str, Any] | None:
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text" and isinstance(value.get("text"), str):
        return {"type": "text", "text": value["text"]}
    if kind == "tool_reference" and isinstance(value.get("name"), str):
        return {"type": "tool_reference", "name": value["name"]}
    if kind in ("thinking", "reasoning"):
        given = [optional_text(value, name, "messages: ") for name in ("thinking", "text")]
        if role != "assistant" or (given[0] is None) == (given[1] is None):
            raise Unreadable(f"messages: {kind} in the content of {role}; of an assistant, with one text, is right")
        return None
    if isinstance(kind, str) and kind in _MEDIA:
        raise Unknowable(f"a part of type {kind}")
    raise Unreadable(f"messages: part {shown(value)}; a text is right")


def _call(value: Any, role: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, dict) else None
    if not isinstance(function, dict) or value.get("type", "function") != "function":
        raise Unreadable(f"messages: tool call {shown(value)} has no function")
    index = value.get("index")
    if index is not None and type(index) is not int:
        raise Unknowable(f"the index {shown(index)} of a tool call")
    arguments = function.get("arguments")
    if isinstance(arguments, str) and role == "assistant":
        arguments = _arguments(arguments)
    elif not isinstance(arguments, str | dict | None):
        raise Unreadable(f"messages: arguments {shown(arguments)} of a tool call; an object as JSON text is right")
    name = optional_text(function, "name", "messages: function ")
    identity = optional_text(value, "id", "messages: tool call ")
    return {"id": identity, "index": index, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(text: str) -> dict[str, Any]:
    try:
        parsed = msgspec.json.decode(text)
    except RecursionError:
        raise Unknowable("arguments of a tool call, nested deeply") from None
    except (ValueError, UnicodeError):
        parsed = None
    if not isinstance(parsed, dict):
        raise Unreadable(f"messages: arguments {shown(text)} of a tool call; an object as JSON text is right")
    _require_integers(parsed)
    return parsed


def _require_integers(value: Any) -> None:
    # A worker's parser makes floats of what is beyond 64 bits.
    if isinstance(value, int) and not _MIN_INTEGER <= value <= _MAX_INTEGER:
        raise Unknowable("an integer beyond 64 bits in arguments of a tool call")
    if isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            _require_integers(item)
