"""Azure LLM inference CSV: `TIMESTAMP,ContextTokens,GeneratedTokens`, lengths alone, so sessions are invented.

The rule, in order of arrival: with probability 0.6 (seeded) a request continues an open chat, else it begins one.
A chat is open for a request if its history H (context and answer so far) fits, H < ContextTokens <= H + 1024, and its
last request is no older than ten minutes and has had time to be answered at 50 tokens a second. Of the open chats it
takes the one with the longest history; without one it begins a chat. Chats have at most 1 / (1 - 0.6) = 2.5 turns in
the mean, about those of public chat data (WildChat 2.54, LMSYS-Chat-1M 2.02). A chat's context only grows.

Identities are invented with the chats, in units of 16 tokens to keep them small. Figures from such a trace show lengths
and arrivals of real traffic, but its reuse is this rule's.

Source of the format: github.com/Azure/AzurePublicDataset (2023; the 2024 files have a time zone).
"""

import bisect
import csv
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from marconi.policy.request import Request, Trace
from marconi.replay.trace.arrivals import ANSWER_TOKENS_PER_S
from marconi.replay.trace.base import BadRecord, Reader, ReadOptions, ReadProgress, SessionNumbers, arranged
from marconi.replay.trace.decode import PromptTokens, RecordDecoder, Tokens, check_order, shown
from marconi.replay.trace.identity import MAX_ID
from marconi.replay.trace.source import Source

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
UNIT_TOKENS = 16
GOES_ON = 0.6
MAX_NEW_TOKENS = 1024
MAX_PAUSE_S = 600.0


class _Row(msgspec.Struct):
    TIMESTAMP: str
    ContextTokens: PromptTokens
    GeneratedTokens: Tokens


_decoded = RecordDecoder(_Row)


class _Call(NamedTuple):
    time: datetime
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(slots=True)
class _Chat:
    session: int
    num_turns: int
    num_tokens: int
    blocks: NDArray[np.uint32]
    ready_s: float
    last_s: float


def _read(source: Source, options: ReadOptions, watch: ReadProgress) -> Trace:
    """Every request of the invented sessions kept by `options`."""
    unit = options.block_tokens or UNIT_TOKENS
    sessions = SessionNumbers(options)
    kept = [
        replace(request, session=number)
        for request in _requests(_calls(source, watch), unit, options.seed)
        if (number := sessions.number(request.session)) is not None
    ]
    return arranged(source, unit, kept)


AZURE = Reader(
    "azure",
    lambda head: head.data.removeprefix(b"\xef\xbb\xbf").startswith(b"TIMESTAMP,ContextTokens"),
    _read,
    uses=frozenset({"max_sessions"}),
    is_of_lines=False,
)


def _calls(source: Source, watch: ReadProgress) -> list[_Call]:
    calls: list[_Call] = []
    for document in source.documents():
        numbered = document.lines()
        header = next(numbered, (1, b""))[1].decode("utf-8", "replace").strip()
        if header != ",".join(COLUMNS):
            raise ValueError(f"{document.name}, line 1: the columns must be {','.join(COLUMNS)}, got {header[:60]!r}")
        for number, line in numbered:
            with watch.at(document.name, number):
                call = _call(line)
                if calls:
                    if (call.time.tzinfo is None) != (calls[0].time.tzinfo is None):
                        raise BadRecord(f"TIMESTAMP must have a time zone in all lines or in none, got {call.time}")
                    check_order("TIMESTAMP", call.time, calls[-1].time)
                calls.append(call)
    return calls


def _call(line: bytes) -> _Call:
    try:
        values = [value.strip() for value in next(csv.reader([line.decode("utf-8", "replace")]))]
    except csv.Error as error:
        raise BadRecord(f"not CSV ({error})") from None
    if len(values) != len(COLUMNS):
        raise BadRecord(f"a line must have {len(COLUMNS)} columns, got {len(values)}: cut off or malformed")
    row = _decoded.convert(dict(zip(COLUMNS, values, strict=True)), strict=False)
    try:
        time = datetime.fromisoformat(row.TIMESTAMP)
    except ValueError:
        raise BadRecord(f"TIMESTAMP must be a date and time, got {shown(row.TIMESTAMP)}") from None
    return _Call(time, row.ContextTokens, row.GeneratedTokens)


def _requests(calls: list[_Call], unit: int, seed: int) -> Iterator[Request]:
    rng = np.random.default_rng(seed)
    chats: list[_Chat] = []
    open_chats: list[tuple[int, int]] = []
    """(history in tokens, index in `chats`), sorted."""
    num_blocks = 0
    for call in calls:
        arrival_s = (call.time - calls[0].time).total_seconds()
        goes_on = rng.random() < GOES_ON
        chat = _taken(open_chats, chats, call, arrival_s) if goes_on else None
        if chat is None:
            chat = _Chat(len(chats), 0, 0, np.empty(0, np.uint32), 0.0, 0.0)
            chats.append(chat)
        num_tokens = call.num_prompt_tokens + call.num_output_tokens
        num_kept = chat.num_tokens // unit
        num_named = max(num_tokens // unit, -(-call.num_prompt_tokens // unit))
        if num_blocks + num_named - num_kept > MAX_ID:
            raise ValueError(f"more than {MAX_ID} blocks, too many for one trace")
        fresh = np.arange(num_blocks, num_blocks + num_named - num_kept, dtype=np.uint32)
        num_blocks += len(fresh)
        blocks = np.concatenate([chat.blocks[:num_kept], fresh])
        yield Request(
            path=blocks.astype("<u4").tobytes(),
            num_prompt_tokens=call.num_prompt_tokens,
            num_output_tokens=call.num_output_tokens,
            num_known_tokens=num_tokens // unit * unit,
            arrival_s=arrival_s,
            session=chat.session,
            turn=chat.num_turns,
        )
        chat.num_turns += 1
        chat.num_tokens, chat.blocks = num_tokens, blocks
        chat.last_s, chat.ready_s = arrival_s, arrival_s + call.num_output_tokens / ANSWER_TOKENS_PER_S
        bisect.insort(open_chats, (num_tokens, chat.session))


def _taken(open_chats: list[tuple[int, int]], chats: list[_Chat], call: _Call, arrival_s: float) -> _Chat | None:
    """The open chat with the longest history that the request fits, taken out of `open_chats`."""
    index = bisect.bisect_left(open_chats, (call.num_prompt_tokens, 0)) - 1
    while index >= 0 and open_chats[index][0] >= call.num_prompt_tokens - MAX_NEW_TOKENS:
        chat = chats[open_chats[index][1]]
        if arrival_s - chat.last_s > MAX_PAUSE_S:
            chat.blocks = chat.blocks[:0]
            del open_chats[index]
        elif chat.ready_s <= arrival_s:
            del open_chats[index]
            return chat
        index -= 1
    return None
