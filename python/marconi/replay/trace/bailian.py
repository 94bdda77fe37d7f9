"""Bailian (Qwen) JSONL: `chat_id, parent_chat_id, timestamp, input_length, output_length, type, turn, hash_ids`.

`timestamp` is in seconds, blocks have 16 tokens, ids are the same over the whole trace. `parent_chat_id` is -1 for the
first request of a conversation and else the request that this one goes on from: requests with the same first one are a
session. A parent that is not in the trace (it was before its start) begins a session as well. Decoded tokens are known
as `identity.with_output` says; a chat template that strips them from the next prompt leaves them unknown.

A line earlier than the line before, after a line that names it as its parent, or whose `turn` is not above its
parent's, is bad.

Source: the data specification of github.com/alibaba-edu/qwen-bailian-usagetraces-anon.
"""

import dataclasses
from dataclasses import dataclass

from marconi.policy.request import Request, Trace, pack
from marconi.replay.trace.base import BadRecord, ReadOptions, SessionNumbers, Watch, arranged
from marconi.replay.trace.fields import check_num_blocks, ids, integer, num_tokens, parsed, record, time_s
from marconi.replay.trace.identity import DenseIds, with_output
from marconi.replay.trace.order import Order, in_order, lines
from marconi.replay.trace.source import Head, Source

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class _Turn:
    chat: int
    parent: int
    num_prompt_tokens: int
    num_output_tokens: int
    hashes: list[int]
    arrival_s: float
    turn: int
    path: bytes = b""
    root: int = -1


class Bailian:
    """Reads Bailian JSONL."""

    name = "bailian"
    uses = frozenset({"max_sessions"})

    def recognises(self, head: Head) -> bool:
        """Named blocks of chats."""
        return {"hash_ids", "chat_id"} <= head.keys

    def read(self, source: Source, options: ReadOptions, watch: Watch) -> Trace:
        """Every request of the sessions kept by `options`."""
        unit = options.block_tokens or BLOCK_TOKENS
        dense = DenseIds()
        turns: dict[int, _Turn] = {}
        awaited: set[int] = set()
        for placed in in_order(lines(source, watch, lambda line: _turn(line, unit)), _ORDER, watch):
            turn = placed.content
            if fault := _misplaced(turn, turns, awaited):
                watch.refuse(placed.place, fault)
                continue
            parent = turns.get(turn.parent)
            if parent is None:
                awaited.add(turn.parent)
            path = pack(map(dense.__getitem__, turn.hashes))
            root = turn.chat if parent is None else parent.root
            turns[turn.chat] = dataclasses.replace(turn, hashes=[], path=path, root=root)
        return arranged(source, unit, _requests(turns, SessionNumbers(options), unit))


_ORDER: Order[_Turn] = Order("timestamp", lambda turn: turn.arrival_s, lambda time_s: f"{time_s:.15g} s")


def _turn(line: bytes, unit: int) -> _Turn:
    fields = record(parsed(line))
    turn = _Turn(
        chat=integer(fields, "chat_id"),
        parent=integer(fields, "parent_chat_id", minimum=-1),
        num_prompt_tokens=num_tokens(fields, "input_length", minimum=1),
        num_output_tokens=num_tokens(fields, "output_length"),
        hashes=ids(fields, "hash_ids"),
        arrival_s=time_s(fields, "timestamp"),
        turn=integer(fields, "turn", minimum=1) - 1,
    )
    check_num_blocks(turn.hashes, turn.num_prompt_tokens, unit, partial="optional")
    if turn.chat == turn.parent:
        raise BadRecord(f"chat_id and parent_chat_id are both {turn.chat}")
    return turn


def _misplaced(turn: _Turn, turns: dict[int, _Turn], awaited: set[int]) -> str | None:
    """The fault of `turn` after the `turns` before it."""
    if turn.chat in turns:
        return f"chat_id {turn.chat} has been used before"
    if turn.chat in awaited:
        return f"chat_id {turn.chat} comes after a request that goes on from it"
    parent = turns.get(turn.parent)
    if parent is not None and turn.turn <= parent.turn:
        return f"turn is {turn.turn + 1}, must be above {parent.turn + 1} of its parent, chat_id {parent.chat}"
    return None


def _requests(turns: dict[int, _Turn], sessions: SessionNumbers, unit: int) -> list[Request]:
    nexts: dict[int, _Turn] = {}
    for turn in turns.values():
        nexts.setdefault(turn.parent, turn)
    requests = []
    for turn in turns.values():
        session = sessions.number(turn.root)
        if session is None:
            continue
        following = nexts.get(turn.chat)
        path, num_following = (following.path, following.num_prompt_tokens) if following else (b"", 0)
        known = with_output(turn.path, turn.num_prompt_tokens, turn.num_output_tokens, path, num_following, unit)
        requests.append(
            Request(
                path=known.path,
                num_prompt_tokens=turn.num_prompt_tokens,
                num_output_tokens=turn.num_output_tokens,
                num_known_tokens=known.num_known_tokens,
                arrival_s=turn.arrival_s,
                session=session,
                turn=turn.turn,
            )
        )
    return requests
