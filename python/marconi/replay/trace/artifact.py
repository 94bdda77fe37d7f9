"""The Marconi artifact's JSONL: one request a line, with its token ids.

Fields: `session_id`, `turn_id`, `ts` (seconds), `num_input_tokens`, `num_output_tokens`, `input_tokens`,
`output_tokens`. `input_tokens` is the whole prompt, history included; everything is known (unit 1). Lines need not be
in order of time, but a session's own must be, and its `turn_id` must not decrease. Only lines with the same
`namespace`, a number that `marconi convert` adds where it is not 0, share prefixes.
"""

import msgspec

from marconi.policy.request import Request, Trace
from marconi.replay.trace.base import BadRecord, Reader, ReadOptions, ReadProgress, SessionNumbers, arranged, request_of
from marconi.replay.trace.decode import Count, Id, PromptTokens, RecordDecoder, Seconds, Tokens, check_order
from marconi.replay.trace.source import Source


class _Line(msgspec.Struct):
    session_id: str | int
    turn_id: Count
    ts: Seconds
    num_input_tokens: PromptTokens
    num_output_tokens: Tokens
    input_tokens: list[Id]
    output_tokens: list[Id]
    namespace: Count = 0

    def __post_init__(self) -> None:
        for which in ("input", "output"):
            said, found = getattr(self, f"num_{which}_tokens"), len(getattr(self, f"{which}_tokens"))
            if said != found:
                raise BadRecord(f"num_{which}_tokens must be {found} as {which}_tokens holds, got {said}")


_decoded = RecordDecoder(_Line)


def _read(source: Source, options: ReadOptions, watch: ReadProgress) -> Trace:
    """Every request of the sessions kept by `options`."""
    sessions = SessionNumbers(options)
    lasts: dict[str | int, tuple[float, int]] = {}
    """Time and turn of each session's last request."""
    requests: list[Request] = []
    for text in watch.lines(source):
        with watch:
            line = _decoded(text)
            last_s, last_turn = lasts.get(line.session_id, (None, None))
            check_order("ts", line.ts, last_s)
            check_order("turn_id", line.turn_id, last_turn)
            lasts[line.session_id] = line.ts, line.turn_id
            session = sessions.number(line.session_id)
            if session is not None:
                place = session, line.turn_id, line.namespace
                requests.append(request_of(line.input_tokens, line.output_tokens, line.ts, *place))
    return arranged(source, 1, requests)


ARTIFACT = Reader(
    "artifact",
    lambda head: "session_id" in head.keys and bool({"input_tokens", "turn_id"} & head.keys),
    _read,
    uses=frozenset({"max_sessions"}),
)
