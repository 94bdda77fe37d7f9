"""The part of a chat in which its prompt diverged from what the cache knew, added to an explanation of its request.

The scheduler knows the position, the process that answers HTTP has the chat:

    a chat is converted     it is kept as it is, by a number that SGLang's object of its request carries
    its answer begins       its `rid` is noted: SGLang has given it one by now
    an explanation passes   the chat is rendered again, and the position named (`chat/parts.py`)

An explanation is that of an answer whose request asks for it, or a line of `GET /marconi/requests`. Nothing is rendered
otherwise, and nothing is kept under `--marconi-explain off`. The latest chats are kept, as many as the list has and at
most `MAX_KEPT_BYTES` of bodies.

A chat that names an earlier one by the `id` of its answer (`COMPARISON`, as OpenAI's clients do) asks for its
explanation, which then says what has changed since, and what to do about it:

    "since": {"request": "9f2...", "num_common_tokens": 41, "changed": "system", "part": {...}, "hint": "..."}

The position is that of the first token which the request's name space does not know: there its first such miss begins.
With pages of several tokens it is a page's; that is named if it lies in one part, without the kind of the field.
`diverged` names the exact token.

A prompt with media is longer than its text. Positions up to the first medium are those of the text, and those behind
the last are counted from the end; in between, a single medium alone has a name. What cannot be named has no part: a
chat that is no longer kept, one of several choices, a template that treats marked texts otherwise, a tokenizer that
does not decode a beginning to the beginning of the text.

Owner: the process that answers HTTP.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from itertools import takewhile
from operator import eq
from typing import Any, Final

from marconi.chat.parts import TEMPLATE, TOOLS, Fields, PromptPart, PromptParts
from marconi.engine.http.cache_control import body_of
from marconi.engine.http.diverged import FIELD
from marconi.engine.launch.flags import of_process
from marconi.engine.reports.explain import EXPLAIN, MAX_LATEST
from marconi.policy.causes import Cause

logger = logging.getLogger(__name__)

PART: Final = "part"
"""The key of an explanation that holds it."""
MAX_KEPT_BYTES: Final = 64 << 20
MAX_NAMED_TOKENS: Final = 100_000
"""Tokens of prompts rendered for one list: some tenths of a second, in which nothing else is answered."""
_CHATS: Final = "marconi_chats"
"""On the tokenizer manager: None where nothing is explained."""
_NUMBER: Final = "marconi_chat"
"""On SGLang's object of a request: a number, as SGLang may write the object to a file."""
_UNKNOWN: Final = (Cause.OTHER_NAMESPACE, Cause.FIRST_SEEN)
SINCE: Final = "since"
"""The key of an explanation that holds what has changed."""
COMPARISON: Final = "comparison_response_id"
"""The field that names an earlier request; SGLang gives Anthropic's messages ids of their own, which name none."""
NOT_KEPT: Final = "not kept"
"""In place of what has changed since a request that is not among the latest of this process."""
_HINTS: Final = {
    "model": "another model has another cache",
    "system": "keep the system prompt through a conversation",
    TOOLS: "give all tools from the first request on, in one order",
    TEMPLATE: "keep the template's arguments, such as the effort, through a conversation",
    "messages": "append to a conversation: all behind an edit is computed anew",
}
_OF_A_FIELD: Final = "put what changes from request to request into the last message"
"""The hint for a date or a number before the messages."""


class KeptChat:
    """A chat whose prompt may have to be explained."""

    __slots__ = ("_part", "_position", "_request", "_serving", "num_bytes", "rid", "since")

    def __init__(self, serving: Any, request: Any, num_bytes: int, since: str | None = None) -> None:
        self._serving = serving
        self._request = request
        self._position = -1
        self._part: PromptPart | None = None
        self.num_bytes = num_bytes
        self.since = since
        """The id of an earlier request, which this one names."""
        self.rid: str | None = None

    def is_named(self, position: int) -> bool:
        """True if `part` has an answer already."""
        return self._position == position

    def part(self, position: int, num_prompt_tokens: int, num_tokens: int) -> PromptPart | None:
        """The part in which the `num_tokens` tokens at `position` lie; rendered once."""
        if not self.is_named(position):
            self._position, self._part = position, None
            try:
                self._part = _found(self._serving, self._request, position, num_prompt_tokens, num_tokens)
            except Exception as error:
                # Whatever a template raises for a chat that is not the client's own.
                logger.debug("marconi: a position of a chat cannot be named: %s", error)
        return self._part

    def changed_since(self, other: "KeptChat") -> dict[str, Any]:
        """The change since an earlier chat; whatever a template raises for either."""
        (ids, _), (before, _) = (_rendered(chat._serving, chat._request) for chat in (self, other))
        num_common = sum(1 for _ in takewhile(bool, map(eq, ids, before)))
        told: dict[str, Any] = {"request": other.rid, "num_common_tokens": num_common}
        if self._request.model != other._request.model:
            return told | {"changed": "model", "hint": _HINTS["model"]}
        if num_common == len(before):
            return told | {"changed": "nothing" if len(ids) == num_common else "more"}
        part = self.part(num_common, len(ids), 1)
        changed = None if part is None else part.where.partition("[")[0]
        if changed in (None, TEMPLATE) and self._request.tools != other._request.tools:
            # A section of tools begins and ends with the template's own words.
            changed = TOOLS
        is_field = part is not None and part.kind in ("date", "number") and changed != "messages"
        return (
            told
            | ({} if changed is None else {"changed": changed, "hint": _OF_A_FIELD if is_field else _HINTS[changed]})
            | ({} if part is None else {PART: part.as_dict()})
        )


