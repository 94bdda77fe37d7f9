"""The bodies of SGLang's generation routes, tokenized as the worker tokenizes them.

    /generate               text or input_ids, one or a batch
    /v1/completions         prompt: a text, ids, or a batch of either
    /v1/chat/completions    messages, tools (`chat`)
    any other               no ids

No ids have: images, audio, video, `input_embeds`, sessions, a template or an adapter that the request brings, `suffix`
(its worker may fill in the middle), and what pydantic would make fit. A worker's flags that change prompts are
arguments of `TokenizingReader.of`; that a worker was started with the same ones is seen by asking it (`check`).

Sources: `srt/managers/io_struct.py:GenerateReqInput`, `srt/entrypoints/openai/serving_completions.py`.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from marconi.router.prompts.base import Reading, Unknowable, Unreadable
from marconi.router.prompts.chat import ChatEncoder
from marconi.router.prompts.chat_template import ChatTemplate
from marconi.router.prompts.fields import flag, ids_of, shown
from marconi.router.prompts.files import ModelFolder
from marconi.router.prompts.namespace import Adapters, key_of
from marconi.router.prompts.template_source import template_source
from marconi.router.prompts.tokenizer import TextTokenizer

GENERATE: Final = "/generate"
COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"

_NO_TEXT: Final = (
    *("image_data", "video_data", "audio_data", "input_embeds", "session_params", "lora_id"),
    *("positional_embed_overrides", "mm_hashes", "mm_content_hashes"),
)
_SENSES: Final = ("vision_config", "audio_config", "thinker_config", "visual")


@dataclass(frozen=True, slots=True)
class TokenizingReader:
    """Of one model; see the module."""

    chat: ChatEncoder
    adapters: Adapters

    @classmethod
    def of(
        cls,
        path: Path,
        served_model: str | None = None,
        chat_template: Path | None = None,
        template_name: str | None = None,
        template_defaults: Mapping[str, Any] | None = None,
        lora_paths: Mapping[str, str] | None = None,
    ) -> Self:
        """The reader for the workers of a model's folder; `ValueError` with one line where ids would be a guess.

        `served_model` is what clients call it; the others are the workers' `--chat-template`,
        `--hf-chat-template-name`, `--default-chat-template-kwargs` and `--lora-paths`.
        """
        folder = ModelFolder.of(path)
        tokenizer = TextTokenizer.of(folder)
        source = template_source(folder, chat_template, template_name)
        config = folder.json("config.json")
        has_senses = any(config.get(name) for name in _SENSES)
        chat = ChatEncoder(
            tokenizer=tokenizer,
            template=None if source is None else ChatTemplate.of(source),
            defaults=dict(template_defaults or {}),
            is_plain=not (has_senses and tokenizer.adds_special),
            may_open_answers=bool(folder.json("tokenizer_config.json").get("response_template"))
            or folder.has("response_template.json"),
        )
        return cls(chat, Adapters.of(served_model, lora_paths or {}))

    def read(self, route: str, body: Mapping[str, Any]) -> Reading:
        """Of a body that was posted to `route`."""
        is_stream = flag(body, "stream")
        batch = _batch(route, body)
        index = max(range(len(batch)), key=lambda place: len(batch[place])) if len(batch) > 1 else 0
        num_prompts = max(len(batch), 1)
        salt = key_of(body, "cache_salt", index, num_prompts)
        key = key_of(body, "extra_key", index, num_prompts)
        adapter = self.adapters.named(body, route != GENERATE, index)
        try:
            ids = self._ids(route, body, batch[index] if batch else None)
        except (Unknowable, RecursionError):
            ids = None
        try:
            key = self.adapters.extra_key(key, adapter)
        except Unknowable:
            ids, key = None, None
        return Reading(ids or None, key, salt, is_stream, num_prompts)

    def _ids(self, route: str, body: Mapping[str, Any], prompt: str | list[Any] | None) -> "array[int] | None":
        if body.get("session_id"):
            raise Unknowable("a session, which may hold the beginning of the prompt")
        if route == CHAT:
            return self.chat.ids(body)
        if prompt is None:
            return None
        if route == GENERATE and any(body.get(name) for name in _NO_TEXT):
            raise Unknowable("more than a text")
        if isinstance(prompt, list):
            return ids_of(prompt, "token ids")
        if route == COMPLETIONS and body.get("suffix"):
            raise Unknowable("what stands between a prompt and a suffix")
        return self.chat.tokenizer.encode(prompt)


def _batch(route: str, body: Mapping[str, Any]) -> list[Any]:
    """The prompts, each a text or ids; empty where a route has none or they cannot be told."""
    if route == COMPLETIONS:
        prompt = body.get("prompt")
        if not isinstance(prompt, str | list) or not prompt:
            raise Unreadable(f"prompt: {shown(prompt)}; a text or a list of token ids is right")
        return _listed("prompt", prompt, (str, list))
    if route != GENERATE:
        return []
    text, ids = body.get("text"), body.get("input_ids")
    if text is not None:
        if not isinstance(text, str) and not (isinstance(text, list) and all(isinstance(each, str) for each in text)):
            raise Unreadable(f"text: {shown(text)}; a text or a list of texts is right")
        # With both, a worker counts the texts and takes the ids.
        return _listed("text", text, (str,)) if ids is None and text != [] else []
    if ids is None and not body.get("input_embeds"):
        raise Unreadable("neither text nor input_ids; one of them is right")
    if ids is None or ids == []:
        return []
    if not isinstance(ids, list):
        raise Unreadable(f"input_ids: {shown(ids)} is no list of token ids")
    return _listed("input_ids", ids, (list,))


def _listed(name: str, value: str | list[Any], kinds: tuple[type, ...]) -> list[Any]:
    """A batch as it is, one prompt as a batch of it."""
    if isinstance(value, str) or not any(isinstance(each, kinds) for each in value):
        return [value]
    for each in value:
        if isinstance(each, list) is not isinstance(value[0], list):
            raise Unreadable(f"{name}: {shown(each)} in a batch of another kind")
    # Texts among ids: a worker reads them as ids, if they can be.
    is_of_one_kind = all(isinstance(each, kinds) for each in value)
    return value if is_of_one_kind else []
