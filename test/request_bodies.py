"""Bodies of requests for property tests: near those that a server answers, with one to three fields mutated.

Their cost is bounded where the server's context is (`CONTEXT_TOKENS`): a body that asks for everything gets that much.
Each is JSON text, since a client may write what Python's own objects cannot hold (`NaN`, half a surrogate pair).
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from hypothesis import strategies as st

CONTEXT_TOKENS: Final = 128
VOCABULARY_SIZE: Final = 261
SESSIONS: Final = ("s0", "s1")
"""Sessions that the server is to have open."""

Value = st.SearchStrategy[Any]

_INTEGERS: Final = (0, 1, 2, 5, 261, 2**31 - 1, 2**31, 2**40, 2**63 - 1, 2**63, 2**64, 10**30)
_FLOATS: Final = (0.0, 0.5, 1.0, 1.5, 1e-7, 1e-40, 1e39, 1e308, float("inf"), float("nan"))
_TEXTS: Final = ("", "a", "hello there", "\ud800", "é" * 3, "x" * 300, "__proto__", "marconi_checkpoints", "5", "-1")

_signed: Value = st.sampled_from(_INTEGERS).flatmap(lambda value: st.sampled_from((value, -value)))
_scalars: Value = st.one_of(
    st.none(), st.booleans(), _signed, st.sampled_from(_FLOATS + tuple(-x for x in _FLOATS)), st.sampled_from(_TEXTS)
)
anything: Value = st.recursive(
    _scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_TEXTS), inner, max_size=3),
    max_leaves=5,
)
"""Any JSON value, by preference one at an edge."""

# None that begins with HEALTH_CHECK: SGLang answers such a request when it is idle, and otherwise never.
_rids: Value = st.sampled_from(("r0", "r1", "r2", "r3", ""))
_token: Value = st.integers(0, VOCABULARY_SIZE - 1) | st.sampled_from((-1, VOCABULARY_SIZE, VOCABULARY_SIZE + 1, 2**31))
_prompt: Value = st.lists(st.integers(0, VOCABULARY_SIZE - 1), min_size=1, max_size=40)
_grammars: Final = (
    "a+", "(", "[ab]{3}", "a{9}", "(?=a)b", "{}", "[]", "5", '{"type": "object"}', '{"type": "array", "items": {}}',
    '{"$ref": "#"}', '{"enum": []}', '{"type": "integer", "minimum": 5, "maximum": 1}', '{"pattern": "("}',
    'root ::= "a"', "root ::= root", "root ::=", '{"structures": 5, "triggers": []}', "x" * 2000,
)  # fmt: skip

_session: Value = st.fixed_dictionaries(
    {"id": st.sampled_from((*SESSIONS, *SESSIONS, "of nobody")) | anything},
    optional={
        "rid": _rids | anything,
        "offset": st.sampled_from((-3, 0, 2, 1000)) | anything,
        "replace": st.booleans() | anything,
        "drop_previous_output": st.booleans() | anything,
    },
)

SAMPLING: Final[Mapping[str, Value]] = {
    "max_new_tokens": st.sampled_from((0, 1, 3, None, -1, CONTEXT_TOKENS)),
    "min_new_tokens": st.sampled_from((0, 1, 3, 200)),
    # Few samples, or more than anybody answers: a thousand take their time.
    "n": st.sampled_from((0, -1, 1, 2, 3, None, True, 2.0, "2", 2**20, 2**63)),
    "temperature": st.sampled_from((0, 0.0, 0.7, 1e-5, 1e39, -1.0)),
    "top_p": st.sampled_from((1.0, 0.5, 1e-30, 0.0, 1.1)),
    "top_k": st.sampled_from((-1, 1, 5, 0, 10**6, 2**31 - 1, 2**31, 10**12)),
    "min_p": st.sampled_from((0.0, 0.2, 1.0)),
    "frequency_penalty": st.sampled_from((0.0, 1.5, -2.0, 3.0)),
    "presence_penalty": st.sampled_from((0.0, 1.5, -2.0)),
    "repetition_penalty": st.sampled_from((1.0, 1.2, 0.5, 1e-30, 0.0)),
    "stop": st.sampled_from(("a", ["a", "b"], [""], ["a"] * 33)),
    "stop_token_ids": st.lists(_token, max_size=3),
    "stop_regex": st.sampled_from(("a+", "(", ["[ab]", "c"], "a{1000}")),
    "ignore_eos": st.booleans(),
    "skip_special_tokens": st.booleans(),
    "no_stop_trim": st.booleans(),
    "regex": st.sampled_from(_grammars),
    "json_schema": st.sampled_from(_grammars),
    "ebnf": st.sampled_from(_grammars),
    "structural_tag": st.sampled_from(_grammars),
    "logit_bias": st.dictionaries(_token.map(str), st.sampled_from((5.0, -100, 1e39, float("nan"))), max_size=3),
    "sampling_seed": _signed,
    "stream_interval": st.sampled_from((1, 0, -5)),
    "custom_params": st.fixed_dictionaries(
        {},
        optional={
            "marconi_checkpoints": st.lists(st.sampled_from((1, 3, -1, 0, 10**9)), max_size=6) | anything,
            "marconi_checkpoints_left_out": anything,
            "thinking_budget": anything,
            "__sglang_reasoning_end_token_ids": anything,
        },
    ),
    "beam_width": st.sampled_from((1, 2, 0)),
    "watermark": st.fixed_dictionaries({}, optional={"enabled": st.booleans(), "context_window": _signed}),
}
"""Near-valid values of a request's `sampling_params`, by field."""

