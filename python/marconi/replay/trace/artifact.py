"""The Marconi artifact's JSONL: one request a line, with its token ids.

Fields: `session_id`, `turn_id`, `ts` (seconds), `num_input_tokens`, `num_output_tokens`, `input_tokens`,
`output_tokens`. `input_tokens` is the whole prompt, history included; everything is known (unit 1). Lines need not be
in order of time, but a session's own must be, and its `turn_id` must not go back.
"""

import dataclasses
from dataclasses import dataclass

from marconi.policy.request import Request, Trace, pack
from marconi.replay.trace.base import BadRecord, ReadOptions, SessionNumbers, Watch, arranged
from marconi.replay.trace.fields import MAX_ID, Record, ids, integer, name, num_tokens, parsed, record, shown, time_s
from marconi.replay.trace.order import Order, in_order, lines
from marconi.replay.trace.source import Head, Source


class Artifact:
    """Reads the artifact's JSONL."""

    name = "artifact"
    uses = frozenset({"max_sessions"})

    def recognises(self, head: Head) -> bool:
        """Token ids, or the turn of a session."""
        return "session_id" in head.keys and bool({"input_tokens", "turn_id"} & head.keys)

    def read(self, source: Source, options: ReadOptions, watch: Watch) -> Trace:
        """Every request of the sessions kept by `options`."""
        sessions = SessionNumbers(options)
        requests: list[Request] = []
        read = in_order(in_order(lines(source, watch, _line), _TIMES, watch), _TURNS, watch)
        for line in (placed.content for placed in read):
            index = sessions.number(line.session)
            if index is not None:
                requests.append(dataclasses.replace(line.request, session=index))
        return arranged(source, 1, requests)


@dataclass(frozen=True, slots=True)
class _Line:
    session: str | int
    request: Request


_TIMES: Order[_Line] = Order(
    "ts", lambda line: line.request.arrival_s, lambda time_s: f"{time_s:.15g}", lambda line: line.session
)
_TURNS: Order[_Line] = Order("turn_id", lambda line: line.request.turn, str, lambda line: line.session)


def _line(line: bytes) -> _Line:
    fields = record(parsed(line))
    session, turn, arrival_s = name(fields, "session_id"), integer(fields, "turn_id"), time_s(fields, "ts")
    prompt, output = _tokens(fields, "input", minimum=1), _tokens(fields, "output", minimum=0)
    num_known = len(prompt) + len(output)
    path = pack([*prompt, *output])
    return _Line(session, Request(path, len(prompt), len(output), num_known, arrival_s, turn=turn))


def _tokens(fields: Record, which: str, minimum: int) -> list[int]:
    num_said = num_tokens(fields, f"num_{which}_tokens", minimum)
    tokens = ids(fields, f"{which}_tokens")
    if len(tokens) != num_said:
        raise BadRecord(f"num_{which}_tokens is {num_said}, but {which}_tokens holds {len(tokens)}")
    if tokens and max(tokens) > MAX_ID:
        raise BadRecord(f"{which}_tokens holds {shown(max(tokens))}, must be at most {MAX_ID}")
    return tokens
