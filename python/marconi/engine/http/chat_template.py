"""Positions in a chat's prompt: where marked text ends, and where the template makes the next turn diverge from it.

A client marks a message, a part of one, or the system prompt (`cache_control.py`): a state is kept where that ends.
Where the marked text ends in tokens is found without knowing the template: the conversation up to it is rendered as
SGLang renders the whole, and both begin with the same tokens up to there. What a template writes behind the last
message (an invitation to answer) is left off, and text that it closes otherwise in the middle of a conversation costs a
few tokens, never a wrong position.

    whole       <system> You are kind. </system> <user> Hello        </user> <assistant>
    up to it    <system> You are kind. </system>
    common      <system> You are kind. </system>                      a state is kept here

A template that refuses a conversation without a user's turn is given one that differs from the real next message; the
common part then ends behind that turn's head.

A later turn repeats the invitation in part or not at all: of `<assistant> <think>` a model that reasons keeps
`<assistant>` alone. So before any turn has continued a prompt, a short conversation is rendered as far as the
invitation, and once more with an answer and another turn; the tokens of the first beyond the common beginning are the
distance before its end at which later turns diverge from a prompt:

    invited     <user> a </user> <assistant> <think>
    gone on     <user> a </user> <assistant> b </assistant> <user> c </user> <assistant> <think>
    common      <user> a </user> <assistant>                                  a distance of 1 token

It is rendered once for each setting of the template's arguments, and kept; a request's own messages are not rendered
again.

Where the system prompt ends, with the tools, other chats diverge, which is known as well before any has. A system
prompt that is new is rendered once more, with another user's turn; the end is where that turn differs:

    whole       <tools> <system> You are kind. </system> <user> Hello </user> <assistant>
    another     <tools> <system> You are kind. </system> <user> a
    common      <tools> <system> You are kind. </system> <user>               the system prompt's end

With media, SGLang gets a prompt as text in which one token stands for each medium, and inserts the others later. Up to
the first medium positions are those of that text; a part of a conversation with a medium has none.

Positions and the distance travel to the scheduler in `custom_params` (`hints.py`), where the plan reads them.
Source: `srt/entrypoints/openai/serving_chat.py`.
"""

import json
import logging
from collections.abc import Callable, Sequence
from hashlib import blake2b
from itertools import takewhile
from operator import eq
from typing import Any, Final

from marconi.engine.faults import fails_open
from marconi.engine.http.cache_control import Mark, Marked, read_marks, retaining, system_of
from marconi.engine.http.hints import KEY, LEFT_OUT, NEXT_TURN, SYSTEM_END, mapping_of
from marconi.engine.http.parts import keep
from marconi.engine.launch.flags import BACKEND
from marconi.policy.admission.hints import MAX_HINTS
from marconi.policy.forecast.turns import MAX_DISTANCE

logger = logging.getLogger(__name__)

_KNOWN: Final = "marconi_rendered"
"""On the server of chats: distances by the template's arguments, and ends of system prompts by their digests."""
_MAX_KNOWN: Final = 256
_MEDIA: Final = {"image_url", "video_url", "audio_url", "input_audio"}
"""Types of the parts of a message for which a prompt has more tokens than its template writes."""
_RENDERED: Final = {"messages", "tools", "tool_choice", "response_format", "chat_template_kwargs", "reasoning_effort"}
"""Fields of a request that its template may show."""


def around_convert(convert: Callable[..., Any], serving: Any, request: Any, raw_request: Any = None) -> Any:
    """Around `OpenAIServingChat._convert_to_internal_request`: marks become hints, next turns are noted, the chat kept.

    Raises `ValueError`, which becomes HTTP 400, for a mark that is none.
    """
    is_ours = serving.tokenizer_manager.server_args.radix_cache_backend == BACKEND
    marked = read_marks(raw_request) if is_ours else None
    adapted, converted = convert(serving, request, raw_request)
    if is_ours:
        fails_open(_note)(serving, converted, adapted, marked)
        fails_open(keep)(serving, converted, adapted, raw_request)
    return adapted, converted


def _note(serving: Any, request: Any, adapted: Any, marked: Marked | None) -> None:
    """Note in `adapted`, which a chat `request` was converted to, where its marks end and its next turn leaves it."""
    if marked is not None:
        _add_positions(serving, request, adapted, marked)
    add_distance(serving, request, adapted.sampling_params)
    _add_system_end(serving, request, adapted)


def _add_positions(serving: Any, request: Any, adapted: Any, marked: Marked) -> None:
    """Note where the marked parts of a chat `request` end, in tokens of its prompt, and how many were not found."""
    positions, retained = list[int](), list[int]()
    prompt_ids = _prompt_ids(serving, request, adapted)
    for mark in marked.marks[:MAX_HINTS]:
        position = None if prompt_ids is None else _position(serving, request, prompt_ids, marked, mark)
        if position:
            positions.append(position)
            retained += [position] if mark.retains else []
    if retained:
        adapted.kv_hints = retaining(retained)
    custom = dict(mapping_of(adapted.sampling_params.get("custom_params")))
    given = custom.get(KEY, [])
    # What is not a list is refused later, as it came.
    custom[KEY] = [*given, *positions] if isinstance(given, list) else given
    custom[LEFT_OUT] = len(marked.marks) - len(positions)
    adapted.sampling_params["custom_params"] = custom


