"""Token ids of prompts and chats as their API's server has them: by a model's tokenizer and chat template, or by words.

    TemplateChats    the template renders messages and tools, as in the router; the answer is what it adds for the
                     assistant's message: reasoning, content, calls and the end of the turn
    PlainChats       "<role>", the content and the calls as lines, whatever the model; texts are cut by `tokens`

Contents in several parts are one text, joined by spaces, unless the template takes parts (as SGLang does it).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from marconi.chat.template import messages_of, tools_of
from marconi.replay.trace.base import BadRecord
from marconi.replay.trace.tokens import Tokenizer, is_file, loaded, tokenizer

if TYPE_CHECKING:
    from marconi.chat.tokenizer import TextTokenizer

Message = Mapping[str, Any]

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json")


class Chats(Protocol):
    """Tokenizes what an API is sent and what it answers; `BadRecord` for what cannot be rendered."""

    def text(self, text: str, *, is_prompt: bool) -> Sequence[int]:
        """Ids of a prompt without a template, or of its answer."""

    def chat(self, body: Mapping[str, Any], answer: Message | None) -> tuple[Sequence[int], Sequence[int]]:
        """Ids of a body's messages up to where the answer begins, and of the answer."""


def chats(path: Path | None, model_folder: Path | None) -> Chats | None:
    """The tokenizer of a folder, a hub name or a `tokenizer.json`, or else of `model_folder`, if that has one.

    None where there is none. `ValueError` for a tokenizer that cannot be loaded.
    """
    if path is not None:
        return PlainChats(tokenizer(path)) if is_file(path) else TemplateChats(loaded(path))
    if model_folder is not None and any((model_folder / name).is_file() for name in _FILES):
        return TemplateChats(loaded(model_folder))
    return None


class PlainChats:
    """Renders chats as lines; a message adds the same tokens in every chat."""

    def __init__(self, tokens: Tokenizer) -> None:
        self._tokens = tokens

    def text(self, text: str, *, is_prompt: bool) -> list[int]:
        """Ids of a text, a prompt or not."""
        return self._tokens(text)

    def chat(self, body: Mapping[str, Any], answer: Message | None) -> tuple[list[int], list[int]]:
        """Ids of all lines and of the assistant's head; of the answer's lines."""
        prompt = self._tokens(f"{_json(body['tools'])}\n") if body.get("tools") else []
        for message in body["messages"]:
            prompt += self._head(message["role"]) + self._lines(message)
        prompt += self._head("assistant")
        if answer is None:
            return prompt, []
        reasoning = answer.get("reasoning_content")
        return prompt, [*(self._tokens(f"{reasoning}\n") if reasoning else ()), *self._lines(answer)]

    def _head(self, role: str) -> list[int]:
        return self._tokens(f"<{role}>\n")

    def _lines(self, message: Message) -> list[int]:
        lines = [joined(message.get("content")), *map(_json, message.get("tool_calls") or ())]
        return self._tokens("\n".join(lines) + "\n")


class TemplateChats:
    """Renders chats by a model's template; all are bad records where there is none."""

    def __init__(self, tokenizer: "TextTokenizer") -> None:
        # Imported here, for it needs a package that replays of token ids do without.
        from marconi.chat.pieces import Pieces

        self._tokenizer = tokenizer
        self._template = tokenizer.template()
        self._pieces = Pieces(tokenizer, self._template or "")
        self._takes_parts = self._template is not None and self._renders_parts(self._template)

    def text(self, text: str, *, is_prompt: bool) -> Sequence[int]:
        """Ids of a prompt with the tokens that the tokenizer adds around it, or of an answer without them."""
        return self._tokenizer.encode(text, adds_special=is_prompt)

    def chat(self, body: Mapping[str, Any], answer: Message | None) -> tuple[Sequence[int], Sequence[int]]:
        """Ids of the rendered prompt, and of what the template adds for the answer."""
        if self._template is None:
            raise BadRecord("messages need a chat template, and the tokenizer has none")
        prompt = self._rendered(self._template, body, ())
        ids = self._pieces.encode(prompt)
        if answer is None:
            return ids, []
        whole = self._rendered(self._template, body, (answer,))
        if whole.startswith(prompt):
            said = whole[len(prompt) :].rstrip()
        else:  # The template renders a prompt's answer otherwise than the beginning of one.
            said = f"{answer.get('reasoning_content') or ''}{joined(answer.get('content'))}"
        return ids, self._pieces.encode(said)

    def _rendered(self, template: str, body: Mapping[str, Any], answer: Sequence[Message]) -> str:
        messages = [self._flat(message) for message in (*body["messages"], *answer)]
        try:
            return self._tokenizer.render(
                messages_of({"messages": messages}),
                tools_of(body),
                template,
                body.get("chat_template_kwargs") or {},
                is_answered=bool(answer),
            )
        except Exception as error:  # A template may raise anything.
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise BadRecord(f"messages cannot be rendered by the chat template ({reason[0]})") from None

    def _flat(self, message: Message) -> Message:
        content = message.get("content")
        is_flat = self._takes_parts or not isinstance(content, list)
        return message if is_flat else {**message, "content": joined(content)}

    def _renders_parts(self, template: str) -> bool:
        """Whether a text is rendered alike as a part."""
        chats: tuple[Any, ...] = ("text", [{"type": "text", "text": "text"}])
        try:
            one, other = (
                self._tokenizer.render([{"role": "user", "content": content}], None, template, {}) for content in chats
            )
        except Exception:  # A template may raise anything.
            return False
        return one == other


def joined(content: Any) -> str:
    """The text of a message's content."""
    return " ".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
