"""The bodies of SGLang's generation routes, tokenized as the worker tokenizes them, and their namespaces.

    /generate               text or input_ids, one or a batch
    /v1/completions         prompt: a text, ids, or a batch of either
    /v1/chat/completions    messages, tools (`chat`)
    /v1/messages            the same, of Anthropic's (`messages`)
    any other               nothing

    adapter    = the part of `model` after "base:", else `lora_path`
    extra_key  = `extra_key` + the adapter's id                 an empty text counts as none
    id         = uuid5(NAMESPACE_URL, name "\\0" path)           of an adapter given by `--lora-paths`

A prompt of a kind that is not tokenized here, or not alike (`check`), becomes a question for a worker's `/v1/tokenize`.
The ids of images, audio, video, `input_embeds`, sessions, adapters that the router was not given (one that was loaded
while serving has a random id), and `suffix` (its worker may fill in the middle) cannot be known. A worker's flags that
change prompts are arguments of `TokenizingReader.of`; where they do more at a worker than here, workers are asked.

Sources: `srt/managers/io_struct.py:GenerateReqInput,_normalize_extra_key`,
`srt/entrypoints/openai/serving_completions.py`, `srt/entrypoints/openai/serving_base.py:_resolve_lora_path`,
`srt/lora/lora_registry.py:deterministic_id`, `srt/managers/schedule_batch.py:Req.__init__`.
"""

import contextlib
import json
from array import array
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Self
from uuid import NAMESPACE_URL, uuid5

from marconi.chat.template import messages_of, tools_of
from marconi.chat.tokenizer import TextTokenizer
from marconi.router.prompts import CHAT, COMPLETIONS, GENERATE, MESSAGES, PromptKind, Reading, Unknowable
from marconi.router.prompts.chat import kinds_of, question_of
from marconi.router.prompts.messages import chat_of

_NO_TEXT: Final = (
    *("image_data", "video_data", "audio_data", "input_embeds", "session_params", "lora_id"),
    *("positional_embed_overrides", "mm_hashes", "mm_content_hashes"),
)
_MODALITIES: Final = ("vision_config", "audio_config", "thinker_config", "visual")
_ODD: Final = (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)
"""Errors of reading a body that is not as its route takes it."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """The LoRA adapters of a fleet, the same on all workers."""

    ids: Mapping[str, str]
    """Name -> id, of those of `--lora-paths name=path ...`."""
    served_model: str | None = None
    """The model's name for clients, which may have a colon itself."""

    def named(self, body: Mapping[str, Any], reads_model: bool, index: int) -> str | None:
        """The name of the adapter for the prompt at `index` of a batch."""
        model = body.get("model")
        if reads_model and isinstance(model, str) and ":" in model and model != self.served_model:
            served = f"{self.served_model}:"
            name = model[len(served) :] if model.startswith(served) else model.split(":", 1)[1]
            if name.strip():
                return name.strip()
        path = body.get("lora_path")
        if isinstance(path, list):
            path = path[index] if index < len(path) else None
        if path is not None and not isinstance(path, str):
            raise Unknowable("an adapter without a name")
        return path or None

    def extra_key(self, key: str | None, name: str | None) -> str | None:
        """The tree's key: a request's own and the adapter's id; `Unknowable` for an adapter that is not known."""
        if name is None:
            return key
        if name not in self.ids:
            raise Unknowable(f"adapter {name!r}")
        return (key or "") + self.ids[name]


