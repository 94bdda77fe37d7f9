"""Checkpoints where the program asks, from a request's `custom_params` to its plan and back to its answer.

    the process that answers HTTP    a hint that makes no sense is refused                       (`guards/request.py`)
                                     the end of a prompt that is only there to be cached is asked for
    the scheduler                    the positions join the plan of the prefill                  (`cache/scheduler.py`)
                                     those without a slot are counted
    the process that answers HTTP    the answer's meta-information says what became of them

A request that generates nothing is there only so that its prompt is cached: the end of it is asked for. This is how
SGLang's frontend commits the prefix of a fork and `cache_prefix`. One that wants log-probabilities of its prompt is
there for those. Only the client's own request decides: SGLang itself warms the prompt of several samples with a copy
that generates nothing, and no sample starts from the prompt's end.

An orchestrator's `kv_hints` concern states that exist: the scheduler obeys them at the request's end
(`policy/kv_hints.py`), and the answer says in the same way what became of each action.

The count travels in `cached_tokens_details`, a dictionary that SGLang sends of each request. What the template says
about a chat's next turn and its system prompt comes in `custom_params` as well; nobody asked for it, so no answer
tells.
"""

import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final

from marconi.engine.faults import fails_open
from marconi.engine.http.diverged import of_answer
from marconi.engine.http.parts import add_part, note_rid
from marconi.engine.http.streams import note_explained
from marconi.engine.launch.flags import of_process
from marconi.engine.reports.explain import EXPLAIN, OFF, is_wanted, require_wish
from marconi.policy.admission.hints import END, hints_of

KEY: Final = "marconi_checkpoints"
"""In `custom_params`, what is asked for; in `meta_info`, what became of it."""
KV_HINTS: Final = "marconi_kv_hints"
"""In `cached_tokens_details`, as JSON, and in `meta_info`: what became of the actions of the request's `kv_hints`."""
LEFT_OUT: Final = "marconi_checkpoints_left_out"
"""In `custom_params`: how many more a chat request marked (`chat_template.py`)."""
NEXT_TURN: Final = "marconi_next_turn"
"""In `custom_params`: tokens before its end where the next turn will leave a chat's prompt (`chat_template.py`)."""
SYSTEM_END: Final = "marconi_system_end"
"""In `custom_params`: tokens of a chat's prompt up to the end of its system prompt and tools (`chat_template.py`)."""
WITHOUT_SLOT: Final = "marconi_num_without_slot"
"""In `cached_tokens_details`: states that were asked for and got no slot."""


def mapping_of(custom_params: object) -> Mapping[str, Any]:
    """`custom_params` as a client sent it: SGLang asks for no mapping, and what is none names nothing."""
    return custom_params if isinstance(custom_params, Mapping) else {}


def require_hints(obj: Any, num_prompt_tokens: int) -> None:
    """Raise `ValueError`, in one line, for hints in `obj` that make no sense for a prompt of that length."""
    custom = _custom_params(obj)
    require_wish(custom)
    if KEY in custom:
        try:
            hints_of(custom[KEY], num_prompt_tokens)
        except ValueError as error:
            raise ValueError(f"custom_params.{KEY} {error}") from None


def ask_for_end(obj: Any) -> None:
    """A request to generate nothing asks for the end of its prompt, unless it names positions itself."""
    params = getattr(obj, "sampling_params", None)
    # Requests for embeddings generate nothing either, and know of no log-probabilities.
    if isinstance(params, dict) and params.get("max_new_tokens") == 0 and not getattr(obj, "return_logprob", True):
        custom = params.get("custom_params") or {}
        if isinstance(custom, dict) and KEY not in custom:
            params["custom_params"] = {**custom, KEY: [END]}


def around_wait_one_response(wait: Callable[..., Any], manager: Any, obj: Any, request: Any = None) -> Any:
    """Around `TokenizerManager._wait_one_response`: the answer says what became of its hints, and why it missed."""
    responses = wait(manager, obj, request)
    fails_open(note_rid)(manager, obj)
    custom = _custom_params(obj)
    # A decode server kept none of them, and does not know what its prefill server did.
    is_decode = manager.disaggregation_mode.value == "decode"
    asks = KEY in custom or is_wanted(custom) or getattr(obj, "kv_hints", None) is not None
    reports = asks and not is_decode
    return _reporting(responses, manager, obj, request) if reports else responses


def on_build_metadata(metadata: dict[str, Any], meta_info: Mapping[str, Any]) -> dict[str, Any]:
    """After `build_endpoint_weight_version_metadata`: an OpenAI answer's `metadata` says it, too."""
    return {**metadata, **{key: meta_info[key] for key in (KEY, KV_HINTS, EXPLAIN) if key in meta_info}}


async def _reporting(responses: Any, manager: Any, obj: Any, request: Any) -> AsyncIterator[Any]:
    async with aclosing(responses):
        async for response in responses:
            fails_open(_add_report)(response["meta_info"], manager, obj, request)
            yield response


def _add_report(meta: dict[str, Any], manager: Any, obj: Any, request: Any) -> None:
    """Move what the scheduler says of a request in the details of its answer to the answer's `meta`."""
    custom = _custom_params(obj)
    details = meta.get("cached_tokens_details") or {}
    num_without_slot, explanation = details.pop(WITHOUT_SLOT, 0), details.pop(EXPLAIN, None)
    answers = details.pop(KV_HINTS, None)
    if answers is not None:
        meta[KV_HINTS] = json.loads(answers)
    if explanation is not None:
        meta[EXPLAIN] = json.loads(explanation) | of_answer(obj, manager.tokenizer)
        fails_open(add_part)(meta[EXPLAIN], manager, obj)
    elif is_wanted(custom) and meta.get("finish_reason") and not of_process().explain:
        meta[EXPLAIN] = {"line": OFF}
    # An answer to a request that was aborted while it waited does not tell its length: nothing became of them.
    if KEY in custom and "prompt_tokens" in meta:
        report = _report(custom, meta["prompt_tokens"], num_without_slot)
        if report is not None:
            meta[KEY] = report
    if EXPLAIN in meta:
        note_explained(request, meta)


def _report(custom: Mapping[str, Any], num_prompt_tokens: int, num_without_slot: int) -> dict[str, int] | None:
    try:
        hints = hints_of(custom[KEY], num_prompt_tokens)
    except ValueError:
        # Of another part of a session: `scheduler.asked_by` made nothing of it either.
        return None
    num_unplanned = custom.get(LEFT_OUT, 0)
    num_left_out = len(hints.over_limit) + (num_unplanned if type(num_unplanned) is int else 0)
    return {
        "num_asked": len(hints.positions) + num_left_out,
        "num_left_out": num_left_out,
        "num_without_slot": num_without_slot,
    }


def _custom_params(obj: Any) -> Mapping[str, Any]:
    params = getattr(obj, "sampling_params", None)
    return mapping_of(params.get("custom_params")) if isinstance(params, dict) else {}
