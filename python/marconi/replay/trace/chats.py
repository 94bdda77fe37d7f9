"""Token ids of prompts and chats as their API's server has them: by a model's tokenizer and chat template, or by words.

    TemplateChats    the template renders messages and tools, as in the router; the answer is what it adds for the
                     assistant's message: reasoning, content, calls and the end of the turn
    PlainChats       "<role>", the content and the calls as lines, whatever the model; texts are cut by `tokens`

Contents in several parts are one text, joined by spaces, unless the template takes parts (as SGLang does it). An image,
or another thing that is no text, is a mark in it, which stands for `MediaIds.num_tokens` tokens that no text has.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from marconi.chat.template import messages_of, tools_of
from marconi.replay.trace.base import BadRecord
from marconi.replay.trace.identity import DenseIds
from marconi.replay.trace.tokens import Tokenizer, is_file, loaded, tokenizer

if TYPE_CHECKING:
    from marconi.chat.tokenizer import TextTokenizer

Message = Mapping[str, Any]

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "tekken.json")


MEDIA_TOKENS = 256
"""Tokens of an image where the model's configuration does not say how many."""
_FIRST_MEDIA_ID = 2**31
_MARK = re.compile("\ue000([0-9a-f]{32})\ue001")


def mark(digest: str) -> str:
    """The mark of what is no text and has this digest, of 32 hexadecimal digits."""
    return f"\ue000{digest}\ue001"


def has_mark(text: str) -> bool:
    """True if something in it is no text."""
    return _MARK.search(text) is not None


class MediaIds:
    """Encodes texts with marks; equal digests have equal ids."""

    def __init__(self, model_folder: Path | None) -> None:
        known = None if model_folder is None else _media_tokens(model_folder / "config.json")
        self.is_known = known is not None
        """True if the model's configuration says how many tokens an image has."""
        self.num_tokens = MEDIA_TOKENS if known is None else known
        self._numbers = DenseIds()

    def encode(self, text: str, encode: Callable[[str], Sequence[int]]) -> Sequence[int]:
        """Ids of a text, of which `encode` takes what is between the marks."""
        pieces = _MARK.split(text)
        if len(pieces) == 1:
            return encode(text)
        found: list[int] = []
        for index, piece in enumerate(pieces):
            if index % 2:
                found += [_FIRST_MEDIA_ID + self._numbers[piece]] * self.num_tokens
            elif piece:
                found += encode(piece)
        return found


def _media_tokens(config: Path) -> int | None:
    """Tokens of an image, for a model that gives all images the same number; None where its configuration has none."""
    try:
        said = msgspec.json.decode(config.read_bytes())
        for name in ("mm_tokens_per_image", "image_seq_length", "num_image_token"):
            if isinstance(said.get(name), int) and said[name] > 0:
                return int(said[name])
        vision = said.get("vision_config") or {}
        side = vision["image_size"] // (vision["patch_size"] * vision.get("spatial_merge_size", 1))
        return side * side or None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def chats(path: Path | None, model_folder: Path | None, media: MediaIds) -> "Chats":
    """By the tokenizer of a folder, a hub name or a `tokenizer.json`, or else of `model_folder`; without, by estimate.

    `ValueError` for a tokenizer that cannot be loaded, and for a model's folder without one.
    """
    if path is None and model_folder is None:
        return PlainChats(tokenizer(None), media)
    if path is not None and is_file(path):
        return PlainChats(tokenizer(path), media)
    if path is None and model_folder is not None and not has_tokenizer(model_folder):
        raise ValueError(
            f"--model must be a folder with a tokenizer ({', '.join(_FILES)}), got {model_folder} without one: "
            "--tokenizer names another; its config.json, or a model's name, estimates tokens from bytes"
        )
    return TemplateChats(loaded(path or model_folder or Path()), media)


def has_tokenizer(folder: Path) -> bool:
    """True if a model's folder has a tokenizer."""
    return any((folder / name).is_file() for name in _FILES)


class PlainChats:
    """Renders chats as lines; a message adds the same tokens in every chat."""

    def __init__(self, tokens: Tokenizer, media: MediaIds) -> None:
        self._cut = tokens
        self._media = media

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

    def _tokens(self, text: str) -> list[int]:
        return list(self._media.encode(text, self._cut))

    def _head(self, role: str) -> list[int]:
        return self._tokens(f"<{role}>\n")

    def _lines(self, message: Message) -> list[int]:
        lines = [joined(message.get("content")), *map(_json, message.get("tool_calls") or ())]
        return self._tokens("\n".join(lines) + "\n")


class TemplateChats:
    """Renders chats by a model's template; all are bad records where there is none."""

    def __init__(self, tokenizer: "TextTokenizer", media: MediaIds) -> None:
        # Imported here, for it needs a package that replays of token ids do without.
        from marconi.chat.pieces import Pieces

        self._tokenizer = tokenizer
        self._media = media
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
        ids = self._media.encode(prompt, self._pieces.encode)
        if answer is None:
            return ids, []
        whole = self._rendered(self._template, body, (answer,))
        # A template may render a prompt's answer otherwise than the beginning of one.
        is_whole = whole.startswith(prompt)
        said = whole[len(prompt) :].rstrip() if is_whole else joined(answer.get("content"))
        thinking = answer.get("reasoning_content") or ""
        if thinking.strip() not in said:  # It was generated, though no prompt of the template repeats it.
            said = f"{thinking}{said}"
        return ids, self._media.encode(said, self._pieces.encode)

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


Chats: TypeAlias = PlainChats | TemplateChats
"""Tokenizes what an API is sent (`chat`, or `text` without a template) and its answer; what fails is a `BadRecord`."""


def joined(content: Any) -> str:
    """The text of a message's content."""
    return " ".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()