class Chats:
    """The latest chats of a process, by number."""

    def __init__(self) -> None:
        self._kept: dict[int, KeptChat] = {}
        self._next = 0
        self._num_bytes = 0

    def keep(self, chat: KeptChat) -> int:
        """Keep one, and drop the oldest beyond the bounds."""
        number, self._next = self._next, self._next + 1
        self._kept[number] = chat
        self._num_bytes += chat.num_bytes
        while len(self._kept) > MAX_LATEST or self._num_bytes > MAX_KEPT_BYTES:
            self._num_bytes -= self._kept.pop(next(iter(self._kept))).num_bytes
        return number

    def get(self, number: int) -> KeptChat | None:
        """The chat of this number, if it is kept."""
        return self._kept.get(number)

    def by_rid(self) -> dict[str, KeptChat]:
        """Those whose request has a `rid`, by it."""
        return {chat.rid: chat for chat in self._kept.values() if chat.rid is not None}


def keep(serving: Any, request: Any, adapted: Any, raw_request: Any) -> None:
    """Keep the chat `request`, which was converted to `adapted`, if requests are explained here."""
    manager = serving.tokenizer_manager
    if not hasattr(manager, _CHATS):
        setattr(manager, _CHATS, Chats() if of_process().explain else None)
    chats: Chats | None = getattr(manager, _CHATS)
    if chats is None or raw_request is None or request.input_ids is not None:
        return
    body = body_of(raw_request)
    since = _named(body)
    if since is not None:
        adapted.sampling_params["custom_params"] = {
            **(adapted.sampling_params.get("custom_params") or {}),
            EXPLAIN: True,
        }
    setattr(adapted, _NUMBER, chats.keep(KeptChat(serving, request, len(body), since)))


def _named(body: bytes) -> str | None:
    """The id of the earlier request that a body names, if it names one."""
    named = json.loads(body).get(COMPARISON) if COMPARISON.encode() in body else None
    return named if isinstance(named, str) else None


def note_rid(manager: Any, obj: Any) -> None:
    """The answer to SGLang's object of a request begins."""
    chat = _chat_of(manager, obj)
    if chat is not None:
        chat.rid = obj.rid


def add_part(explanation: dict[str, Any], manager: Any, obj: Any) -> None:
    """Add to the `explanation` of a request, as JSON has it, in which part of its chat it diverged, and since when."""
    chat = _chat_of(manager, obj)
    _add(explanation, manager, chat)
    if chat is not None and chat.since is not None:
        add_since(explanation, manager, chat, chat.since)


def add_since_to(requests: Sequence[dict[str, Any]], manager: Any, rid: str, since: str) -> None:
    """Add to those of `requests` whose ids begin with `rid` what has changed since one whose id begins with `since`.

    As many as a list has time for, the first of them in any case.
    """
    chats: Chats | None = getattr(manager, _CHATS, None)
    kept, num_left = {} if chats is None else chats.by_rid(), MAX_NAMED_TOKENS
    for each in requests:
        if num_left > 0 and each["rid"].startswith(rid) and each["rid"] in kept:
            num_left -= each["num_prompt_tokens"]
            add_since(each, manager, kept[each["rid"]], since)


def add_since(explanation: dict[str, Any], manager: Any, chat: KeptChat, since: str) -> None:
    """Add what has changed in `chat` since the request whose id begins with `since`."""
    chats: Chats | None = getattr(manager, _CHATS, None)
    kept = {} if chats is None else chats.by_rid()
    other = kept.get(since) or next((each for rid, each in kept.items() if rid.startswith(since)), None)
    told = {"request": since, "changed": NOT_KEPT} if other is None or other is chat else chat.changed_since(other)
    explanation[SINCE] = told
    explanation["line"] += f"; since {told['request'][:12]}: {_in_words(told)}"


def _in_words(told: Mapping[str, Any]) -> str:
    changed = told.get("changed", "unknown")
    if changed == NOT_KEPT:
        return "that request is not kept"
    words = {"nothing": "nothing has changed", "more": "it was continued"}.get(changed, f"{changed} changed")
    return f"{words}, {told['num_common_tokens']:,} tokens in common"