FIELDS: Final[Mapping[str, Value]] = {
    "input_ids": st.one_of(
        _prompt, st.lists(_prompt, max_size=3), st.lists(_token, max_size=5), st.lists(st.lists(_token, max_size=3))
    ),
    "text": st.sampled_from(("hello", "", ["a", "b"], [], "é🙂")),
    "return_logprob": st.booleans() | st.lists(st.booleans(), max_size=3),
    "logprob_start_len": st.sampled_from((-1, 0, 1, -5, 10**6)) | st.lists(st.sampled_from((-1, 0, -5)), max_size=3),
    "top_logprobs_num": st.sampled_from((0, 1, 5, VOCABULARY_SIZE, 10**5, -5)),
    "token_ids_logprob": st.lists(_token, max_size=3) | st.lists(st.lists(_token, max_size=2), max_size=2),
    "return_text_in_logprobs": st.booleans(),
    "return_flat_raw_top_logprobs": st.booleans(),
    "return_flat_raw_output_top_logprobs": st.booleans(),
    "return_sampling_mask": st.booleans(),
    "sampling_logprobs_mode": st.sampled_from(("selected", "support")),
    "return_hidden_states": st.booleans() | st.sampled_from(("last", "full")),
    "return_routed_experts": st.booleans(),
    "routed_experts_start_len": _signed,
    "return_indexer_topk": st.booleans(),
    "return_prompt_token_ids": st.booleans(),
    "stream": st.booleans(),
    "rid": _rids | st.lists(_rids, max_size=3),
    "session_params": _session,
    "session_id": st.sampled_from((*SESSIONS, "of nobody")),
    "extra_key": st.sampled_from(("tenant", "", ["a", "b"])),
    "cache_salt": st.sampled_from(("salt", "", ["a", "b"])),
    "priority": _signed,
    "lora_path": st.sampled_from(("adapter", "", [], [None], ["a", "b"])),
    "image_data": st.sampled_from(("image", ["image"], [["a"], ["b"]], [])),
    "video_data": st.sampled_from(("video", [])),
    "audio_data": st.sampled_from(("audio", [])),
    "modalities": st.sampled_from((["image"], [])),
    "input_embeds": st.sampled_from(([[0.5]], [[[0.5]]], [])),
    "custom_logit_processor": st.sampled_from(("processor", "", ["a"])),
    "positional_embed_overrides": st.sampled_from(([], {"embeds": [[0.5]], "positions": [0]})),
    "token_indices_to_pool": st.lists(_token, max_size=3) | st.lists(st.lists(_token, max_size=2), max_size=2),
    "multi_item_delimiter_indices": st.lists(_token, max_size=3) | st.lists(st.lists(_token, max_size=2), max_size=2),
    "bootstrap_host": st.sampled_from(("2.2.2.2", "host")),
    "bootstrap_port": _signed,
    "bootstrap_room": _signed,
    "bootstrap_pair_key": st.just("key"),
    "decode_tp_size": _signed,
    "routed_dp_rank": st.sampled_from((0, 1, -1)),
    "data_parallel_rank": st.sampled_from((0, 1, -1)),
    "disagg_prefill_dp_rank": st.sampled_from((0, 1, -1)),
    "routing_key": st.just("key"),
    "http_worker_ipc": st.just("ipc:///nowhere"),
    "require_reasoning": st.booleans(),
    "max_thinking_tokens": _signed,
    "kv_hints": st.sampled_from(({}, {"protocol_version": "1", "message_id": "m", "actions": []})),
    "need_wait_for_mm_inputs": st.booleans(),
    "num_items_assigned": st.just({"IMAGE": [1]}),
    "encoder_urls": st.just(["http://nowhere"]),
    "received_time": st.sampled_from((0.0, 1e308)),
    "custom_labels": st.just({"a": "b"}),
    "watermark": st.just({"enabled": True}),
    "external_trace_header": st.just({"traceparent": 5}),
    "background": st.booleans(),
    "return_bytes": st.booleans(),
    "return_entropy": st.booleans(),
}
"""Near-valid values of a request's other fields."""

