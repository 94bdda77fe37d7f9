"""The touches of SGLang on a request's way in and its answer's way out.

In the process that answers HTTP, but for the last, which are the scheduler's.
"""

from marconi.engine import cache_control, hints, request_guard, session_guard
from marconi.engine.touch import Kind, Touch

_UNTIL_HINTS = "hints for the cache as a field of a request"

GUARD_TOUCHES = (
    Touch(
        request_guard.TARGET,
        Kind.AFTER,
        "(self, obj, input_ids)",
        "a token id outside the vocabulary, an empty prompt and other fields that no scheduler survives get HTTP 400 "
        "instead; read there and written: the request's `sampling_params`",
        "SGLang validating token ids",
        request_guard.refuse_unanswerable,
    ),
    Touch(
        "sglang.srt.managers.io_struct.GenerateReqInput.normalize_batch_and_arguments",
        Kind.AROUND,
        "(self)",
        "more answers than the HTTP process can write out while others wait get HTTP 400; read there: `n` and the "
        "prompts",
        "SGLang bounding `n`",
        request_guard.around_normalize,
    ),
    Touch(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager",
        Kind.READ,
        None,
        "its `model_config.vocab_size`, `mm_processor`, `context_len`, and of its `server_args` "
        "`radix_cache_backend` and `chunked_prefill_size`",
        "as above",
    ),
    Touch(
        "sglang.srt.managers.embed_types.PositionalEmbeds",
        Kind.READ,
        None,
        "what `positional_embed_overrides` are, where they are not JSON",
        "as above",
    ),
    Touch(
        "sglang.srt.managers.io_struct.GenerateReqInput.contains_mm_input",
        Kind.CALL,
        "(self)",
        "ids of requests with images are let through where the model sees",
        "as above",
    ),
    Touch(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._wait_one_response",
        Kind.AROUND,
        "(self, obj, request=None)",
        "an answer's `meta_info` says what became of the checkpoints that its request asked for: read there and in the "
        "request's `sampling_params` and `session_params`",
        _UNTIL_HINTS,
        hints.around_wait_one_response,
    ),
)

CHAT_TOUCHES = (
    Touch(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._convert_to_internal_request",
        Kind.AROUND,
        "(self, request, raw_request=None)",
        "messages with a `cache_control` become positions in the prompt; read there: the body as it came, since the "
        "models of requests drop the field",
        _UNTIL_HINTS,
        cache_control.around_convert,
    ),
    Touch(
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat._process_messages",
        Kind.CALL,
        "(self, request, is_multimodal, *, output_constrained=False)",
        "renders the conversation up to such a message, as the whole is rendered",
        _UNTIL_HINTS,
    ),
    Touch(
        "sglang.srt.entrypoints.openai.protocol.ChatCompletionRequest",
        Kind.ASSIGN,
        None,
        "a copy with fewer messages, and `_format_add_generation_prompt` off, which `/v1/tokenize` has for it",
        "as above",
    ),
    Touch(
        "sglang.srt.utils.weight_versions.build_endpoint_weight_version_metadata",
        Kind.AFTER,
        "(meta_info)",
        "`metadata` of an OpenAI answer says what became of the checkpoints that its request asked for",
        _UNTIL_HINTS,
        hints.on_build_metadata,
    ),
)
"""Hooked in where a server answers HTTP; an offline `Engine` has no chat."""

SCHEDULER_GUARD_TOUCHES = (
    Touch(
        "sglang.srt.session.session_controller.Session.create_req",
        Kind.AROUND,
        "(self, req, tokenizer, vocab_size, eos_token_ids=None, disagg_mode=None, req_factory=<class "
        "'sglang.srt.managers.schedule_batch.Req'>)",
        "a turn that replaces others ends and forgets them before SGLang clears them, which ends the scheduler",
        "SGLang clearing a session's turns by what they are",
        session_guard.around_create_req,
    ),
    Touch(
        "sglang.srt.session.session_controller.SessionReqNode.abort",
        Kind.CALL,
        "(self)",
        "as above; read there: `req.rid`, `children`, and of the session `req_nodes` and `streaming`",
        "as above",
    ),
    Touch(
        "sglang.srt.environ.envs.SGLANG_SANITIZE_NAN_LOGITS",
        Kind.ASSIGN,
        "",
        "logits that a request's parameters made infinite or none at all are numbers again before one is sampled",
        "SGLang turning it on by itself",
    ),
)
"""Hooked in where a scheduler builds its cache."""