def add_parts(requests: Sequence[dict[str, Any]], manager: Any) -> None:
    """Add the parts to the latest `requests`; those that a list has no time for have theirs in the next."""
    chats: Chats | None = getattr(manager, _CHATS, None)
    kept, num_left = {} if chats is None else chats.by_rid(), MAX_NAMED_TOKENS
    for each in requests:
        chat, position = kept.get(each["rid"]), _position(each)
        if chat is not None and position is not None and (num_left > 0 or chat.is_named(position)):
            num_left -= 0 if chat.is_named(position) else each["num_prompt_tokens"]
            _add(each, manager, chat)


def _chat_of(manager: Any, obj: Any) -> KeptChat | None:
    number, chats = getattr(obj, _NUMBER, None), getattr(manager, _CHATS, None)
    return None if number is None or chats is None else chats.get(number)


def _add(explanation: dict[str, Any], manager: Any, chat: KeptChat | None) -> None:
    position = _position(explanation)
    if chat is None or position is None:
        return
    num_tokens = 1 if FIELD in explanation else manager.server_args.page_size or 1
    part = chat.part(position, explanation["num_prompt_tokens"], num_tokens)
    if part is not None:
        explanation[PART] = part.as_dict()
        explanation["line"] = with_part(explanation["line"], _start_of_unknown(explanation) or position, part)


def with_part(line: str, position: int, part: PromptPart) -> str:
    """The `line` of an explanation with the part in which it diverged, at that position or at its end."""
    before, diverged, after = line.partition(f"diverged at token {position:,}")
    return f"{before}{diverged or f'; diverged at token {position:,}'}, in {part.describe()}{after}"


def _position(explanation: Mapping[str, Any]) -> int | None:
    """Tokens of the prompt that are known; None if all of it is, or nothing."""
    if FIELD in explanation:
        position: int = explanation[FIELD]["position"]
        return position
    return _start_of_unknown(explanation)


def _start_of_unknown(explanation: Mapping[str, Any]) -> int | None:
    starts = (miss["start"] for miss in explanation["missed"] if miss["cause"] in _UNKNOWN)
    return next(starts, None) or None


def _found(serving: Any, request: Any, position: int, num_prompt_tokens: int, num_tokens: int) -> PromptPart | None:
    ids, text = _rendered(serving, request)
    messages = [message.model_dump(exclude_none=True) for message in request.messages]
    tools = [tool.model_dump(exclude_none=True) for tool in request.tools or []]

    def render(messages: Sequence[Fields], tools: Sequence[Fields]) -> str:
        made = type(request).model_validate({"model": request.model, "messages": messages, "tools": tools or None})
        changed = request.model_copy(update={"messages": made.messages, "tools": made.tools})
        return _rendered(serving, changed)[1]

    parts = PromptParts(messages, tools, render)
    if parts.text != text:
        return None
    if parts.num_media:
        return _beside_media(serving, parts, ids, position, num_prompt_tokens) if num_tokens == 1 else None
    start, end = (_end(serving, ids, number, text) for number in (position, position + num_tokens))
    if start is None or end is None:
        return None
    return parts.at(start, max(end, start + 1)) if num_tokens == 1 else parts.around(start, end)


def _beside_media(
    serving: Any, parts: PromptParts, ids: list[int], position: int, num_prompt_tokens: int
) -> PromptPart | None:
    """The part at a position of a prompt that has other tokens for each medium in place of one."""
    if not parts.media:
        return None
    first, last = parts.media[0], parts.media[-1]
    for at, is_right in (
        (position, lambda start: start < first[1]),
        (position - (num_prompt_tokens - len(ids)), lambda start: start >= last[1]),
    ):
        start, end = (_end(serving, ids, number, parts.text) for number in (at, at + 1))
        if start is not None and end is not None and is_right(start):
            return parts.at(start, max(end, start + 1))
    return parts.at(first[0], first[1]) if parts.num_media == 1 else None


def _rendered(serving: Any, request: Any) -> tuple[list[int], str]:
    """The tokens of a chat with one for each medium, and their text."""
    is_multimodal = serving.tokenizer_manager.model_config.is_multimodal
    # What SGLang fills in, it fills in a copy.
    ids: list[int] = serving._process_messages(request.model_copy(), is_multimodal).prompt_ids
    return ids, _decoded(serving, ids)


def _end(serving: Any, ids: list[int], num_tokens: int, text: str) -> int | None:
    """Characters of the first tokens; None where they do not decode to the beginning of `text`."""
    if not 0 <= num_tokens <= len(ids):
        return None
    before = _decoded(serving, ids[:num_tokens]).rstrip("\ufffd")
    return len(before) if text.startswith(before) else None


def _decoded(serving: Any, ids: list[int]) -> str:
    tokenizer = serving.tokenizer_manager.tokenizer
    text: str = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text
