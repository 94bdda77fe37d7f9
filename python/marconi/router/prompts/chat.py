"""`/v1/chat/completions`: which chats this router may render, and what a worker is asked for the others.

    CHATS       each message a role (system, user, assistant) and a text, the last one not the assistant's
    PARTS       a message's content in parts, all of them texts
    THINKING    `enable_thinking` or `thinking` in `chat_template_kwargs`, true or false
    TOOLS       `tools`, each a function's name, description and parameters, not strict; `tool_choice` "auto" or absent
    CALLS       an assistant's `tool_calls`, each with an id, a name and arguments in JSON; their results, each a text
    none        reasoning, an answer to continue, any other field or value: a worker is asked

Messages reach the template unchanged, but for calls and tools: a template takes a call's arguments as an object, and
SGLang gives both all their fields, those that are absent as null.
"""

from collections.abc import Mapping
from typing import Any, Final

from marconi.router.prompts import PromptKind, Unknowable

_QUESTION: Final = (
    *("messages", "tools", "tool_choice", "reasoning", "reasoning_effort", "chat_template_kwargs"),
    "continue_final_message",
)
"""The fields of a body that decide its ids."""
_MEDIA: Final = ("image_url", "video_url", "audio_url", "input_audio")
_ROLES: Final = ("system", "user", "assistant")
_SWITCHES: Final = frozenset({"enable_thinking", "thinking"})
_TYPES: Final = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})
"""JSON Schema's; a worker rewrites some others (`varchar`)."""


def kinds_of(body: Mapping[str, Any]) -> frozenset[PromptKind] | None:
    """The kinds that a chat is of, all of which must be tokenized alike; None for one that only a worker renders."""
    given = {name: body[name] for name in _QUESTION if body.get(name) is not None}
    messages, variables = given.pop("messages"), given.pop("chat_template_kwargs", None) or {}
    kinds = {PromptKind.CHATS, PromptKind.THINKING} if variables else {PromptKind.CHATS}
    if "tools" in given:
        tools = given.pop("tools")
        if not tools or not all(map(_is_usual_tool, tools)) or given.pop("tool_choice", "auto") != "auto":
            return None
        kinds.add(PromptKind.TOOLS)
    if given or not messages or messages[-1]["role"] == "assistant":
        return None
    if not (_SWITCHES.issuperset(variables) and all(isinstance(value, bool) for value in variables.values())):
        return None
    for message in messages:
        kind = _kind_of_message(message)
        if kind is None:
            return None
        kinds.add(kind)
    return frozenset(kinds)


def question_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The question for a body's ids; `Unknowable` where a worker would answer with those of another prompt.

    A worker reads the tools of a question twice, and puts fields that were null or inherited behind the others.
    """
    tools = [*(body.get("tools") or ())]
    for message in body["messages"]:
        tools += message.get("tools") or ()
        content = message.get("content")
        if isinstance(content, list) and any(part["type"] in _MEDIA for part in content):
            raise Unknowable("an image, audio or video")
    if any(tool.get("defer_loading") is not None or None in tool["function"].values() for tool in tools):
        raise Unknowable("a tool whose fields would change places")
    return {name: body[name] for name in _QUESTION if name in body}


# Messages


def _kind_of_message(message: Mapping[str, Any]) -> PromptKind | None:
    """The kind that a message makes its chat; None for one that only a worker renders."""
    role, content = message["role"], message.get("content")
    names = {name for name, value in message.items() if value is not None}
    if role == "tool":
        is_usual = {"role", "content", "tool_call_id"} <= names <= {"role", "content", "tool_call_id", "name"}
        return PromptKind.CALLS if is_usual and all(isinstance(message[name], str) for name in names) else None
    if role == "assistant" and "tool_calls" in names:
        is_usual = names <= {"role", "content", "tool_calls"} and (content is None or isinstance(content, str))
        calls = message["tool_calls"]
        return PromptKind.CALLS if is_usual and calls and all(map(_is_usual_call, calls)) else None
    if names != {"role", "content"} or role not in _ROLES:
        return None
    texts = _texts(content)
    if not texts or not all(isinstance(text, str) and text for text in texts):
        return None
    return PromptKind.PARTS if isinstance(content, list) else PromptKind.CHATS


def _texts(content: Any) -> list[Any]:
    """A content's texts; None among them for a part that is no text."""
    if not isinstance(content, list):
        return [content]
    return [part["text"] if part.keys() == {"type", "text"} and part["type"] == "text" else None for part in content]


# Calls and tools


def _is_usual_call(call: Mapping[str, Any]) -> bool:
    function = call["function"]
    return (
        {"id", "type", "function"} <= call.keys() <= {"id", "index", "type", "function"}
        and (isinstance(call["id"], str) and call["type"] == "function")
        and (call.get("index") is None or type(call["index"]) is int)
        and function.keys() == {"name", "arguments"}
        and all(isinstance(value, str) for value in function.values())
    )


def _is_usual_tool(tool: Mapping[str, Any]) -> bool:
    function = tool["function"]
    return (
        tool.keys() == {"type", "function"}
        and tool["type"] == "function"
        and function.keys() - {"strict"} == {"name", "description", "parameters"}
        and function.get("strict", False) is False
        and (isinstance(function["name"], str) and isinstance(function["description"], str))
        and (isinstance(function["parameters"], dict) and _is_standard(function["parameters"]))
    )


def _is_standard(schema: Any) -> bool:
    """Whether all types in a JSON Schema are JSON Schema's, each named once."""
    if not isinstance(schema, dict):
        return not isinstance(schema, list) or all(map(_is_standard, schema))
    named = schema.get("type", [])
    types = named if isinstance(named, list) else [named] if isinstance(named, str) else []
    is_standard = _TYPES.issuperset(types) and len(types) == len(set(types))
    return is_standard and all(map(_is_standard, schema.values()))
