"""The Marconi artifact's JSONL: one request a line, with its token ids.

Fields: `session_id`, `turn_id`, `ts` (seconds), `num_input_tokens`, `num_output_tokens`, `input_tokens`,
`output_tokens`. `input_tokens` is the whole prompt, history included; everything is known (unit 1). Lines need not be
in order of time, but a session's own must be.
"""

from marconi.policy.request import Request, Trace, pack
from marconi.replay.trace.base import BadRecord, ReadOptions, SessionNumbers, Watch, arranged
from marconi.replay.trace.fields import MAX_ID, Record, ids, integer, name, number, parsed, record
from marconi.replay.trace.source import Head, Source


class Artifact:
    """Reads the artifact's JSONL."""

    name = "artifact"

    def recognises(self, head: Head) -> bool:
        """Token ids, or the turn of a session."""
        return "session_id" in head.keys and bool({"input_tokens", "turn_id"} & head.keys)

    def read(self, source: Source, options: ReadOptions, watch: Watch) -> Trace:
        """Every request of the sessions kept by `options`."""
        sessions = SessionNumbers(options)
        last_s: dict[str | int, float] = {}
        requests: list[Request] = []
        for document in source.documents():
            for number_of_line, line in document.lines():
                with watch.at(document.name, number_of_line):
                    fields = record(parsed(line))
                    session, turn, arrival_s = (
                        name(fields, "session_id"),
                        integer(fields, "turn_id"),
                        number(fields, "ts"),
                    )
                    prompt, output = _tokens(fields, "input", minimum=1), _tokens(fields, "output", minimum=0)
                    if arrival_s < last_s.get(session, 0.0):
                        raise BadRecord(
                            f"ts {arrival_s:g} is earlier than {last_s[session]:g} of its session before it"
                        )
                    last_s[session] = arrival_s
                    index = sessions.number(session)
                    if index is not None:
                        path = pack([*prompt, *output])
                        num_tokens = len(prompt) + len(output)
                        requests.append(Request(path, len(prompt), len(output), num_tokens, arrival_s, index, turn))
        return arranged(source, 1, requests)


def _tokens(fields: Record, which: str, minimum: int) -> list[int]:
    num_tokens = integer(fields, f"num_{which}_tokens", minimum)
    tokens = ids(fields, f"{which}_tokens")
    if len(tokens) != num_tokens:
        raise BadRecord(f"num_{which}_tokens is {num_tokens}, but {which}_tokens holds {len(tokens)}")
    if tokens and max(tokens) > MAX_ID:
        raise BadRecord(f"{which}_tokens holds {max(tokens)}, must be at most {MAX_ID}")
    return tokens
