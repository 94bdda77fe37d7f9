"""The log of an OpenAI-style API: JSONL, a request a line, as a server, a proxy or a batch file writes it.

    body       `messages`, with `tools` and `chat_template_kwargs`, or `prompt`, a text or token ids: in the line, in
               its `body` or in its `request`; Anthropic's `system` beside `messages`; `cache_salt` is a namespace
    answer     `response`, `output` or `completion`: a text, OpenAI's `choices` or Anthropic's `content`, also in its
               `body`; else the assistant's message with which a later request of the session continues
    length     of an answer as the server counted it (`usage`, else `output_length`). Where it exceeds the visible
               answer, of an estimate by a quarter, the rest is thinking that was left out, and comes first; an answer
               that is not there, or cannot be rendered (a call that was cut off), has that length or else 0. Such
               tokens have ids of the request's own, so that no later prompt has them
    time       `timestamp`, `ts`, `time`, `created`, `created_at`, `startTime` or `start_time` of the line, the first
               that is there, or the response's `created`: ISO 8601 (UTC without a zone) or a number since any zero, in
               seconds below 1e11, milliseconds below 1e14 and microseconds below 1e17. Below 1e8 they are no clock's:
               `timestamp` beside `output_length` is in milliseconds; others are in seconds if they span less than 1,000
               and else need `time_unit`
    session    `session_id`, `conversation_id` or `chat_id` of the line or the body, else by growing messages

Lines need not be in order of time; equal times keep the file's. Sessions start as a Poisson process of `session_rate`
(where lines have no times: 1 a second) and keep their pauses, which without times are those of `sharegpt`.

Growing messages: a request continues the earlier one with the most messages that are a proper beginning of its own, of
several the latest that none continues yet, or else the latest. Messages are equal by role, text and calls; reasoning,
which clients drop, does not count. Neither does a beginning of system messages alone. Each `prompt` without
a name is a session of its own.

Lines of failed calls without an answer and of embeddings are left out; they and all that is approximate are counted.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from marconi.policy.request import Request, Trace, pack
from marconi.replay.trace.api_line import Body, Line, Message, left_out, line_of
from marconi.replay.trace.arrivals import SESSION_RATE, Pace, session_starts
from marconi.replay.trace.base import BadRecord, Reader, ReadOptions, ReadProgress, SessionNumbers, arranged, placed
from marconi.replay.trace.chats import Chats, MediaIds, chats, has_mark, joined
from marconi.replay.trace.decode import clock_s, shown
from marconi.replay.trace.identity import MAX_ID, DenseIds
from marconi.replay.trace.source import Source
from marconi.replay.trace.tokens import ESTIMATED

_UNITS_S = ((1e11, 1.0), (1e14, 1e-3), (1e17, 1e-6))
"""The number that a time in each unit is below, and the unit."""
_RELATIVE_S = 1e8
"""A number below is no clock's time, but counts from the start."""
_SURE_S = 1000.0
"""A log without a clock that lasts no longer is taken to be in seconds."""
_OPENING = ("system", "developer")
_PROMPT_SLACK = 1.5
"""Times the tokens of a line's prompt that a server may count before it is said."""
_VISIBLE_SLACK = 1.25
"""Times its estimated tokens that a visible answer may have before the rest is taken for thinking."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A line that was read."""

    line: Line
    request: Request
    """Its arrival is the log's time, or 0 without one."""
    has_time: bool
    session: str | int | None
    node: int | None
    """The node of its messages in `_Prefixes`; None for a named session and other prompts."""
    place: tuple[str, int]
    """Document and line."""
    index: int
    """Its own among all lines that were read."""


def _read(source: Source, options: ReadOptions, watch: ReadProgress) -> Trace:
    """Every request of the sessions kept by `options`."""
    media = MediaIds(options.model_folder or options.tokenizer)
    is_estimate = options.tokenizer is None and options.model_folder is None
    texts = _Texts(chats(options.tokenizer, options.model_folder, media), _VISIBLE_SLACK if is_estimate else 1.0)
    if is_estimate:
        watch.remark(ESTIMATED)
    times = _Times(options.time_unit)
    prefixes = _Prefixes()
    salts = DenseIds({"": 0})
    entries: list[_Entry] = []
    for document in source.documents():
        for number, text in document.lines():
            with watch.at(document.name, number):
                if kind := left_out(text):
                    watch.note(f"left out, {kind}")
                    continue
                line = line_of(text)
                time_s, body = times.seconds(line), line.asked
                chat = body.chat
                path, num_prompt, num_output = texts.path(line, line.answer, len(entries))
                namespace = salts[body.cache_salt or ""]
                known, arrival_s = num_prompt + num_output, time_s or 0.0
                session = line.session if body.session is None else body.session
                entries.append(
                    _Entry(
                        line,
                        Request(path, num_prompt, num_output, known, arrival_s, namespace=namespace),
                        time_s is not None,
                        session,
                        prefixes.node(namespace, chat) if chat and session is None else None,
                        (document.name, number),
                        len(entries),
                    )
                )
                for what in _approximations(line, chat, num_prompt, media):
                    watch.note(what)
    times.check()
    if has_times := any(entry.has_time for entry in entries):
        entries = _timed(entries, watch)
    requests = _requests(entries, prefixes, SessionNumbers(options), texts)
    return arranged(source, 1, (placed if has_times else _drawn)(requests, options))


