"""Where a chat's next turn will leave this one's prompt, asked of the template before anybody has gone on.

A template ends a prompt in an invitation to answer, of which a later turn repeats a part or nothing: of
`<assistant> <think>` a model that reasons keeps `<assistant>` alone. A short conversation is rendered as far as the
invitation, and once more with an answer and another turn; what the first has beyond what both begin with is how far
before its end a prompt is left:

    invited     <user> a </user> <assistant> <think>
    gone on     <user> a </user> <assistant> b </assistant> <user> c </user> <assistant> <think>
    common      <user> a </user> <assistant>                                  a distance of 1 token

It is rendered once for each setting of the template's arguments, and kept; a request's own messages are not rendered
again. The distance travels to the scheduler in `custom_params`, where the plan reads it (`policy/forecast/turns.py`).
Source: `srt/entrypoints/openai/serving_chat.py`.
"""

import json
import logging
from collections.abc import Sequence
from itertools import takewhile
from operator import eq
from typing import Any, Final

from marconi.engine.hints import mapping_of
from marconi.policy.forecast.turns import MAX_DISTANCE

logger = logging.getLogger(__name__)

KEY: Final = "marconi_next_turn"
"""In `custom_params`: the distance, in tokens."""
_KNOWN: Final = "marconi_next_turns"
"""On the server of chats: the distances by the template's arguments."""
_MAX_KNOWN: Final = 256


def add_distance(serving: Any, request: Any, sampling_params: dict[str, Any]) -> None:
    """Note in the `sampling_params` of a converted chat `request` where its next turn will leave it."""
    if request.continue_final_message or request.input_ids is not None:
        return
    distance = _distance(serving, request)
    custom = sampling_params.get("custom_params") or {}
    if distance is not None and isinstance(custom, dict):
        sampling_params["custom_params"] = {KEY: distance, **custom}


def distance_known_by(req: Any) -> int | None:
    """The distance that came with a request, in tokens; None if none did, or none that makes sense."""
    distance = mapping_of(req.sampling_params.custom_params).get(KEY)
    return distance if type(distance) is int and 0 <= distance <= MAX_DISTANCE else None


def rendered(serving: Any, request: Any, messages: Sequence[Any], *, invites: bool) -> Sequence[int]:
    """The tokens of `messages` as `request` renders its own, with an invitation to answer or without."""
    part = request.model_copy(update={"messages": list(messages), "continue_final_message": False})
    part._format_add_generation_prompt = None if invites else False
    is_multimodal = serving.tokenizer_manager.model_config.is_multimodal
    ids: Sequence[int] = serving._process_messages(part, is_multimodal).prompt_ids
    return ids


def num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """Tokens that both begin with."""
    return sum(1 for _ in takewhile(bool, map(eq, left, right)))


def _distance(serving: Any, request: Any) -> int | None:
    known: dict[str, int | None] | None = getattr(serving, _KNOWN, None)
    if known is None:
        known = {}
        setattr(serving, _KNOWN, known)
    setting = json.dumps([request.chat_template_kwargs, request.reasoning_effort], sort_keys=True, default=repr)
    if setting not in known:
        if len(known) == _MAX_KNOWN:
            known.clear()
        known[setting] = _rendered_distance(serving, request)
    return known[setting]


def _rendered_distance(serving: Any, request: Any) -> int | None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    messages = type(request).model_validate({"messages": turns}).messages
    plain = request.model_copy(update={"tools": None, "tool_choice": "none", "response_format": None})
    try:
        invited = rendered(serving, plain, messages[:1], invites=True)
        gone_on = rendered(serving, plain, messages, invites=True)
    except Exception as error:
        # Whatever a template raises for a conversation that it does not expect: it is learned instead.
        logger.debug("marconi: the template does not say where a next turn goes on: %s", error)
        return None
    distance = len(invited) - num_common(invited, gone_on)
    # With media the prompt is text yet.
    return distance if not isinstance(invited, str) and distance <= MAX_DISTANCE else None