_CHAT_MESSAGE: Value = st.fixed_dictionaries(
    {
        "role": st.sampled_from(("system", "user", "assistant", "tool")),
        "content": st.sampled_from(("hello", "", ["a"])),
    },
    optional={"cache_control": st.just({"type": "ephemeral"}) | anything, "name": st.just("n")},
)
OPENAI: Final[Mapping[str, Value]] = {
    "max_tokens": st.sampled_from((0, 1, 3, -1)),
    "max_completion_tokens": st.sampled_from((1, 3)),
    **{name: SAMPLING[name] for name in SAMPLING if name not in ("max_new_tokens", "json_schema", "structural_tag")},
    "seed": _signed,
    "logprobs": st.sampled_from((True, False, 0, 5, 10**6, -1)),
    "top_logprobs": st.sampled_from((0, 5, 20, 10**6, -1)),
    "echo": st.booleans(),
    "stream": st.booleans(),
    "stream_options": st.just({"include_usage": True}) | anything,
    "response_format": st.sampled_from(
        ({"type": "json_object"}, {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}})
    ),
    "session_params": _session,
    "tools": st.just([{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]),
    "tool_choice": st.sampled_from(("auto", "required", "none")),
    "rid": _rids,
    "extra_key": st.just("tenant"),
    "cache_salt": st.just("salt"),
    "lora_path": st.just("adapter"),
    "suffix": st.just("end"),
    "best_of": st.sampled_from((1, 2)),
    "user": st.just("u"),
}
"""Near-valid values of the fields of both of OpenAI's bodies."""


PLAIN: Final[Mapping[str, Any]] = {
    "generate": {
        "input_ids": [5, 6, 7, 8, 9],
        "sampling_params": {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True},
    },
    "v1/completions": {"model": "m", "prompt": [5, 6, 7, 8, 9], "max_tokens": 3, "ignore_eos": True},
    "v1/chat/completions": {"model": "m", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3},
}
"""A body that is answered, by the path that it goes to."""

_PROMPTS: Final[Mapping[str, Mapping[str, Value]]] = {
    "v1/completions": {"prompt": FIELDS["input_ids"] | FIELDS["text"]},
    "v1/chat/completions": {"messages": st.lists(_CHAT_MESSAGE, max_size=3)},
}


@st.composite
def bodies(draw: st.DrawFn, path: str = "generate") -> str:
    """A body for `path`, one to three of its fields mutated: to an edge, or one time in four to anything."""
    body: dict[str, Any] = json.loads(json.dumps(PLAIN[path]))
    for _ in range(draw(st.integers(1, 3))):
        target, fields = body, {**OPENAI, **_PROMPTS[path]} if path in _PROMPTS else FIELDS
        # Most of what a scheduler receives stands there.
        if path == "generate" and isinstance(body["sampling_params"], dict) and draw(st.booleans()):
            target, fields = body["sampling_params"], SAMPLING
        name = draw(st.sampled_from(sorted(fields)))
        target[name] = draw(anything if draw(st.integers(0, 3)) == 0 else fields[name])
        if name == "text" and target is body:
            body.pop("input_ids", None)
    if path == "generate" and draw(st.integers(0, 19)) == 0:
        body["sampling_params"] = draw(anything | st.lists(st.just(PLAIN[path]["sampling_params"]), max_size=3))
    return json.dumps(body)
