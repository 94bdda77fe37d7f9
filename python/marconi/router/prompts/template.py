"""A worker's chat template: which it is, what it is given of a message, and a chat's ids by it.

    --chat-template FILE.jinja
    the processor's chat_template.json        of a model that also sees or hears
    the tokenizer's own                       one, or several by name: the one asked for, else the first

Templates that SGLang has in Python (a name or a .json file for `--chat-template`) are not rendered here. A template
that loops over a message's content is given parts, another one a text; one that speaks of images, audio or video
anywhere is taken for the first kind, as SGLang does. Templates run in transformers' sandbox.

Sources: `srt/parser/template_manager.py`, `srt/parser/jinja_template_utils.py`,
`srt/entrypoints/openai/serving_chat.py:_apply_jinja_template`, `srt/utils/hf_transformers/mistral_utils.py`.
"""

import json
import re
from array import array
from pathlib import Path
from typing import Any, Final

import jinja2
from jinja2 import nodes

from marconi.router.prompts.base import Unknown
from marconi.router.prompts.chat import Chat
from marconi.router.prompts.tokenizer import TextTokenizer

_MEDIA: Final = ("image", "audio", "video", "vision")
_MESSAGES: Final = ("message", "msg", "m")
_TRAINING: Final = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Marks what a model is trained on; of no meaning here."""


class ChatTemplate:
    """One model's; one object for all threads."""

    def __init__(self, tokenizer: TextTokenizer, source: str) -> None:
        """Render `source` from now on; of mistral-common, which has none, its own rendering."""
        self._tokenizer = tokenizer
        self.source = source
        self.takes_parts = takes_parts(source)
        self._is_mistral_common = "MistralCommon" in type(tokenizer.hf).__name__
        if not self._is_mistral_common:
            tokenizer.hf.chat_template = source

    def ids(self, chat: Chat) -> "array[int]":
        """A chat's ids up to where the answer begins or goes on; `Unknown` where the template refuses the chat."""
        try:
            ids = self._ids(chat, chat.tools)
        except Exception:  # Whatever it was, a worker tries again with bare functions.
            try:
                ids = self._ids(chat, [tool["function"] for tool in chat.tools or ()] or None)
            except Exception as error:
                raise Unknown(f"a chat that its template refuses: {error}") from None
        if chat.beginning:
            ids.extend(self._tokenizer.encode_continuation(chat.beginning))
        return ids

    def _ids(self, chat: Chat, tools: list[dict[str, Any]] | None) -> "array[int]":
        apply = self._tokenizer.hf.apply_chat_template
        if self._is_mistral_common:
            spoken = [message for message in chat.messages if not _is_empty(message)]
            return array("q", apply(spoken, tools=tools, tokenize=True, return_dict=False, **chat.variables))
        text = apply(chat.messages, tools=tools, tokenize=False, add_generation_prompt=True, **chat.variables)
        return self._tokenizer.encode(text, adds_special=False)


def template_of(
    folder: Path, tokenizer: TextTokenizer, given: str | None = None, name: str | None = None
) -> ChatTemplate | None:
    """The template of a folder; None where there is none that is rendered here.

    `given` is what `--chat-template` names, `name` what `--hf-chat-template-name` names.
    """
    if given is not None:
        path = Path(given)
        if path.suffix != ".jinja":
            return None
        try:
            return ChatTemplate(tokenizer, path.read_text(encoding="utf-8").strip("\n").replace("\\n", "\n"))
        except OSError as error:
            raise ValueError(f"--chat-template {given}: cannot be read ({error.strerror})") from None
    if "MistralCommon" in type(tokenizer.hf).__name__:
        return ChatTemplate(tokenizer, "audio")
    found = _of_processor(folder) or tokenizer.hf.chat_template
    if isinstance(found, dict):
        if name is not None and name not in found:
            raise ValueError(f"{folder}: chat template must be one of {', '.join(sorted(found))}, got {name!r}")
        found = next(iter(found.values()), None) if name is None else found[name]
    return None if found is None else ChatTemplate(tokenizer, found)


def takes_parts(source: str) -> bool:
    """Whether a template is given a message's content in parts."""
    if any(word in source for word in _MEDIA):
        return True
    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_TRAINING.sub("", source))  # noqa: S701
    except jinja2.TemplateError:
        return False
    return any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node) -> bool:
    """Whether an expression is a message's content, whatever filters, tests and slices are put to it."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        if node.node is None:
            return False
        node = node.node
    if isinstance(node, nodes.Getattr):
        key: Any = node.attr
    elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        key = node.arg.value
    else:
        return False
    return key == "content" and isinstance(node.node, nodes.Name) and node.node.name in _MESSAGES


def _of_processor(folder: Path) -> Any:
    if not any((folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        return None
    try:
        return json.loads((folder / "chat_template.json").read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, LookupError):
        return None


def _is_empty(message: dict[str, Any]) -> bool:
    """Whether an assistant's turn says nothing: mistral-common takes none of these."""
    content = message["content"]
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return message["role"] == "assistant" and not message.get("tool_calls") and not "".join(texts).strip()
