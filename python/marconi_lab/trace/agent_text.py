"""Agent sessions as real text: JSONL, a file a session, `timestamp` (us), `input`, `output`, `session_id`.

Source: github.com/LMCache/lmcache-agent-trace. Lines are in the order of the log, which is not that of their times
(calls ran side by side), so a session is sorted by time. `input` is the whole prompt; if it continues the one before,
it does not repeat that one's output. Input and output are tokenized apart (`tokens`), so the tokens of both are known;
a tokenizer may join characters across a boundary, which loses one token of a shared prefix.

Times are the log's, from the first request on. The sessions were run one after another, days apart in places: with
`session_rate`, they start as a Poisson process instead, in the order of their files, and keep their own times.
"""

import dataclasses

import msgspec

from marconi.policy.request import Request, Trace
from marconi.replay.trace.base import (
    BadRecord,
    Reader,
    ReadOptions,
    ReadProgress,
    SessionNumbers,
    arranged,
    placed,
    request_of,
)
from marconi.replay.trace.decode import Microseconds, RecordDecoder
from marconi.replay.trace.source import Source
from marconi.replay.trace.tokens import ESTIMATED, tokenizer


class _Call(msgspec.Struct):
    timestamp: Microseconds
    session_id: str | int
    input: str
    output: str


_decoded = RecordDecoder(_Call)


def _read(source: Source, options: ReadOptions, watch: ReadProgress) -> Trace:
    """Every request of the sessions kept by `options`."""
    tokens = tokenizer(options.tokenizer)
    if options.tokenizer is None:
        watch.remark(ESTIMATED)
    numbers = SessionNumbers(options)
    sessions: dict[int, list[Request]] = {}
    for text in watch.lines(source):
        with watch:
            call = _decoded(text)
            number = numbers.number(call.session_id)
            if number is not None:
                prompt, output = tokens(call.input), tokens(call.output)
                if not prompt:
                    raise BadRecord(f"input must hold at least one token, got {call.input!r}")
                sessions.setdefault(number, []).append(request_of(prompt, output, call.timestamp / 1e6, number))
    ordered: list[Request] = []
    for requests in sessions.values():
        requests.sort(key=lambda request: request.arrival_s)
        ordered += [dataclasses.replace(request, turn=turn) for turn, request in enumerate(requests)]
    return arranged(source, 1, placed(ordered, options))


AGENT_TEXT = Reader(
    "agent-text",
    lambda head: {"session_id", "timestamp", "input", "output"} <= head.keys,
    _read,
    uses=frozenset({"session_rate", "max_sessions", "tokenizer"}),
)
