"""Bailian (Qwen) JSONL: `chat_id, parent_chat_id, timestamp, input_length, output_length, type, turn, hash_ids`.

`timestamp` is in seconds, blocks have 16 tokens, ids are the same over the whole trace. `parent_chat_id` is -1 for the
first request of a conversation and else the request that this one continues: requests with the same first one are a
session. A parent that is not in the trace (it was before its start) begins a session as well. Decoded tokens are known
as `identity.with_output` says; a chat template that strips them from the next prompt leaves them unknown.

A line earlier than the line before, after a line that names it as its parent, or whose `turn` is not above its
parent's, is bad.

Source: the data specification of github.com/alibaba-edu/qwen-bailian-usagetraces-anon.
"""

from dataclasses import dataclass, replace
from typing import Annotated

import msgspec

from marconi.policy.request import Request, Trace, pack
from marconi.replay.trace.base import BadRecord, Reader, ReadOptions, ReadProgress, SessionNumbers, arranged
from marconi.replay.trace.decode import (
    MAX_INTEGER,
    BlockHash,
    Count,
    PromptTokens,
    RecordDecoder,
    Seconds,
    Tokens,
    check_num_blocks,
    check_order,
)
from marconi.replay.trace.identity import DenseIds, with_output
from marconi.replay.trace.source import Source

BLOCK_TOKENS = 16


class _Line(msgspec.Struct):
    chat_id: Count
    parent_chat_id: Annotated[int, msgspec.Meta(ge=-1, le=MAX_INTEGER)]
    timestamp: Seconds
    input_length: PromptTokens
    output_length: Tokens
    turn: Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)]
    hash_ids: list[BlockHash]

    def __post_init__(self) -> None:
        if self.chat_id == self.parent_chat_id:
            raise BadRecord(f"parent_chat_id must be another than chat_id, got {self.chat_id} for both")


_decoded = RecordDecoder(_Line)


@dataclass(frozen=True, slots=True)
class _Turn:
    request: Request
    root: int
    """`chat_id` of the session's first request."""


def _read(source: Source, options: ReadOptions, watch: ReadProgress) -> Trace:
    """Every request of the sessions kept by `options`."""
    unit = options.block_tokens or BLOCK_TOKENS
    dense = DenseIds()
    turns: dict[int, _Turn] = {}
    nexts: dict[int, Request] = {}
    """By `chat_id`, the first request that continues it."""
    last_s = None
    for text in watch.lines(source):
        with watch:
            line = _decoded(text)
            check_num_blocks(line.hash_ids, line.input_length, unit, partial_named=False)
            check_order("timestamp", line.timestamp, last_s)
            parent = turns.get(line.parent_chat_id)
            _check_place(line, turns, nexts)
            last_s = line.timestamp
            request = Request(
                path=pack(map(dense.__getitem__, line.hash_ids)),
                num_prompt_tokens=line.input_length,
                num_output_tokens=line.output_length,
                num_known_tokens=0,
                arrival_s=line.timestamp,
                turn=line.turn - 1,
            )
            turns[line.chat_id] = _Turn(request, line.chat_id if parent is None else parent.root)
            nexts.setdefault(line.parent_chat_id, request)
    sessions = SessionNumbers(options)
    requests = [
        with_output(replace(turn.request, session=session), nexts.get(chat), unit)
        for chat, turn in turns.items()
        if (session := sessions.number(turn.root)) is not None
    ]
    return arranged(source, unit, requests)


BAILIAN = Reader("bailian", lambda head: {"hash_ids", "chat_id"} <= head.keys, _read, uses=frozenset({"max_sessions"}))


def _check_place(line: _Line, turns: dict[int, _Turn], nexts: dict[int, Request]) -> None:
    """Checks that `line` may come after those before it."""
    if line.chat_id in turns:
        raise BadRecord(f"chat_id must be new, got {line.chat_id} again")
    if line.chat_id in nexts:
        raise BadRecord(f"chat_id must come before the requests that continue it, got {line.chat_id} after one")
    parent = turns.get(line.parent_chat_id)
    if parent is not None and line.turn <= parent.request.turn + 1:
        raise BadRecord(
            f"turn must be above the {parent.request.turn + 1} of chat_id {line.parent_chat_id}, its parent, "
            f"got {line.turn}"
        )
