"""Mooncake JSONL: a request a line, `timestamp` (ms), `input_length`, `output_length`, `hash_ids` of 512-token blocks.

A hash id stands for its block and all before it; the last block of a prompt may be partial and has an id all the same,
so there are ceil(input_length / block) of them. Sessions are not named, so `session` is -1 and nothing is known of
outputs. Lines are in order of time; one that is earlier than the line before is bad.

Source: the FAST25-release traces of github.com/kvcache-ai/Mooncake.
"""

import msgspec

from marconi.policy.request import Request, Trace, pack
from marconi.replay.trace.base import Half, ReadOptions, ReadProgress, arranged
from marconi.replay.trace.decode import (
    BlockHash,
    Decoder,
    Milliseconds,
    PromptTokens,
    Tokens,
    check_num_blocks,
    check_order,
)
from marconi.replay.trace.identity import DenseIds
from marconi.replay.trace.source import FileHeader, Source

BLOCK_TOKENS = 512


class _Line(msgspec.Struct):
    timestamp: Milliseconds
    input_length: PromptTokens
    output_length: Tokens
    hash_ids: list[BlockHash]


_decoded = Decoder(_Line)


class Mooncake:
    """Reads Mooncake JSONL."""

    name = "mooncake"
    uses = frozenset[str]()

    def recognises(self, head: FileHeader) -> bool:
        """Named blocks and a time, but no chat."""
        return {"hash_ids", "input_length", "timestamp"} <= head.keys and "chat_id" not in head.keys

    def read(self, source: Source, options: ReadOptions, watch: ReadProgress) -> Trace:
        """Every request; `half` splits them by time."""
        block_tokens = options.block_tokens or BLOCK_TOKENS
        dense = DenseIds()
        requests: list[Request] = []
        last_ms = None
        for text in watch.lines(source):
            with watch:
                line = _decoded(text)
                check_num_blocks(line.hash_ids, line.input_length, block_tokens, partial_named=True)
                check_order("timestamp", line.timestamp, last_ms)
                last_ms = line.timestamp
                path = pack(map(dense.__getitem__, line.hash_ids))
                known = line.input_length // block_tokens * block_tokens
                requests.append(Request(path, line.input_length, line.output_length, known, line.timestamp / 1000))
        return arranged(source, block_tokens, _half(requests, options.half))


def _half(requests: list[Request], half: Half) -> list[Request]:
    middle = (len(requests) + 1) // 2
    if half is Half.TUNING:
        return requests[:middle]
    return requests[middle:] if half is Half.REPORTING else requests
