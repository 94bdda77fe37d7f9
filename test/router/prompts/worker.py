"""SGLang's own request handling, without a model: what a worker makes of a body."""

import asyncio
import copy
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pydantic import TypeAdapter
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest, TokenizeRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
from sglang.srt.entrypoints.openai.serving_tokenize import OpenAIServingTokenize
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.parser.template_manager import TemplateManager
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.srt.utils.hf_transformers.tokenizer import get_tokenizer


class Refused(ValueError):
    """A body that the worker answers with an error."""


class Worker:
    """The routes of one server of Marconi's, up to what its scheduler is given. Its configuration has to be published.

    Marconi's hooks are part of it where its plugin is loaded, which another test of the process may have done.
    """

    def __init__(
        self, folder: Path, hf_config: Mapping[str, Any], chat_template: Path | None = None, is_multimodal: bool = False
    ) -> None:
        manager = TokenizerManager.__new__(TokenizerManager)
        manager.tokenizer = get_tokenizer(str(folder))
        manager.processor = manager.mm_processor = manager.async_dynamic_batch_tokenizer = None
        manager.model_path = str(folder)
        manager.served_model_name = "served"
        manager.server_args = SimpleNamespace(radix_cache_backend="marconi")
        manager.model_config = SimpleNamespace(
            hf_config=SimpleNamespace(**hf_config),
            is_multimodal=is_multimodal,
            is_embedding_gemma=False,
            context_len=32768,
            get_default_sampling_params=dict,
        )
        manager.config_value = {"tool_call_parser": None, "reasoning_parser": None, "grammar_backend": "none"}.get
        templates = TemplateManager()
        templates.load_chat_template(manager, None if chat_template is None else str(chat_template), str(folder))
        self.tokenizer = manager.tokenizer
        self._manager = manager
        self._chat = OpenAIServingChat(manager, templates)
        self._completions = OpenAIServingCompletion(manager, templates)
        self._tokenize = OpenAIServingTokenize(manager, templates)

    def read(self, route: str, body: Mapping[str, Any]) -> list[tuple[list[int], str | None, str | None]]:
        """Ids, `extra_key` and `cache_salt` of each prompt; `Refused` where there is none."""
        try:
            return self._read(route, copy.deepcopy(dict(body)))
        except Exception as error:
            raise Refused(str(error)) from error

    def tokenize(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The answer of `/v1/tokenize`."""
        request = TokenizeRequest.model_validate(copy.deepcopy(dict(body)))
        answer = asyncio.run(self._tokenize._handle_non_streaming_request(request, request, None))
        found: dict[str, Any] = answer.model_dump()
        return found

    def _read(self, route: str, body: dict[str, Any]) -> list[tuple[list[int], str | None, str | None]]:
        if route in ("/v1/chat/completions", "/v1/messages"):
            if route == "/v1/messages":
                messages = AnthropicMessagesRequest.model_validate(body)
                chat = AnthropicServing(self._chat)._convert_to_chat_completion_request(messages)
            else:
                chat = ChatCompletionRequest.model_validate(body)
            if (error := self._chat._validate_request(chat)) is not None:
                raise ValueError(error)
            adapted, _ = self._chat._convert_to_internal_request(chat, None)
        elif route == "/v1/completions":
            completion = CompletionRequest.model_validate(body)
            if (error := self._completions._validate_request(completion)) is not None:
                raise ValueError(error)
            adapted, _ = self._completions._convert_to_internal_request(completion, None)
        else:
            adapted = TypeAdapter(GenerateReqInput).validate_python(body)
        adapted.normalize_batch_and_arguments()
        prompts = [adapted] if adapted.is_single else [adapted[index] for index in range(adapted.batch_size)]
        return [self._one(prompt) for prompt in prompts]

    def _one(self, prompt: Any) -> tuple[list[int], str | None, str | None]:
        ids = prompt.input_ids
        if ids is None:
            ids, _ = asyncio.run(self._manager._tokenize_texts(prompt.text))
        key = prompt.extra_key
        if prompt.lora_path:
            if not isinstance(prompt.lora_path, str):
                raise TypeError("a list of adapters for one prompt: the scheduler adds it to a text, and fails")
            key = (key or "") + LoRARef.deterministic_id(prompt.lora_path, f"/adapters/{prompt.lora_path}")
        return list(ids), key or None, prompt.cache_salt or None


def publish(folder: Path, **flags: Any) -> None:
    """Publish a server's configuration for this process."""
    set_global_server_args_for_scheduler(ServerArgs(model_path=str(folder), device="cpu", **flags))
