"""Bailian (Qwen) JSONL: `chat_id, parent_chat_id, timestamp, input_length, output_length, type, turn, hash_ids`.

`timestamp` is in seconds, blocks have 16 tokens, ids are the same over the whole trace. `parent_chat_id` is -1 for the
first request of a conversation and else the request that this one goes on from: requests with the same first one are a
session. A parent that is not in the trace (it was before its start) begins a session as well. Decoded tokens are known
as `identity.with_output` says; a chat template that strips them from the next prompt leaves them unknown.

A line earlier than the line before, or after a line that names it as its parent, is bad.

Source: the data specification of github.com/alibaba-edu/qwen-bailian-usagetraces-anon.
"""

from dataclasses import dataclass

from marconi.policy.request import Request, Trace, pack
from marconi.replay.trace.base import BadRecord, ReadOptions, SessionNumbers, Watch, arranged
from marconi.replay.trace.fields import Record, check_num_blocks, ids, integer, number, parsed, record
from marconi.replay.trace.identity import DenseIds, with_output
from marconi.replay.trace.source import Head, Source

BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class _Turn:
    chat: int
    parent: int
    num_prompt_tokens: int
    num_output_tokens: int
    path: bytes
    arrival_s: float
    turn: int
    root: int


class Bailian:
    """Reads Bailian JSONL."""

    name = "bailian"

    def recognises(self, head: Head) -> bool:
        """Named blocks of chats."""
        return {"hash_ids", "chat_id"} <= head.keys

    def read(self, source: Source, options: ReadOptions, watch: Watch) -> Trace:
        """Every request of the sessions kept by `options`."""
        unit = options.block_tokens or BLOCK_TOKENS
        dense = DenseIds()
        turns: dict[int, _Turn] = {}
        awaited: set[int] = set()
        last_s = 0.0
        for document in source.documents():
            for number_of_line, line in document.lines():
                with watch.at(document.name, number_of_line):
                    fields = record(parsed(line))
                    hashes = ids(fields, "hash_ids")
                    turn = _turn(fields, turns, unit)
                    check_num_blocks(hashes, turn.num_prompt_tokens, unit, partial="optional")
                    if turn.chat in turns:
                        raise BadRecord(f"chat_id {turn.chat} has been used before")
                    if turn.chat in awaited:
                        raise BadRecord(f"chat_id {turn.chat} comes after a request that goes on from it")
                    if turn.arrival_s < last_s:
                        raise BadRecord(f"timestamp {turn.arrival_s:g} s is earlier than {last_s:g} s before it")
                    last_s = turn.arrival_s
                    if turn.parent not in turns:
                        awaited.add(turn.parent)
                    turns[turn.chat] = _with_path(turn, pack(map(dense.__getitem__, hashes)))
        return arranged(source, unit, _requests(turns, SessionNumbers(options), unit))


def _turn(fields: Record, turns: dict[int, _Turn], unit: int) -> _Turn:
    chat, parent = integer(fields, "chat_id"), integer(fields, "parent_chat_id", minimum=-1)
    return _Turn(
        chat=chat,
        parent=parent,
        num_prompt_tokens=integer(fields, "input_length", minimum=1),
        num_output_tokens=integer(fields, "output_length"),
        path=b"",
        arrival_s=number(fields, "timestamp"),
        turn=integer(fields, "turn", minimum=1) - 1,
        root=turns[parent].root if parent in turns else chat,
    )


def _with_path(turn: _Turn, path: bytes) -> _Turn:
    return _Turn(
        turn.chat,
        turn.parent,
        turn.num_prompt_tokens,
        turn.num_output_tokens,
        path,
        turn.arrival_s,
        turn.turn,
        turn.root,
    )


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
