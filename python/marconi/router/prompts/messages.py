"""`/v1/messages`: the chat that a worker makes of a body of Anthropic's, as far as that hangs on the body alone.

    system       texts, joined by a new line each, become the first message
    messages     a text, or blocks: texts, calls (`tool_use`) and their results (`tool_result`), these as messages
    tools        functions; those that Anthropic runs itself are left to the worker
    none         images, searches, thinking, an effort, a choice of tools, messages of the system in the middle: the
                 model and its flags decide what becomes of them

Marks (`cache_control`) change no prompt. A worker drops the fields of a name space on this route, so there is none.
Source: `srt/entrypoints/anthropic/serving.py:_convert_to_chat_completion_request`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from marconi.router.prompts import Unknowable

_DECIDED_BY_WORKERS: Final = ("thinking", "output_config")
_TOOL: Final = {"type", "name", "description", "input_schema", "cache_control"}


def chat_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body for `/v1/chat/completions`; `Unknowable` for one whose chat is not known here."""
    if any(body.get(name) is not None for name in _DECIDED_BY_WORKERS):
        raise Unknowable("a chat whose thinking a worker decides")
    if (body.get("tool_choice") or {"type": "auto"})["type"] != "auto":
        raise Unknowable("a choice of tools")
    system = _system(body.get("system") or "")
    messages = [{"role": "system", "content": system}] if system else []
    for message in body["messages"]:
        messages += _messages(message)
    chat = {"model": body.get("model"), "messages": messages}
    return chat | ({"tools": [_tool(tool) for tool in body["tools"]]} if body.get("tools") else {})


def _system(system: Any) -> str:
    if isinstance(system, str):
        return system if system.strip() else ""
    return "\n".join(_text(block) for block in system if _text(block))


def _messages(message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The messages of a chat that one becomes: results of calls are messages of their own."""
    role, content = message["role"], message["content"]
    if role not in ("user", "assistant"):
        raise Unknowable("a message of the system in the middle")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    texts, calls = list[str](), list[dict[str, Any]]()
    for block in content:
        if block["type"] == "tool_use" and role == "assistant" and isinstance(block.get("id"), str):
            arguments = json.dumps(block.get("input") or {})
            function = {"name": block["name"], "arguments": arguments}
            calls.append({"id": block["id"], "type": "function", "function": function})
        elif block["type"] == "tool_result" and role == "user":
            if texts:
                yield {"role": role, "content": _content(texts)}
                texts = []
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _result(block.get("content"))}
        else:
            texts.append(_text(block))
    made = {"role": role, **({"tool_calls": calls} if calls else {})}
    if texts:
        yield made | {"content": _content(texts)}
    elif calls:
        yield made
    elif role == "assistant":
        yield made | {"content": ""}


def _result(content: Any) -> Any:
    """The result of a call, a text or texts; those that are empty count as none."""
    if isinstance(content, str) or content is None:
        return content or ""
    texts = [text for block in content if (text := _text(block))]
    return _content(texts) if texts else ""


def _content(texts: Sequence[str]) -> str | list[dict[str, str]]:
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _text(block: Mapping[str, Any]) -> str:
    if block["type"] != "text" or not isinstance(block["text"], str):
        raise Unknowable("a block that is no text")
    return block["text"]


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if not tool.keys() <= _TOOL or tool.get("type") not in (None, "custom"):
        raise Unknowable("a tool that is no function of the client's")
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": tool["input_schema"]}
    # On OpenAI's route it is null, and not rendered.
    return {"type": "function", "function": {**function, "strict": False}}
