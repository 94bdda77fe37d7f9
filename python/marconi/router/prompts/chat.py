"""`/v1/chat/completions`: which chats this router may render, and what a worker is asked for the others.

    CHATS       each message a role (system, user, assistant) and a text, the last one not the assistant's
    PARTS       a message's content in parts, all of them texts
    THINKING    `enable_thinking` or `thinking` in `chat_template_kwargs`, true or false
    none        tools, calls and their results, reasoning, an answer to continue, any other field: a worker is asked

What is rendered goes to the template as it came.
"""

from collections.abc import Mapping
from typing import Any, Final

from marconi.router.prompts import Kind, Unknowable

_QUESTION: Final = (
    *("messages", "tools", "tool_choice", "reasoning", "reasoning_effort", "chat_template_kwargs"),
    "continue_final_message",
)
"""The fields of a body that decide its ids."""
_MEDIA: Final = ("image_url", "video_url", "audio_url", "input_audio")
_ROLES: Final = ("system", "user", "assistant")
_SWITCHES: Final = frozenset({"enable_thinking", "thinking"})


def kinds_of(body: Mapping[str, Any]) -> frozenset[Kind] | None:
    """The kinds that a chat is of, all of which must be tokenized alike; None for one that only a worker renders."""
    rest = {name for name in _QUESTION if body.get(name) is not None} - {"messages", "chat_template_kwargs"}
    messages, variables = body["messages"], body.get("chat_template_kwargs") or {}
    if rest or not messages or messages[-1]["role"] == "assistant":
        return None
    if not (_SWITCHES.issuperset(variables) and all(isinstance(value, bool) for value in variables.values())):
        return None
    kinds = {Kind.CHATS, Kind.THINKING} if variables else {Kind.CHATS}
    for message in messages:
        if message.keys() != {"role", "content"} or message["role"] not in _ROLES:
            return None
        if isinstance(message["content"], list):
            kinds.add(Kind.PARTS)
        texts = _texts(message["content"])
        if not texts or not all(isinstance(text, str) and text for text in texts):
            return None
    return frozenset(kinds)


def _texts(content: Any) -> list[Any]:
    """A content's texts; None among them for a part that is no text."""
    if not isinstance(content, list):
        return [content]
    return [part["text"] if part.keys() == {"type", "text"} and part["type"] == "text" else None for part in content]


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
