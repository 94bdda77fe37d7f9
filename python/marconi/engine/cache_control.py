"""`"cache_control": {"type": "ephemeral"}` in a chat request: a state is kept where that message, or part of one, ends.

SGLang's chat models drop the field, so it is read from the body as it came. Where the marked text ends in tokens is
found without knowing the template: the conversation up to it is rendered as SGLang renders the whole, and both begin
with the same tokens up to there. What a template writes behind the last message (an invitation to answer) is left
off, and text that it closes otherwise in the middle of a conversation costs a few tokens, never a wrong position.

    whole       <system> You are kind. </system> <user> Hello        </user> <assistant>
    up to it    <system> You are kind. </system>
    common      <system> You are kind. </system>                      a state is kept here

A template that refuses a conversation without a user's turn is given one, other than what comes; the common part then
ends behind that turn's head. Source: `srt/entrypoints/openai/serving_chat.py`.
"""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from marconi.engine.flags import BACKEND
from marconi.engine.hints import KEY, LEFT_OUT, mapping_of
from marconi.engine.invitation import add_distance, num_common, rendered
from marconi.policy.admission.hints import MAX_HINTS

logger = logging.getLogger(__name__)

FIELD: Final = "cache_control"
_TYPE: Final = "ephemeral"
_ROUTE: Final = "/v1/chat/completions"


class Mark(NamedTuple):
    """What is marked."""

    message: int
    """Which of the messages,"""
    num_parts: int | None
    """and how many parts of its content; None for all of it."""


def around_convert(convert: Callable[..., Any], serving: Any, request: Any, raw_request: Any = None) -> Any:
    """Around `OpenAIServingChat._convert_to_internal_request`: marks become hints, and next turns are noted.

    Raises `ValueError`, which becomes HTTP 400, for a mark that is none.
    """
    marks = _marks_in(serving, raw_request)
    adapted, converted = convert(serving, request, raw_request)
    if marks:
        positions = _positions(serving, converted, adapted.input_ids, marks[:MAX_HINTS])
        _add(adapted.sampling_params, positions, len(marks) - len(positions))
    if serving.tokenizer_manager.server_args.radix_cache_backend == BACKEND:
        add_distance(serving, converted, adapted.sampling_params)
    return adapted, converted


def marks_of(messages: Sequence[Mapping[str, Any]]) -> Iterator[Mark]:
    """What is marked in the `messages` of a body, in their order.

    Raises `ValueError`, in one line, for a value that is not understood.
    """
    for index, message in enumerate(messages):
        content = message.get("content")
        parts = content if isinstance(content, list) else []
        for number, part in enumerate(parts, start=1):
            if isinstance(part, Mapping) and _is_marked(part, f"messages[{index}].content[{number - 1}]"):
                yield Mark(index, None if number == len(parts) else number)
        if _is_marked(message, f"messages[{index}]"):
            yield Mark(index, None)


def _is_marked(marked: Mapping[str, Any], where: str) -> bool:
    value = marked.get(FIELD)
    if value is None:
        return False
    if not isinstance(value, Mapping) or value.get("type") != _TYPE:
        shown = json.dumps(value, ensure_ascii=False)
        expected = json.dumps({"type": _TYPE})
        raise ValueError(f"{where}.{FIELD} is {shown[:80]}, expected {expected}")
    return True


def _marks_in(serving: Any, raw_request: Any) -> list[Mark]:
    if serving.tokenizer_manager.server_args.radix_cache_backend != BACKEND:
        return []
    # Other routes (Anthropic's) come by here with a body of another kind.
    if raw_request is None or not raw_request.url.path.endswith(_ROUTE):
        return []
    body = _body(raw_request)
    return list(dict.fromkeys(marks_of(json.loads(body)["messages"]))) if FIELD.encode() in body else []


def _body(raw_request: Any) -> bytes:
    """The body of a request that has been read: nothing is waited for."""
    try:
        raw_request.body().send(None)
    except StopIteration as done:
        body: bytes = done.value
        return body
    raise AssertionError("a body that was parsed has not been read")


def _positions(serving: Any, request: Any, prompt_ids: Any, marks: Sequence[Mark]) -> list[int]:
    """Where the marked parts of a converted `request` end, in tokens of its prompt; without those not found."""
    if not isinstance(prompt_ids, list) or request.input_ids is not None:
        # With media the prompt is text yet, and with ids of its own it is none of the messages'.
        return []
    found = (_position(serving, request, prompt_ids, mark) for mark in marks)
    return [position for position in found if position]


def _position(serving: Any, request: Any, prompt_ids: list[int], mark: Mark) -> int:
    marked = request.messages[mark.message]
    if mark.num_parts is not None:
        marked = marked.model_copy(update={"content": marked.content[: mark.num_parts]})
    before = [*request.messages[: mark.message], marked]
    for messages in (before, [*before, _another_turn(request, mark.message + 1)]):
        try:
            ids = rendered(serving, request, messages, invites=False)
        except Exception as error:
            # Whatever a template raises for a conversation that it does not expect.
            logger.debug("marconi: a part of a conversation cannot be rendered: %s", error)
        else:
            return num_common(ids, prompt_ids)
    return 0


def _another_turn(request: Any, index: int) -> Any:
    """A user's turn that begins otherwise than the message at `index`, if there is one."""
    following = request.messages[index].content if index < len(request.messages) else ""
    text = "b" if isinstance(following, str) and following[:1] == "a" else "a"
    return type(request).model_validate({"messages": [{"role": "user", "content": text}]}).messages[0]


def _add(sampling_params: dict[str, Any], positions: list[int], num_left_out: int) -> None:
    custom = dict(mapping_of(sampling_params.get("custom_params")))
    given = custom.get(KEY, [])
    # What is not a list is refused later, as it came.
    custom[KEY] = [*given, *positions] if isinstance(given, list) else given
    custom[LEFT_OUT] = num_left_out
    sampling_params["custom_params"] = custom