OPENAI = Reader(
    "openai",
    lambda head: bool({"messages", "prompt"} & head.keys),
    _read,
    uses=frozenset({"session_rate", "think_time_s", "max_sessions", "tokenizer", "time_unit"}),
)


def _approximations(line: Line, chat: Iterable[Message], num_prompt: int, media: MediaIds) -> Iterator[str]:
    """Differences between the request of a line and that which was sent."""
    if any(has_mark(joined(message.fields.get("content"))) for message in chat):
        known = "as the model's configuration says" if media.is_known else "for want of the model's own number"
        yield f"an image, sound or file stands for {media.num_tokens} tokens, {known}"
    if max((usage.num_prompt for usage in line.usages), default=0) > _PROMPT_SLACK * num_prompt:
        yield "the server counted many more tokens of the prompt than the line holds"
    if line.answer is None and line.num_output is None and line.answers:
        yield "the answer has no shape that is known, and counts as none"


@dataclass(frozen=True, slots=True)
class _Texts:
    """Cuts what was asked and answered into tokens."""

    chats: Chats
    visible_slack: float
    """An answer has thinking that is not shown if the server counted more than so many times its visible tokens."""

    def path(self, line: Line, answer: Message | None, index: int) -> tuple[bytes, int, int]:
        """Packed ids of prompt and answer, and their numbers."""
        body, count = line.asked, line.num_output
        if count is not None and answer is not None and answer.is_cut:
            answer = None
        if body.messages:
            prompt, said = self._chat(body, answer, count)
        else:
            prompt = self.chats.text(body.prompt, is_prompt=True) if isinstance(body.prompt, str) else body.prompt or ()
            said = self._text(answer)
        if not prompt:
            raise BadRecord("the prompt must hold at least one token, got none")
        num_hidden = (count or 0) - len(said)
        if num_hidden <= (self.visible_slack - 1) * len(said):
            num_hidden = 0
        # No other request has this id, so none has this thinking, or this answer where none of it is there.
        ids = [*([MAX_ID - index] * num_hidden), *said]
        return pack(prompt) + pack(ids), len(prompt), len(ids)

    def _chat(self, body: Body, answer: Message | None, count: int | None) -> tuple[Sequence[int], Sequence[int]]:
        fields = body.fields
        try:
            return self.chats.chat(fields, None if answer is None else answer.fields)
        except BadRecord:
            if answer is None:
                raise
        # The answer alone is at fault.
        prompt, _ = self.chats.chat(fields, None)
        return prompt, self._text(answer) if count is None else ()

    def _text(self, answer: Message | None) -> Sequence[int]:
        if answer is None:
            return ()
        calls = "".join(f"{call.function.name}{call.function.arguments}" for call in answer.tool_calls or ())
        fields = answer.fields
        text = f"{fields.get('reasoning_content') or ''}{joined(fields.get('content'))}{calls}"
        return self.chats.text(text, is_prompt=False)


# Times


class _Times:
    """Tells the unit of times."""

    def __init__(self, unit: str | None) -> None:
        self._unit_s = None if unit is None else {"s": 1.0, "ms": 1e-3, "us": 1e-6}[unit]
        self._first_s, self._last_s = math.inf, -math.inf
        """The times whose unit nothing says lie between."""

    def seconds(self, line: Line) -> float | None:
        """When a line came, in seconds since any zero; None where no field says."""
        came = line.came
        if came is None:
            return None
        name, value = came
        if isinstance(value, str):
            return clock_s(name, value)
        if not 0 <= value < _UNITS_S[-1][0]:
            raise BadRecord(f"{name} must be from 0 to below {_UNITS_S[-1][0]:g}, got {shown(value)}")
        if self._unit_s is not None:
            return value * self._unit_s
        if value < _RELATIVE_S and name == "timestamp" and line.output_length is not None:
            return value * 1e-3  # Load generators write these two together, and milliseconds.
        if value < _RELATIVE_S:
            self._first_s, self._last_s = min(self._first_s, value), max(self._last_s, value)
        return next(value * unit_s for below, unit_s in _UNITS_S if value < below)

    def check(self) -> None:
        """`ValueError` where times may as well be milliseconds."""
        if self._last_s - self._first_s >= _SURE_S:
            raise ValueError(
                f"--time-unit must say whether times from {self._first_s:g} to {self._last_s:g}, which are no clock's, "
                "are in s, ms or us"
            )


