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

from marconi.policy.request import Request, Trace, pack
from marconi.replay.trace.base import BadRecord, ReadOptions, ReadProgress, SessionNumbers, arranged, placed
from marconi.replay.trace.decode import Decoder, Microseconds
from marconi.replay.trace.source import FileHeader, Source
from marconi.replay.trace.tokens import ESTIMATED, tokenizer


class _Call(msgspec.Struct):
    timestamp: Microseconds
    session_id: str | int
    input: str
    output: str


_decoded = Decoder(_Call)


class AgentText:
    """Reads agent sessions as text."""

    name = "agent-text"
    is_of_lines = True
    uses = frozenset({"session_rate", "max_sessions", "tokenizer"})

    def recognises(self, head: FileHeader) -> bool:
        """Texts of a session."""
        return {"session_id", "timestamp", "input", "output"} <= head.keys

    def read(self, source: Source, options: ReadOptions, watch: ReadProgress) -> Trace:
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
                    num_tokens = len(prompt) + len(output)
                    path = pack([*prompt, *output])
                    arrival_s = call.timestamp / 1e6
                    sessions.setdefault(number, []).append(
                        Request(path, len(prompt), len(output), num_tokens, arrival_s, number)
                    )
        ordered: list[Request] = []
        for requests in sessions.values():
            requests.sort(key=lambda request: request.arrival_s)
            ordered += [dataclasses.replace(request, turn=turn) for turn, request in enumerate(requests)]
        return arranged(source, 1, placed(ordered, options))
