"""The log of an OpenAI-style API: JSONL, a request a line, as a server, a proxy or a batch file writes it.

    body       `messages`, with `tools` and `chat_template_kwargs`, or `prompt`, a text or token ids: in the line, in
               its `body` or in its `request`; `cache_salt` is a namespace. Anthropic's `system` is the first message
    answer     `response`, `output` or `completion`: a text, OpenAI's `choices` or Anthropic's `content`, also in its
               `body`; else the assistant's message with which a later request of the session continues, if it is no
               shorter than `usage.completion_tokens` (reasoning, which clients drop, is missing from a shorter one).
               Reasoning is `reasoning_content` or, in newer servers and proxies, `reasoning`
    length     of an answer that is not there `usage.completion_tokens` or `output_tokens`, else 0; its ids are the
               request's own, so that no later prompt has them; likewise of an answer that was cut off inside a call
    left out   calls that failed, by `status`, `error_str` or the response's `status_code`, and calls for embeddings, by
               `call_type`: a remark counts each kind, as no server kept anything of them
    time       `timestamp`, `ts`, `time`, `created`, `created_at`, `startTime` or `start_time` of the line, the first
               that is there, or the response's `created`: ISO 8601 (UTC without a zone) or a number since any zero, in
               seconds below 1e11, milliseconds below 1e14 and microseconds below 1e17
    session    `session_id`, `conversation_id` or `chat_id` of the line or the body, else by growing messages

Lines need not be in order of time; equal times keep the file's. Sessions start as a Poisson process of `session_rate`
(where lines have no times: 1 a second) and keep their pauses, which without times are those of `sharegpt`.

Growing messages: a request continues the earlier one with the most messages that are a proper beginning of its own, of
several the latest that none continues yet, or else the latest. Messages are equal by role, text and calls; reasoning,
which clients drop, does not count. Neither does a beginning of system messages alone. Each `prompt` without
a name is a session of its own.
"""

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from marconi.policy.request import Request, Trace, pack
from marconi.replay.trace.arrivals import Pace, session_starts
from marconi.replay.trace.base import BadRecord, ReadOptions, ReadProgress, SessionNumbers, arranged, placed
from marconi.replay.trace.chats import Chats, PlainChats, chats, joined
from marconi.replay.trace.decode import Decoder, Id, Tokens, shown
from marconi.replay.trace.identity import MAX_ID, DenseIds
from marconi.replay.trace.sharegpt import SESSION_RATE
from marconi.replay.trace.source import FileHeader, Source
from marconi.replay.trace.tokens import tokenizer

_UNITS_S = ((1e11, 1.0), (1e14, 1e-3), (1e17, 1e-6))
"""The number that a time in each unit is below, and the unit."""
_OPENING = ("system", "developer")
_FAILED = ("failure", "failed", "error")
_LEAST_ERROR = 400


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text or "{}")
    except msgspec.DecodeError:
        return False
    return True


class _Part(msgspec.Struct):
    type: str
    text: str = ""

    def __post_init__(self) -> None:
        if self.type != "text":
            raise BadRecord(f"type must be text, which alone has tokens here, got {shown(self.type)}")


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] = "{}"


class _Call(msgspec.Struct, omit_defaults=True):
    function: _Function
    id: str | None = None
    index: int | None = None


class _Message(msgspec.Struct, omit_defaults=True):
    role: str = "assistant"
    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    def __post_init__(self) -> None:
        if self.reasoning is not None:
            self.reasoning_content, self.reasoning = self.reasoning_content or self.reasoning, None

    @property
    def is_cut(self) -> bool:
        """True if it ends inside a call, whose arguments are no JSON then."""
        written = [call.function.arguments for call in self.tool_calls or ()]
        return not all(_is_json(each) for each in written if isinstance(each, str))

    @property
    def fields(self) -> dict[str, Any]:
        """The message as a template takes it."""
        return {**msgspec.to_builtins(self), "role": self.role}

    @property
    def digest(self) -> bytes:
        """Equal for messages that say the same."""
        content = [part.text for part in self.content] if isinstance(self.content, list) else [self.content or ""]
        calls = [call.function for call in self.tool_calls or ()]
        return blake2b(msgspec.json.encode((self.role, content, self.tool_call_id, calls)), digest_size=16).digest()


class _Tool(msgspec.Struct):
    function: dict[str, Any]


