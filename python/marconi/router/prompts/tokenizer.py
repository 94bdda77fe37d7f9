"""A worker's tokenizer and chat template: those that transformers loads, changed as SGLang changes them; no torch.

The tokenizer, by what the folder has:

    tekken.json without a tokenizer.json             mistral-common
    any other folder                                 AutoTokenizer
    where that is the generic class                  the class that tokenizer_config.json names
    a class that replaced the file's pre-tokenizer   the file's, where it is of another kind
    Llama, Gemma, Cohere                             `add_bos_token` as the configuration has it

The chat template, the first of

    --chat-template FILE.jinja
    the processor's chat_template.json        of a model that also takes images or sound
    the tokenizer's own                       one, or several by name: `--hf-chat-template-name`, else the first

Code that a folder brings is not run; templates run in transformers' sandbox. Templates that SGLang has in Python (a
name or a .json file for `--chat-template`) are not rendered here. A template that loops over a message's content is
given parts, another one a text; one that names images, audio or video anywhere is given parts, as SGLang does. Nothing
is truncated or padded. Other threads run while a long text is encoded.

Sources: `srt/utils/hf_transformers/tokenizer.py:get_tokenizer`, `srt/utils/hf_transformers/mistral_utils.py`,
`srt/parser/template_manager.py`, `srt/parser/jinja_template_utils.py`,
`srt/entrypoints/openai/serving_chat.py:_apply_jinja_template`.
"""

import contextlib
import json
import os
import re
import sys
from array import array
from pathlib import Path
from typing import Any, Final, Self

import jinja2
from jinja2 import nodes
from tokenizers import Tokenizer

from marconi.router.prompts import Unknowable, Unknown
from marconi.router.prompts.chat import Chat

_ABSTRACT: Final = ("PreTrainedTokenizer", "PreTrainedTokenizerBase")
_MAY_BEGIN: Final = (
    *("LlamaTokenizer", "LlamaTokenizerFast", "CodeLlamaTokenizer", "CodeLlamaTokenizerFast"),
    *("GemmaTokenizer", "GemmaTokenizerFast", "CohereTokenizerFast"),
)
"""Classes whose configuration has `add_bos_token`."""
_MEDIA: Final = ("image", "audio", "video", "vision")
_MESSAGE_NAMES: Final = ("message", "msg", "m")
_TRAINING: Final = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")
"""Tags around the text that a model is trained on, which Jinja does not know."""


def leave_out_torch() -> None:
    """Keep torch out of this process: transformers would load it (0.8 GB), and a tokenizer needs none of it.

    It looks for torch when it is imported, so the functions here import it after this.
    """
    sys.modules.setdefault("torch", None)  # type: ignore[arg-type]
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")


class TextTokenizer:
    """The tokenizer of one model; one object for all threads."""

    def __init__(self, tokenizer: Any) -> None:
        from transformers import PreTrainedTokenizerFast

        self.hf = tokenizer
        self._pipeline = None
        if isinstance(tokenizer, PreTrainedTokenizerFast):
            pipeline = self._pipeline = tokenizer.backend_tokenizer
            pipeline.no_truncation()
            pipeline.no_padding()
            pipeline.encode_special_tokens = bool(tokenizer.split_special_tokens)
        self.adds_special = len(self.encode("")) > 0
        """Whether it adds tokens around a text."""

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Load the tokenizer of a folder as a worker does; `ValueError`, one line, where that fails here."""
        if not folder.is_dir():
            raise ValueError(f"{folder}: must be a model's folder")
        try:
            return cls(_changed(_loaded(folder), folder))
        except Exception as error:  # A folder's files, and the code for them, may raise anything.
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise ValueError(f"{folder}: its tokenizer cannot be loaded here ({reason[0]})") from None

    @property
    def added_texts(self) -> list[str]:
        """Texts that are one token wherever they stand."""
        return sorted(getattr(self.hf, "get_added_vocab", dict)())

    def encode(self, text: str, *, adds_special: bool = True) -> "array[int]":
        """Encode a text, with the tokens that the tokenizer adds around it or, for a rendered chat, without."""
        try:
            if self._pipeline is None:
                return array("q", self.hf.encode(text, add_special_tokens=adds_special))
            # Unlike `encode`, it lets other threads run, and changes no state that they share.
            (encoding,) = self._pipeline.encode_batch_fast([text], add_special_tokens=adds_special)
            return array("q", encoding.ids)
        except (UnicodeError, TypeError):
            raise Unknowable("a text with half of a surrogate pair") from None

    def encode_continuation(self, text: str) -> "array[int]":
        """Encode an answer's beginning, which follows a chat."""
        ids = self.encode(text)
        if ids and ids[0] == self.hf.bos_token_id:
            del ids[0]
        return ids