def _prompt_ids(serving: Any, request: Any, adapted: Any) -> list[int] | None:
    """The tokens of the prompt of a chat `request`, with one for each medium; None if they are not the messages'."""
    if request.input_ids is not None:
        return None
    if isinstance(adapted.input_ids, list):
        return adapted.input_ids
    if not isinstance(adapted.text, str) or not _has_media(request.messages):
        return None
    ids: list[int] = serving.tokenizer_manager.tokenizer.encode(adapted.text)
    return ids


def _has_media(messages: Sequence[Any]) -> bool:
    """True if a part of the content of `messages` is an image, a video or a sound."""
    contents = (each.content for each in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return any(part.type in _MEDIA for part in parts)


def _position(serving: Any, request: Any, prompt_ids: list[int], marked: Marked, mark: Mark) -> int | None:
    try:
        before = marked.before(serving, request, mark)
    except Exception as error:
        # Whatever a conversion raises for a part of a conversation.
        logger.debug("marconi: a part of a conversation cannot be converted: %s", error)
        return None
    if not before:
        return _system_end(serving, request, lambda: prompt_ids)
    found = _num_common(serving, request, before, prompt_ids)
    if found is None:
        found = _num_common(serving, request, [*before, _another_turn(request, len(before))], prompt_ids)
    return found


def _num_common(serving: Any, request: Any, messages: Sequence[Any], prompt_ids: list[int]) -> int | None:
    """Tokens that `messages` share with the prompt of `request`; None with media or if the template refuses them."""
    if _has_media(messages):
        return None
    try:
        return num_common(rendered(serving, request, messages, invites=False), prompt_ids)
    except Exception as error:
        # Whatever a template raises for a conversation that it does not expect.
        logger.debug("marconi: a part of a conversation cannot be rendered: %s", error)
        return None


def _another_turn(request: Any, index: int) -> Any:
    """A user's turn that begins otherwise than the message at `index`, if there is one."""
    following = request.messages[index].content if index < len(request.messages) else ""
    if isinstance(following, list):
        following = getattr(following[0], "text", "") if following else ""
    text = "b" if following and following[0] == "a" else "a"
    return type(request).model_validate({"messages": [{"role": "user", "content": text}]}).messages[0]


# The next turn


def add_distance(serving: Any, request: Any, sampling_params: dict[str, Any]) -> None:
    """Note in the `sampling_params` of a converted chat `request` where its next turn will leave it."""
    if request.continue_final_message or request.input_ids is not None:
        return
    setting = json.dumps([request.chat_template_kwargs, request.reasoning_effort], sort_keys=True, default=repr)
    distance = _found_once(serving, setting, lambda: _distance(serving, request))
    custom = sampling_params.get("custom_params") or {}
    if distance is not None and isinstance(custom, dict):
        sampling_params["custom_params"] = {NEXT_TURN: distance, **custom}


def _found_once(serving: Any, key: str, find: Callable[[], int | None]) -> int | None:
    """The answer of `find`, kept by `key`."""
    known: dict[str, int | None] | None = getattr(serving, _KNOWN, None)
    if known is None:
        known = {}
        setattr(serving, _KNOWN, known)
    if key not in known:
        if len(known) == _MAX_KNOWN:
            known.clear()
        known[key] = find()
    return known[key]


def _distance(serving: Any, request: Any) -> int | None:
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    messages = type(request).model_validate({"messages": turns}).messages
    plain = request.model_copy(update={"tools": None, "tool_choice": "none", "response_format": None})
    try:
        invited = rendered(serving, plain, messages[:1], invites=True)
        continued = rendered(serving, plain, messages, invites=True)
    except Exception as error:
        # Whatever a template raises for a conversation that it does not expect: it is learned instead.
        logger.debug("marconi: the template does not say where a next turn resumes: %s", error)
        return None
    distance = len(invited) - num_common(invited, continued)
    # With media the prompt is text yet.
    return distance if not isinstance(invited, str) and distance <= MAX_DISTANCE else None


# The system prompt


def _add_system_end(serving: Any, request: Any, adapted: Any) -> None:
    """Note in `adapted`, which a chat `request` was converted to, where its system messages and tools end."""
    custom = adapted.sampling_params.get("custom_params") or {}
    if isinstance(custom, dict) and request.input_ids is None:
        end = _system_end(serving, request, lambda: _prompt_ids(serving, request, adapted))
        if end:
            adapted.sampling_params["custom_params"] = {SYSTEM_END: end, **custom}


def _system_end(serving: Any, request: Any, prompt_ids: Callable[[], list[int] | None]) -> int | None:
    """Tokens of the prompt of `request` up to the end of its system messages and tools; None if it has neither."""
    system = system_of(request)
    if not (system or request.tools):
        return None
    shown = request.model_copy(update={"messages": system}).model_dump_json(include=_RENDERED)
    messages = [*system, _another_turn(request, len(system))]

    def find() -> int | None:
        ids = prompt_ids()
        return None if ids is None else _num_common(serving, request, messages, ids)

    return _found_once(serving, blake2b(shown.encode(), digest_size=16).hexdigest(), find)


# Rendering


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