class _Body(msgspec.Struct):
    system: str | list[_Part] | None = None
    messages: list[_Message] | None = None
    prompt: str | list[Id] | None = None
    tools: list[_Tool] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None
    session_id: str | int | None = None
    conversation_id: str | int | None = None
    chat_id: str | int | None = None

    def __post_init__(self) -> None:
        if self.system and self.messages:
            self.messages, self.system = [_Message("system", self.system), *self.messages], None

    @property
    def session(self) -> str | int | None:
        """Its session's name."""
        named = (self.session_id, self.conversation_id, self.chat_id)
        return next((name for name in named if name is not None), None)


class _Usage(msgspec.Struct):
    completion_tokens: Tokens | None = None
    output_tokens: Tokens | None = None


class _Choice(msgspec.Struct):
    message: _Message | None = None
    text: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] | None = None
    content: str | list[_Part] | None = None
    usage: _Usage | None = None
    created: float | None = None


class _Response(_Answer):
    body: _Answer | str | None = None
    status_code: int | None = None


class _Line(_Body):
    body: _Body | str | None = None
    request: _Body | str | None = None
    response: _Response | str | None = None
    output: _Response | str | None = None
    completion: _Response | str | None = None
    usage: _Usage | None = None
    status: str | int | None = None
    error_str: str | None = None
    call_type: str | None = None
    timestamp: float | str | None = None
    ts: float | str | None = None
    time: float | str | None = None
    created: float | str | None = None
    created_at: float | str | None = None
    start_time_camel: float | str | None = msgspec.field(default=None, name="startTime")
    start_time: float | str | None = None

    @property
    def left_out_as(self) -> str | None:
        """The kind of call that it is, if no server kept anything of it."""
        if self.call_type is not None and "embedding" in self.call_type:
            return "calls for embeddings"
        codes = (each.status_code or 0 for each in self.answers if isinstance(each, _Response))
        has_failed = self.status in _FAILED or bool(self.error_str) or any(code >= _LEAST_ERROR for code in codes)
        return "calls that failed" if has_failed else None

    @property
    def asked(self) -> _Body:
        """The request's body."""
        for body in (self, self.body, self.request):
            if isinstance(body, _Body) and (body.messages or body.prompt):
                return body
        raise BadRecord("messages or prompt must hold what was asked, in the line, its body or its request, got none")

    @property
    def answers(self) -> list[_Answer | str]:
        """The answers that the line holds, the innermost first."""
        found: list[_Answer | str] = []
        for answer in (self.response, self.output, self.completion):
            inner = answer.body if isinstance(answer, _Response) else None
            found += [each for each in (inner, answer) if each is not None]
        return found

    @property
    def time_s(self) -> float | None:
        """When it came, in seconds since any zero; None where no field says."""
        times = {
            "timestamp": self.timestamp, "ts": self.ts, "time": self.time, "created": self.created,
            "created_at": self.created_at, "startTime": self.start_time_camel, "start_time": self.start_time,
        }  # fmt: skip
        said = [("response.created", each.created) for each in self.answers if isinstance(each, _Answer)]
        given = ((name, value) for name, value in (*times.items(), *said) if value is not None)
        return next((_seconds(name, value) for name, value in given), None)


_decoded = Decoder(_Line)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A line that was read."""

    line: _Line
    request: Request
    """Its arrival is the log's time, or 0 without one."""
    has_time: bool
    session: str | int | None
    node: int | None
    """The node of its messages in `_Prefixes`; None for a named session and other prompts."""
    place: tuple[str, int]
    """Document and line."""


