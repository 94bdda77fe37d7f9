"""Mooncake JSONL: a request a line, `timestamp` (ms), `input_length`, `output_length`, `hash_ids` of 512-token blocks.

A hash id stands for its block and all before it; the last block of a prompt may be partial and has an id all the same,
so there are ceil(input_length / block) of them. Sessions are not named, so `session` is -1 and nothing is known of
outputs. Lines are in order of time; one that is earlier than the line before is bad.

Source: the FAST25-release traces of github.com/kvcache-ai/Mooncake.
"""

from dataclasses import dataclass

from marconi.policy.request import Request, Trace, pack
from marconi.replay.trace.base import Half, ReadOptions, Watch, arranged
from marconi.replay.trace.fields import check_num_blocks, ids, num_tokens, parsed, record, time_s
from marconi.replay.trace.identity import DenseIds
from marconi.replay.trace.order import Order, in_order, lines
from marconi.replay.trace.source import Head, Source

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class _Line:
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    hashes: list[int]


class Mooncake:
    """Reads Mooncake JSONL."""

    name = "mooncake"
    uses = frozenset[str]()

    def recognises(self, head: Head) -> bool:
        """Named blocks and a time, but no chat."""
        return {"hash_ids", "input_length", "timestamp"} <= head.keys and "chat_id" not in head.keys

    def read(self, source: Source, options: ReadOptions, watch: Watch) -> Trace:
        """Every request; `half` splits them by time."""
        block_tokens = options.block_tokens or BLOCK_TOKENS
        dense = DenseIds()
        requests: list[Request] = []
        read = lines(source, watch, lambda line: _line(line, block_tokens))
        for placed in in_order(read, _ORDER, watch):
            line = placed.content
            path = pack(map(dense.__getitem__, line.hashes))
            known = line.num_prompt_tokens // block_tokens * block_tokens
            requests.append(Request(path, line.num_prompt_tokens, line.num_output_tokens, known, line.arrival_s))
        return arranged(source, block_tokens, _half(requests, options.half))


_ORDER: Order[_Line] = Order("timestamp", lambda line: line.arrival_s, lambda time_s: f"{time_s * 1000:.15g} ms")


def _line(line: bytes, block_tokens: int) -> _Line:
    fields = record(parsed(line))
    read = _Line(
        arrival_s=time_s(fields, "timestamp", per_second=1000),
        num_prompt_tokens=num_tokens(fields, "input_length", minimum=1),
        num_output_tokens=num_tokens(fields, "output_length"),
        hashes=ids(fields, "hash_ids"),
    )
    check_num_blocks(read.hashes, read.num_prompt_tokens, block_tokens, partial="named")
    return read


def _half(requests: list[Request], half: Half) -> list[Request]:
    middle = (len(requests) + 1) // 2
    if half is Half.TUNING:
        return requests[:middle]
    return requests[middle:] if half is Half.REPORTING else requests
