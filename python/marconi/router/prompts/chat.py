"""`/v1/chat/completions`: a body as its chat template sees it.

    messages     each in the order of the worker's fields, absent ones left out; content in parts, or one text joined by
                 spaces; an assistant's `tool_calls[].function.arguments` as objects
    tools        those that `tool_choice` leaves, each with the keys in its client's order, then absent ones
    variables    `reasoning_effort` < `chat_template_kwargs`: the later one wins; both over the worker's own defaults;
                 `reasoning` and `reasoning_effort` set `thinking` and `enable_thinking` where nothing else does
    beginning    of an answer that is continued (`continue_final_message`); else an assistant's last message is shown as
                 one of the user

Only fields that decide the ids are read, and only as clients usually send them: a value that a worker would convert
first (a number as a text, `varchar` as a type) or refuse is left to it (`Unknown`).

Sources: `srt/entrypoints/openai/serving_chat.py:_convert_to_internal_request,_process_messages,_apply_jinja_template`,
`srt/entrypoints/openai/protocol.py:normalize_reasoning_inputs,Function,Tool`,
`srt/parser/jinja_template_utils.py:process_content_for_template_format`,
`srt/function_call/utils.py:normalize_json_schema_types`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from marconi.router.prompts import Unknowable, Unknown

_QUESTION: Final = (
    *("messages", "tools", "tool_choice", "reasoning", "reasoning_effort", "chat_template_kwargs"),
    "continue_final_message",
)
"""The fields of a body that decide its ids."""
_FIELDS: Final = ("tool_call_id", "name", "phase", "reasoning_content", "tool_calls", "tools", "prefix")
_BRING_TOOLS: Final = ("root", "system", "developer")
_MEDIA: Final = ("image_url", "video_url", "audio_url", "input_audio")
_EFFORTS: Final = frozenset({"none", "minimal", "low", "medium", "high", "xhigh", "ultra", "max"})
_YES: Final = frozenset({"1", "true", "yes", "y", "on"})
_TYPES: Final = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})


@dataclass(frozen=True, slots=True)
class Chat:
    """A template's inputs, and the text that follows the rendered chat."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]
    beginning: str | None


def chat_of(body: Mapping[str, Any], source: str, takes_parts: bool, defaults: Mapping[str, Any]) -> Chat:
    """Read a body's chat for the template `source`; `Unknown`, or any error of reading where it is no chat."""
    effort, variables = _variables(body)
    if "chat_template" in variables:
        raise Unknown("a template of the request's own")
    variables = {**defaults, **variables}
    if effort is None:
        effort = variables.get("reasoning_effort")
    if effort is not None:
        variables.setdefault("reasoning_effort", effort)
    if effort == "low" and "low_effort" in source:
        raise Unknown("an effort that some templates have by another name")
    messages, beginning = [_message(each, takes_parts) for each in body["messages"]], None
    if messages[-1]["role"] == "assistant" and isinstance(messages[-1]["content"], str):
        beginning = messages.pop()["content"]
        if not _flag(body.get("continue_final_message")):
            messages.append({"role": "user", "content": beginning})
            beginning = None
    return Chat(messages, _chosen(body, messages), variables, beginning)


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


def _message(value: Mapping[str, Any], takes_parts: bool) -> dict[str, Any]:
    role, content = value["role"].lower(), value.get("content")
    message = {"role": role, "content": "" if content is None else content}
    for name in _FIELDS if role != "user" else ():
        if (given := value.get(name)) is not None:
            message[name] = given
    if "tool_calls" in message:
        message["tool_calls"] = [_call(call, role == "assistant") for call in message["tool_calls"]]
    if "tools" in message:
        message["tools"] = _tools(message["tools"])
    if "prefix" in message:
        _flag(message["prefix"])
    if isinstance(content, list):
        parts = list(_parts(content))
        if takes_parts:
            del message["content"]
        is_text = all(part["type"] == "text" for part in parts)
        if not takes_parts or (role == "tool" and is_text):
            message["content"] = " ".join(part["text"] for part in parts if part["type"] == "text")
        else:
            message["content"] = parts
    return message