class OpenAI:
    """Reads logs of an OpenAI-style API."""

    name = "openai"
    uses = frozenset({"session_rate", "think_time_s", "max_sessions", "tokenizer"})

    def recognises(self, head: FileHeader) -> bool:
        """Messages or prompts."""
        return bool({"messages", "prompt"} & head.keys)

    def read(self, source: Source, options: ReadOptions, watch: ReadProgress) -> Trace:
        """Every request of the sessions kept by `options`."""
        tokens = chats(options.tokenizer, options.model_folder)
        if tokens is None:
            watch.remark("no tokenizer is given: words count as tokens, and all figures are approximate")
            tokens = PlainChats(tokenizer(None))
        prefixes = _Prefixes()
        salts = DenseIds({"": 0})
        entries: list[_Entry] = []
        left_out = Counter[str]()
        for document in source.documents():
            for number, text in document.lines():
                with watch.at(document.name, number):
                    line = _decoded(text)
                    if kind := line.left_out_as:
                        left_out[kind] += 1
                        continue
                    time_s, body = line.time_s, line.asked
                    path, num_prompt, num_output = _path(line, _answer(line), tokens, len(entries))
                    namespace = salts[body.cache_salt or ""]
                    known, arrival_s = num_prompt + num_output, time_s or 0.0
                    session = line.session if body.session is None else body.session
                    entries.append(
                        _Entry(
                            line,
                            Request(path, num_prompt, num_output, known, arrival_s, namespace=namespace),
                            time_s is not None,
                            session,
                            prefixes.node(namespace, body.messages) if body.messages and session is None else None,
                            (document.name, number),
                        )
                    )
        for kind, num in left_out.items():
            watch.remark(f"{kind} are left out: {num}")
        if has_times := any(entry.has_time for entry in entries):
            entries = _timed(entries, watch)
        requests = _requests(entries, prefixes, SessionNumbers(options), tokens)
        return arranged(source, 1, (placed if has_times else _drawn)(requests, options))


def _path(line: _Line, answer: _Message | None, tokens: Chats, index: int) -> tuple[bytes, int, int]:
    """Packed ids of prompt and answer, and their numbers."""
    body = line.asked
    if body.messages:
        fields = {
            "messages": [message.fields for message in body.messages],
            "tools": msgspec.to_builtins(body.tools),
            "chat_template_kwargs": body.chat_template_kwargs,
        }
        prompt, said = tokens.chat(fields, None if answer is None else answer.fields)
    else:
        prompt = tokens.text(body.prompt, is_prompt=True) if isinstance(body.prompt, str) else list(body.prompt or ())
        said = [] if answer is None else tokens.text(joined(answer.fields.get("content")), is_prompt=False)
    if not prompt:
        raise BadRecord("the prompt must hold at least one token, got none")
    if answer is None:
        usages = (line.usage, *(each.usage for each in line.answers if isinstance(each, _Answer)))
        lengths = (
            each for usage in usages if usage is not None for each in (usage.completion_tokens, usage.output_tokens)
        )
        # No other request has this id, so none has this answer.
        said = [MAX_ID - index] * next((length for length in lengths if length is not None), 0)
    return pack(prompt) + pack(said), len(prompt), len(said)


def _answer(line: _Line) -> _Message | None:
    """The answer; None where the log does not have it, or not all of it."""
    for answer in line.answers:
        if isinstance(answer, str):
            return _Message(content=answer)
        if answer.content:
            return _Message(content=answer.content)
        for choice in answer.choices or ():
            if choice.message is not None:
                return None if choice.message.is_cut else choice.message
            if choice.text is not None:
                return _Message(content=choice.text)
    return None


# Times


def _seconds(name: str, value: float | str) -> float:
    if isinstance(value, str):
        try:
            time = datetime.fromisoformat(value)
        except ValueError:
            raise BadRecord(f"{name} must be a number or an ISO 8601 date and time, got {shown(value)}") from None
        return (time if time.tzinfo is not None else time.replace(tzinfo=UTC)).timestamp()
    for below, unit_s in _UNITS_S:
        if 0 <= value < below:
            return value * unit_s
    raise BadRecord(f"{name} must be from 0 to below {_UNITS_S[-1][0]:g}, got {shown(value)}")


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

    def node(self, namespace: int, messages: Iterable[_Message]) -> int:
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


def _requests(entries: Iterable[_Entry], prefixes: _Prefixes, numbers: SessionNumbers, tokens: Chats) -> list[Request]:
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
                found[place] = _answered_in(entry, before, found[place], tokens)
            last[number] = len(found), entry
            found.append(replace(entry.request, session=number, turn=turn))
    return found


def _answered_in(entry: _Entry, before: _Entry, request: Request, tokens: Chats) -> Request:
    """`request`, that of `before`, with its answer from the messages of `entry` if it has none and they hold one."""
    asked, later = before.line.asked.messages or [], entry.line.asked.messages or []
    if _answer(before.line) is not None or not asked or len(later) <= len(asked):
        return request
    said = later[len(asked)]
    if said.role != "assistant" or any(one.digest != other.digest for one, other in zip(asked, later, strict=False)):
        return request
    path, _, num_output = _path(before.line, said, tokens, 0)
    if num_output < request.num_output_tokens:
        return request
    num_known = request.num_prompt_tokens + num_output
    return replace(request, path=path, num_output_tokens=num_output, num_known_tokens=num_known)