def _timed(entries: Iterable[_Entry], watch: ReadProgress) -> list[_Entry]:
    """The entries in order of time; bad ones have none."""
    found: list[_Entry] = []
    for entry in entries:
        with watch.at(*entry.place):
            if not entry.has_time:
                raise BadRecord("a time is missing, which other lines have")
            found.append(entry)
    return sorted(found, key=lambda entry: entry.request.arrival_s)


def _drawn(requests: Iterable[Request], options: ReadOptions) -> list[Request]:
    """The requests at drawn times, session by session."""
    rng = np.random.default_rng(options.seed)
    pace = Pace(options.think_time_s)
    starts = session_starts(SESSION_RATE if options.session_rate is None else options.session_rate, rng)
    found: list[Request] = []
    for request in sorted(requests, key=lambda request: request.session):
        last = found[-1] if request.turn else None
        arrival_s = next(starts) if last is None else last.arrival_s + pace.gap_s(last.num_output_tokens, rng)
        found.append(replace(request, arrival_s=arrival_s))
    return found


# Sessions


class _Prefixes:
    """The beginnings of chats, a node each, and the sessions whose last request had these messages."""

    def __init__(self) -> None:
        self._nodes: dict[tuple[int, bytes], int] = {}
        self._parents: list[int] = []
        self._is_opening: list[bool] = []
        self._ends: dict[int, _End] = {}

    def node(self, namespace: int, messages: Iterable[Message]) -> int:
        """The node of all `messages`."""
        node = -1 - namespace
        for message in messages:
            key, number = (node, message.digest), len(self._parents)
            if key not in self._nodes:
                self._nodes[key] = number
                self._parents.append(node)
                self._is_opening.append(message.role in _OPENING and (node < 0 or self._is_opening[node]))
            node = self._nodes[key]
        return node

    def session(self, node: int, new: int) -> int:
        """The session that a request with the messages of `node` continues, or else `new`."""
        before = self._parents[node]
        while before >= 0 and before not in self._ends:
            before = self._parents[before]
        session = new
        if before >= 0 and not self._is_opening[before]:
            end = self._ends[before]
            session = end.open.pop() if end.open else end.latest
        self._ends.setdefault(node, _End([], session)).add(session)
        return session


@dataclass(slots=True)
class _End:
    """The sessions of the requests with the same messages, in order of time."""

    open: list[int]
    """Those that no request continues yet."""
    latest: int

    def add(self, session: int) -> None:
        self.open.append(session)
        self.latest = session


def _requests(entries: Iterable[_Entry], prefixes: _Prefixes, numbers: SessionNumbers, texts: _Texts) -> list[Request]:
    """The requests of the sessions that are kept, with their turns."""
    found: list[Request] = []
    last: dict[int, tuple[int, _Entry]] = {}
    """The latest request of each session: its place in `found`, and its entry."""
    for index, entry in enumerate(entries):
        # A name and a session that was found are never equal: a tuple is no name.
        key: Hashable = entry.session
        if key is None:
            key = (index if entry.node is None else prefixes.session(entry.node, index),)
        number = numbers.number(key)
        if number is not None:
            turn = 0
            if number in last:
                place, before = last[number]
                turn = found[place].turn + 1
                found[place] = _answered_in(entry, before, found[place], texts)
            last[number] = len(found), entry
            found.append(replace(entry.request, session=number, turn=turn))
    return found


def _answered_in(entry: _Entry, before: _Entry, request: Request, texts: _Texts) -> Request:
    """`request`, that of `before`, with its answer from the messages of `entry` if it has none and they hold one."""
    if before.line.answer is not None or not before.line.asked.messages:
        return request
    asked, later = before.line.asked.chat, entry.line.asked.chat
    if len(later) <= len(asked):
        return request
    said = later[len(asked)]
    if said.role != "assistant" or any(one.digest != other.digest for one, other in zip(asked, later, strict=False)):
        return request
    # A rest that is thinking keeps the id that the request's answer has.
    path, num_prompt, num_output = texts.path(before.line, said, before.index)
    return replace(request, path=path, num_output_tokens=num_output, num_known_tokens=num_prompt + num_output)