@dataclass(frozen=True, slots=True)
class TokenizingReader:
    """Reads bodies with the tokenizer and the chat template of one model; see the module."""

    tokenizer: TextTokenizer | None
    """None where only workers tokenize."""
    template: str | None
    """None where only workers render chats."""
    defaults: Mapping[str, Any]
    """The workers' `--default-chat-template-kwargs`."""
    is_plain: bool
    """Whether its prompts of text reach the model as the ids that the chat has."""
    adapters: Adapters
    why_not: str = ""
    """Why there is no tokenizer, in words."""
    kinds: frozenset[PromptKind] = frozenset(PromptKind)
    """The prompts that are tokenized here; workers tokenize the rest."""

    @classmethod
    def of(
        cls,
        folder: Path,
        chat_template: str | None = None,
        template_name: str | None = None,
        template_defaults: Mapping[str, Any] | None = None,
        lora_paths: Mapping[str, str] | None = None,
    ) -> Self:
        """The reader for the workers of a model's folder; `ValueError`, one line, for a wrong flag.

        The flags are the workers' `--chat-template`, `--hf-chat-template-name`, `--default-chat-template-kwargs` and
        `--lora-paths`. Where the tokenizer cannot be loaded here, workers tokenize.
        """
        if not folder.is_dir():
            raise ValueError(f"the tokenizer must be a model's folder, got {folder}")
        try:
            tokenizer, why_not = TextTokenizer.load(folder), ""
        except ValueError as error:
            tokenizer, why_not = None, str(error)
        return cls(
            tokenizer=tokenizer,
            template=None if tokenizer is None else _template(tokenizer, chat_template, template_name),
            defaults=dict(template_defaults or {}),
            is_plain=not (_is_multimodal(folder) and (tokenizer is None or tokenizer.adds_special)),
            adapters=Adapters(
                {name: uuid5(NAMESPACE_URL, f"{name}\0{path}").hex for name, path in (lora_paths or {}).items()}
            ),
            why_not=why_not,
        )

    def for_workers(self, kinds: Set[PromptKind], model: str | None = None) -> Self:
        """The same reader for workers that tokenize prompts of these kinds alike, and serve a model by this name."""
        adapters = self.adapters if model is None else replace(self.adapters, served_model=model)
        return replace(self, kinds=frozenset(kinds), adapters=adapters)

    def read(self, route: str, body: Mapping[str, Any]) -> Reading:
        """Read a body that was posted to `route`."""
        ids: array[int] | None = None
        question: dict[str, Any] | None = None
        extra_key = cache_salt = None
        is_stream = body.get("stream") is True
        try:
            if route == MESSAGES:
                route, body = CHAT, chat_of(body)
            prompts = _prompts(route, body)
            index = max(range(len(prompts)), key=lambda place: len(prompts[place])) if len(prompts) > 1 else 0
            cache_salt = _key(body, "cache_salt", index, len(prompts))
            own = _key(body, "extra_key", index, len(prompts))
            extra_key = self.adapters.extra_key(own, self.adapters.named(body, route != GENERATE, index))
            if body.get("session_id"):
                raise Unknowable("a session, which may hold the beginning of the prompt")
            ids, question = self._chat(body) if route == CHAT else self._prompt(route, body, prompts[index])
        except (Unknowable, *_ODD):
            pass
        return Reading(ids or None, extra_key, cache_salt, is_stream, question)

    def _chat(self, body: Mapping[str, Any]) -> "tuple[array[int] | None, dict[str, Any] | None]":
        """A chat's ids, or the question for them."""
        if body.get("input_ids") is not None:
            return _ids(body["input_ids"]), None
        if not self.is_plain:
            raise Unknowable("a chat of a model that tokenizes it a second time")
        kinds = kinds_of(body)
        if self.tokenizer and self.template is not None and kinds is not None and kinds <= self.kinds:
            variables = {**self.defaults, **(body.get("chat_template_kwargs") or {})}
            # A template may raise anything; what it refuses here a worker may render all the same.
            with contextlib.suppress(Exception):
                messages, tools = messages_of(body), tools_of(body)
                return self.tokenizer.encode_chat(messages, tools, self.template, variables), None
        return None, question_of(body)

    def _prompt(
        self, route: str, body: Mapping[str, Any], prompt: str | list[Any]
    ) -> "tuple[array[int] | None, dict[str, Any] | None]":
        """A text's or a list's ids, or the question for them."""
        if route == GENERATE and any(body.get(name) for name in _NO_TEXT):
            raise Unknowable("more than a text")
        if isinstance(prompt, list):
            return _ids(prompt), None
        if route == COMPLETIONS and body.get("suffix"):
            raise Unknowable("what stands between a prompt and a suffix")
        if self.tokenizer is None or PromptKind.TEXTS not in self.kinds:
            return None, {"prompt": prompt}
        return self.tokenizer.encode(prompt), None


def _template(tokenizer: TextTokenizer, given: str | None, name: str | None) -> str | None:
    """The template that chats are rendered with here, as transformers chooses it; None where there is none."""
    if given is not None:
        if Path(given).suffix != ".jinja":
            # A name or a .json file: a template that SGLang has in Python.
            return None
        try:
            return Path(given).read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"--chat-template {given}: cannot be read ({error.strerror})") from None
    return tokenizer.template(name)


def _prompts(route: str, body: Mapping[str, Any]) -> list[Any]:
    """The prompts of a body, each a text or ids; a chat is one empty text."""
    if route == CHAT:
        return [""]
    if route == COMPLETIONS:
        return _batch(body["prompt"], (str, int, list))
    if route != GENERATE:
        raise Unknowable("another route")
    text, ids = body.get("text"), body.get("input_ids")
    if text is not None and ids is not None:
        raise Unknowable("texts and ids: a worker counts the ones and takes the others")
    return _batch(text, (str,)) if ids is None else _batch(ids, (int, list))


def _batch(prompt: Any, kinds: tuple[type, ...]) -> list[Any]:
    """The prompts of a batch, all of one of these kinds, or the one prompt."""
    if isinstance(prompt, str) and str in kinds:
        return [prompt]
    if not isinstance(prompt, list) or type(prompt[0]) not in kinds:
        raise Unknowable("no prompt of its route")
    if type(prompt[0]) is int:
        return [prompt]
    if any(type(each) is not type(prompt[0]) for each in prompt):
        raise Unknowable("a batch of several kinds")
    return prompt


def _key(body: Mapping[str, Any], name: str, index: int, num_prompts: int) -> str | None:
    """`extra_key` or `cache_salt` of the prompt at `index` of a batch: one text for all, or one for each."""
    value = body.get(name)
    if isinstance(value, list):
        value = value[index] if len(value) == num_prompts else value
    if value is not None and not isinstance(value, str):
        raise Unknowable(f"{name} that is no text")
    return value or None


def _ids(values: Any) -> "array[int]":
    ids = array("q", values)
    if ids and min(ids) < 0:
        raise Unknowable("a negative id")
    return ids


def _is_multimodal(folder: Path) -> bool:
    """True if a model also takes images or sound."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return any(config.get(name) for name in _MODALITIES)
