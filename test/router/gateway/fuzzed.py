"""Bodies as no client should send them, by a number each: right ones with something put in, left out or torn.

`Whatever` is a worker that answers any of them somehow: whole, streamed, or with a refusal.
"""

import json
from copy import deepcopy
from hashlib import sha256
from random import Random
from typing import Any, Final

from aiohttp import web

from .stand_in import StandIn

_SCHEMA: Final = {"type": "object", "properties": {"what": {"type": "string"}}, "required": ["what"]}
_TOOL: Final = {"type": "function", "function": {"name": "look_up", "description": "It", "parameters": _SCHEMA}}
_CALL: Final = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": "{}"}}
_PARAMS: Final = {"temperature": 0.5, "max_new_tokens": 4, "stop": ["x"], "n": 1, "top_p": 0.9}
_RIGHT: Final[dict[str, tuple[dict[str, Any], ...]]] = {
    "/generate": (
        {"text": "the quick brown fox", "sampling_params": _PARAMS, "stream": True},
        {"text": ["one", "two"], "extra_key": ["a", "b"], "cache_salt": "s", "rid": ["1", "2"]},
        {"input_ids": [1, 2, 3, 4], "return_logprob": True, "lora_path": "ada"},
        {"input_ids": [[1, 2], [3]], "sampling_params": [_PARAMS, _PARAMS]},
        {"input_embeds": [[0.1, 0.2]], "image_data": "x", "session_params": {"id": "1"}},
    ),
    "/v1/completions": (
        {"model": "m", "prompt": "the quick brown fox", "max_tokens": 4, "stream": True, "suffix": ""},
        {"model": "m:ada", "prompt": [1, 2, 3], "logprobs": 1, "echo": True},
        {"model": "m", "prompt": ["one", "two"], "n": 2, "cache_salt": ["a", "b"]},
    ),
    "/v1/chat/completions": (
        {"model": "m", "messages": [{"role": "user", "content": "It?"}], "stream": True, "max_tokens": 4},
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "tool_call_id": "call_1", "content": "12"},
                {"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "image_url", "image_url": {}}]},
            ],
            "tools": [_TOOL],
            "tool_choice": {"type": "function", "function": {"name": "look_up"}},
            "chat_template_kwargs": {"enable_thinking": False},
            "reasoning_effort": "none",
            "response_format": {"type": "json_schema", "json_schema": {"schema": _SCHEMA}},
        },
        {"messages": [{"role": "assistant", "content": "It is"}], "continue_final_message": True, "extra_key": "x"},
    ),
    "/v1/messages": (
        {
            "model": "m",
            "max_tokens": 4,
            "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            "messages": [
                {"role": "user", "content": "It?"},
                {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "12"}]},
            ],
            "tools": [{"name": "f", "input_schema": _SCHEMA}],
            "metadata": {"user_id": "a"},
            "stream": True,
        },
    ),
}
_NAMES: Final = sorted({name for bodies in _RIGHT.values() for body in bodies for name in body})
_SCALARS: Final = (
    *(None, True, False, 0, 1, -1, 2**31, 2**63, -(2**63) - 1, 10**300, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *("", " ", "x", "true", "1", "\x00", "\ud800", "\uffff", "{{ messages }}", "<|im_end|>", "é" * 2000),
)


def body(seed: int) -> tuple[str, bytes]:
    """A route, and what is posted to it."""
    rng = Random(seed)  # noqa: S311 - a test's
    route = rng.choice(tuple(_RIGHT))
    value: Any = deepcopy(rng.choice(_RIGHT[route]))
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        _spoil(value, rng)
    if rng.random() < 0.03:
        value = _any(rng)
    text = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode("utf-8", "surrogatepass")
    if rng.random() < 0.1:
        at = rng.randrange(len(text) + 1)
        text = rng.choice(
            (text[:at], text[:at] + rng.randbytes(2) + text[at:], text + text[:at], b"\xef\xbb\xbf" + text)
        )
    return route, text


def _spoil(value: Any, rng: Random) -> None:
    """Put something in its place, or take it away, somewhere within an object or a list."""
    while True:
        places = list(value) if isinstance(value, dict) else list(range(len(value)))
        if isinstance(value, dict) and rng.random() < 0.2:
            value[rng.choice(_NAMES)] = _any(rng)
            return
        if not places:
            return
        place = rng.choice(places)
        if isinstance(value[place], dict | list) and rng.random() < 0.6:
            value = value[place]
        elif rng.random() < 0.2:
            del value[place]
            return
        else:
            value[place] = _any(rng)
            return


def _any(rng: Random) -> Any:
    luck = rng.random()
    if luck < 0.6:
        return rng.choice(_SCALARS)
    if luck < 0.75:
        return [_any(rng) for _ in range(rng.randrange(4))]
    if luck < 0.9:
        return {rng.choice((*_NAMES, "", "\x00")): _any(rng) for _ in range(rng.randrange(4))}
    if luck < 0.95:
        return [rng.choice(_SCALARS[:8])] * rng.choice((100, 20_000))
    nested: Any = 1
    for _ in range(rng.choice((10, 200, 900))):
        nested = [nested] if rng.random() < 0.5 else {"a": nested}
    return nested


class Whatever(StandIn):
    """Answers by what it was sent, and not by what that says."""

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        luck = sha256(await request.read()).digest()[0]
        if luck < 40:
            return web.json_response({"error": {"message": "no"}}, status=400)
        if luck < 50:
            return web.json_response({"error": {"message": "an error of its own"}}, status=429)
        if luck < 150:
            return web.json_response({"text": "yes", "meta_info": {"completion_tokens": luck % 3 or None}})
        body = b'data: {"error": {"message": "no"}}\n\n' if luck < 160 else b'data: {"text": "yes"}\n\ndata: [DONE]\n\n'
        return web.Response(body=body, content_type="text/event-stream")
