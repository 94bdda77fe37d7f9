"""Mooncake JSONL: a request a line, `timestamp` (ms), `input_length`, `output_length`, `hash_ids` of 512-token blocks.

A hash id stands for its block and all before it; the last block of a prompt may be partial and has an id all the same,
so there are ceil(input_length / block) of them. Sessions are not named, so `session` is -1 and nothing is known of
outputs. Lines are in order of time; one that is earlier than the line before is bad.

Source: the FAST25-release traces of github.com/kvcache-ai/Mooncake.
"""

from marconi.policy.request import Request, Trace, pack
from marconi.replay.trace.base import BadRecord, Half, ReadOptions, Watch, arranged
from marconi.replay.trace.fields import check_num_blocks, ids, integer, number, parsed, record
from marconi.replay.trace.identity import DenseIds
from marconi.replay.trace.source import Head, Source

BLOCK_TOKENS = 512


class Mooncake:
    """Reads Mooncake JSONL."""

    name = "mooncake"

    def recognises(self, head: Head) -> bool:
        """Named blocks and a time, but no chat."""
        return {"hash_ids", "input_length", "timestamp"} <= head.keys and "chat_id" not in head.keys

    def read(self, source: Source, options: ReadOptions, watch: Watch) -> Trace:
        """Every request; `half` splits them by time, and `max_sessions` is refused."""
        if options.max_sessions is not None:
            raise ValueError(f"{source.path}: a Mooncake trace names no sessions, so max_sessions cannot be applied")
        block_tokens = options.block_tokens or BLOCK_TOKENS
        dense = DenseIds()
        requests: list[Request] = []
        last_ms = 0.0
        for document in source.documents():
            for number_of_line, line in document.lines():
                with watch.at(document.name, number_of_line):
                    fields = record(parsed(line))
                    arrival_ms = number(fields, "timestamp")
                    num_prompt = integer(fields, "input_length", minimum=1)
                    num_output = integer(fields, "output_length")
                    hashes = ids(fields, "hash_ids")
                    check_num_blocks(hashes, num_prompt, block_tokens, partial="named")
                    if arrival_ms < last_ms:
                        raise BadRecord(f"timestamp {arrival_ms:g} ms is earlier than {last_ms:g} ms before it")
                    last_ms = arrival_ms
                    path = pack(map(dense.__getitem__, hashes))
                    known = num_prompt // block_tokens * block_tokens
                    requests.append(Request(path, num_prompt, num_output, known, arrival_ms / 1000))
        return arranged(source, block_tokens, _half(requests, options.half))


def _half(requests: list[Request], half: Half) -> list[Request]:
    middle = (len(requests) + 1) // 2
    if half is Half.TUNING:
        return requests[:middle]
    return requests[middle:] if half is Half.REPORTING else requests