def _parts(content: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    for part in content:
        match part["type"]:
            case "text":
                yield {"type": "text", "text": part["text"]}
            case "tool_reference":
                yield {"type": "tool_reference", "name": part["name"]}
            case "thinking" | "reasoning":
                pass
            case _:
                raise Unknown("a part of another type")


def _call(value: Mapping[str, Any], is_parsed: bool) -> dict[str, Any]:
    index, function = value.get("index"), value["function"]
    if index is not None and type(index) is not int:
        raise Unknown("a tool call's index that is no whole number")
    arguments = function.get("arguments")
    if is_parsed and isinstance(arguments, str):
        arguments = json.loads(arguments, parse_int=_integer)
        if not isinstance(arguments, dict):
            raise Unknown("a tool call's arguments that are no object")
    return {
        "id": value.get("id"),
        "index": index,
        "type": "function",
        "function": {"name": function.get("name"), "arguments": arguments},
    }


def _integer(digits: str) -> int | float:
    """A whole number as a worker's parser reads it: a float above 64 bits."""
    number = int(digits)
    return number if -(1 << 63) <= number < 1 << 64 else float(digits)


# Tools


def _chosen(body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]] | None:
    own = body.get("tools")
    is_brought = any(message["role"] in _BRING_TOOLS and message.get("tools") for message in messages)
    choice = body.get("tool_choice")
    if choice is None:
        choice = "auto" if own is not None or is_brought else "none"
    tools = _tools(own or ())
    if isinstance(choice, Mapping):
        tools = [tool for tool in tools if tool["function"]["name"] == choice["function"]["name"]]
    return tools or None if choice != "none" else None


def _tools(values: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [_tool(value) for value in values]


def _tool(value: Mapping[str, Any]) -> dict[str, Any]:
    given, is_deferred = value["function"], _flag(value.get("defer_loading"))
    known = {name: given.get(name) for name in ("description", "name", "parameters")}
    of_function = _flag(given.get("defer_loading"))
    flags = {"strict": _flag(given.get("strict")), "defer_loading": is_deferred if of_function is None else of_function}
    known |= {name: flag for name, flag in flags.items() if flag is not None}
    _require_standard(known["parameters"])
    order = dict.fromkeys((*(name for name in given if name in known), *known))
    function = {name: known[name] for name in order}
    return {"type": value.get("type", "function"), "function": function, "defer_loading": is_deferred}


def _require_standard(schema: Any) -> None:
    """Raise `Unknown` for a schema that a worker may rewrite: one with types that JSON Schema does not have."""
    if isinstance(schema, dict):
        kinds = schema.get("type", [])
        listed = kinds if isinstance(kinds, list) else [kinds] if isinstance(kinds, str) else []
        texts = [kind for kind in listed if isinstance(kind, str)]
        if not _TYPES.issuperset(texts) or len(texts) != len(set(texts)):
            raise Unknown("a schema with a type of another kind")
    for nested in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        _require_standard(nested)


# Variables


def _variables(body: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The effort, and the template's variables with those that reasoning sets."""
    effort, is_thinking = body.get("reasoning_effort"), None
    reasoning = body.get("reasoning")
    if isinstance(reasoning, Mapping):
        own = reasoning.get("effort")
        own = reasoning.get("reasoning_effort") if own is None else own
        effort = effort if own is None else own
        is_enabled = reasoning.get("enabled")
        is_enabled = reasoning.get("enable") if is_enabled is None else is_enabled
        if isinstance(is_enabled, str):
            is_enabled = is_enabled.strip().lower() in _YES
        is_thinking = True if is_enabled else None
    if effort is not None:
        is_thinking = effort != "none"
        if isinstance(effort, str) and effort not in _EFFORTS:
            raise Unknown("an effort by another name")
        if not isinstance(effort, str):
            effort = float(effort)
    given = body.get("chat_template_kwargs")
    variables = {} if is_thinking is None else {"thinking": is_thinking, "enable_thinking": is_thinking}
    if given is not None and (is_thinking is None or isinstance(given, dict)):
        variables |= given
    own = variables.pop("reasoning_effort", None)
    return effort if own is None else own, variables


def _flag(value: Any) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise Unknown("a truth value that is none of JSON's")
