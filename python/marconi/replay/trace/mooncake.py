"""Mooncake JSONL: a request a line, `timestamp` (ms), `input_length`, `output_length`, `hash_ids` of 512-token blocks.

A hash id stands for its block and all before it; the last block of a prompt may be partial and has an id all the same,
so there are ceil(input_length / block) of them. Sessions are not named, so `session` is -1 and nothing is known of
outputs. Lines are in order of time; one that is earlier than the line before is bad.

The record of a server or a router (`marconi/record.py`) says more: `block_tokens`, the same on all lines, and, where
answers are known, `output_hash_ids`, a hash of every block that the answer completes. Its lines are in the order in
which requests ended.

Source: the FAST25-release traces of github.com/kvcache-ai/Mooncake.
"""

from typing import Annotated

import msgspec

from marconi.policy.request import Request, Trace, pack
from marconi.replay.trace.base import BadRecord, Half, Reader, ReadOptions, ReadProgress, arranged
from marconi.replay.trace.decode import (
    MAX_TOKENS,
    BlockHash,
    Milliseconds,
    PromptTokens,
    RecordDecoder,
    Tokens,
    check_num_blocks,
    check_order,
)
from marconi.replay.trace.identity import DenseIds
from marconi.replay.trace.source import Source

BLOCK_TOKENS = 512


class _Line(msgspec.Struct):
    timestamp: Milliseconds
    input_length: PromptTokens
    output_length: Tokens
    hash_ids: list[BlockHash]
    block_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] | None = None
    """None but in a record."""
    output_hash_ids: list[BlockHash] | None = None
    """None where nothing is known of answers."""


_decoded = RecordDecoder(_Line)


def _read(source: Source, options: ReadOptions, watch: ReadProgress) -> Trace:
    """Every request; `half` splits them by time."""
    unit = options.block_tokens
    dense = DenseIds()
    requests: list[Request] = []
    last_ms = None
    for text in watch.lines(source):
        with watch:
            line = _decoded(text)
            block_tokens = unit or line.block_tokens or BLOCK_TOKENS
            hashes, num_known = _known(line, block_tokens)
            if line.block_tokens is None:
                check_order("timestamp", line.timestamp, last_ms)
            unit, last_ms = block_tokens, line.timestamp
            path = pack(map(dense.__getitem__, hashes))
            requests.append(Request(path, line.input_length, line.output_length, num_known, line.timestamp / 1000))
    return arranged(source, unit or BLOCK_TOKENS, _half(requests, options.half))


MOONCAKE = Reader(
    "mooncake",
    lambda head: {"hash_ids", "input_length", "timestamp"} <= head.keys and "chat_id" not in head.keys,
    _read,
)


def _known(line: _Line, block_tokens: int) -> tuple[list[int], int]:
    """The blocks of a line, and how many tokens the whole ones have."""
    if line.block_tokens not in (None, block_tokens):
        raise BadRecord(f"block_tokens must be {block_tokens}, got {line.block_tokens}")
    check_num_blocks(line.hash_ids, line.input_length, block_tokens, partial_named=True)
    num_whole = line.input_length // block_tokens
    num_output = (line.input_length + line.output_length) // block_tokens - num_whole
    of_output = line.output_hash_ids
    if line.block_tokens is not None and of_output is not None and len(of_output) != num_output:
        raise BadRecord(f"output_hash_ids must hold {num_output}, got {len(of_output)}")
    # The prompt's last block, if partial, is named only where the answer does not complete it.
    path = line.hash_ids[:num_whole] + of_output if of_output else line.hash_ids
    return path, (num_whole + len(of_output or ())) * block_tokens


def _half(requests: list[Request], half: Half) -> list[Request]:
    requests.sort(key=lambda request: request.arrival_s)
    middle = (len(requests) + 1) // 2
    if half is Half.TUNING:
        return requests[:middle]
    return requests[middle:] if half is Half.REPORTING else requests