def _loaded(folder: Path) -> Any:
    import transformers

    if (folder / "tekken.json").is_file() and not (folder / "tokenizer.json").is_file():
        from transformers.tokenization_mistral_common import MistralCommonTokenizer

        return MistralCommonTokenizer.from_pretrained(str(folder))
    options = {"trust_remote_code": False, "clean_up_tokenization_spaces": False}
    found = transformers.AutoTokenizer.from_pretrained(str(folder), **options)
    name = _configuration(folder).get("tokenizer_class")
    if type(found).__name__ == "TokenizersBackend" and name not in (None, "", *_ABSTRACT):
        declared = getattr(transformers, name, None)
        # Where that fails, a worker keeps the generic class, too.
        with contextlib.suppress(OSError, ValueError, TypeError, ImportError):
            found = found if declared is None else declared.from_pretrained(str(folder), **options)
    return found


def _changed(tokenizer: Any, folder: Path) -> Any:
    """The tokenizer with SGLang's changes."""
    pipeline = getattr(tokenizer, "_tokenizer", None)
    if pipeline is not None and (folder / "tokenizer.json").is_file():
        own = Tokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer
        if own and pipeline.pre_tokenizer and type(own) is not type(pipeline.pre_tokenizer):
            pipeline.pre_tokenizer = own
    configuration = _configuration(folder)
    if configuration.get("tokenizer_class") in _MAY_BEGIN:
        begins = configuration.get("add_bos_token")
        wanted = {"add_bos_token": True if begins is None else begins, "add_eos_token": False}
        unlike = {name: value for name, value in wanted.items() if getattr(tokenizer, name, None) != value}
        for name, value in unlike.items():
            setattr(tokenizer, f"_{name}", value)
        if unlike and hasattr(tokenizer, "update_post_processor"):
            tokenizer.update_post_processor()
    return tokenizer


def _configuration(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


class ChatTemplate:
    """The chat template of one model; one object for all threads."""

    def __init__(self, tokenizer: TextTokenizer, source: str) -> None:
        """Render `source`; mistral-common, which has no template, renders by itself."""
        self._tokenizer = tokenizer
        self.source = source
        self.takes_parts = takes_parts(source)
        self._is_mistral_common = "MistralCommon" in type(tokenizer.hf).__name__
        if not self._is_mistral_common:
            tokenizer.hf.chat_template = source

    def ids(self, chat: Chat) -> "array[int]":
        """Encode a chat up to where the answer begins or goes on; `Unknown` where the template refuses the chat."""
        try:
            ids = self._ids(chat, chat.tools)
        except Exception:  # A worker tries again with bare functions, whatever the error.
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
            messages = [message for message in chat.messages if not _is_empty(message)]
            return array("q", apply(messages, tools=tools, tokenize=True, return_dict=False, **chat.variables))
        text = apply(chat.messages, tools=tools, tokenize=False, add_generation_prompt=True, **chat.variables)
        return self._tokenizer.encode(text, adds_special=False)


def template_of(
    folder: Path, tokenizer: TextTokenizer, given: str | None = None, name: str | None = None
) -> ChatTemplate | None:
    """The template of a folder, None where there is none that is rendered here.

    `given` is the workers' `--chat-template`, `name` their `--hf-chat-template-name`.
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
    found = _processor_template(folder) or tokenizer.hf.chat_template
    if isinstance(found, dict):
        if name is not None and name not in found:
            raise ValueError(f"--hf-chat-template-name must be one of {', '.join(sorted(found))}, got {name!r}")
        found = next(iter(found.values()), None) if name is None else found[name]
    return None if found is None else ChatTemplate(tokenizer, found)


def takes_parts(source: str) -> bool:
    """True if a template is given a message's content in parts."""
    if any(word in source for word in _MEDIA):
        return True
    try:
        tree = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_TRAINING.sub("", source))  # noqa: S701
    except jinja2.TemplateError:
        return False
    return any(_is_content(loop.iter) for loop in tree.find_all(nodes.For))


def _is_content(node: nodes.Node) -> bool:
    """True if an expression is a message's content, with any filters, tests and slices."""
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
    return key == "content" and isinstance(node.node, nodes.Name) and node.node.name in _MESSAGE_NAMES


def _processor_template(folder: Path) -> Any:
    if not any((folder / name).is_file() for name in ("preprocessor_config.json", "processor_config.json")):
        return None
    try:
        return json.loads((folder / "chat_template.json").read_text(encoding="utf-8"))["chat_template"]
    except (OSError, ValueError, LookupError):
        return None


def _is_empty(message: dict[str, Any]) -> bool:
    """True if an assistant's turn has no text and no calls: mistral-common refuses these."""
    content = message["content"]
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return message["role"] == "assistant" and not message.get("tool_calls") and not "".join(texts).strip()
