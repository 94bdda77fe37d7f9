"""Azure LLM inference CSV: `TIMESTAMP,ContextTokens,GeneratedTokens`, lengths alone, so sessions are made up.

The rule, in order of arrival: with probability 0.6 (seeded) a request goes on from an open chat, else it begins one.
A chat is open for a request if its history H (context and answer so far) fits, H < ContextTokens <= H + 1024, and its
last request is no older than ten minutes and has had time to be answered at 50 tokens a second. Of the open chats it
takes the one with the longest history; without one it begins a chat. Chats have at most 1 / (1 - 0.6) = 2.5 turns in
the mean, about those of public chat data (WildChat 2.54, LMSYS-Chat-1M 2.02). A chat's context only grows.

Identities are made up with the chats, in units of 16 tokens to keep them small. Figures from such a trace show lengths
and arrivals of real traffic, but its reuse is this rule's.

Source of the format: github.com/Azure/AzurePublicDataset (2023; the 2024 files have a time zone).
"""

import bisect
import csv
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

import numpy as np
from numpy.typing import NDArray

from marconi.policy.request import Request, Trace
from marconi.replay.trace.arrivals import ANSWER_TOKENS_PER_S
from marconi.replay.trace.base import BadRecord, ReadOptions, SessionNumbers, Watch, arranged
from marconi.replay.trace.fields import MAX_ID, MAX_TOKENS, check_bounds, shown
from marconi.replay.trace.order import Order, Placed, document_lines, in_order
from marconi.replay.trace.source import Head, Source

COLUMNS = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
UNIT_TOKENS = 16
GOES_ON = 0.6
MAX_NEW_TOKENS = 1024
MAX_PAUSE_S = 600.0
MAX_DIGITS = 1000
"""Of a number that is read at all."""


@dataclass(frozen=True, slots=True)
class _Row:
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


class Azure:
    """Reads Azure CSV."""

    name = "azure"
    uses = frozenset({"max_sessions"})

    def recognises(self, head: Head) -> bool:
        """The header line."""
        return head.data.removeprefix(b"\xef\xbb\xbf").startswith(b"TIMESTAMP,ContextTokens")

    def read(self, source: Source, options: ReadOptions, watch: Watch) -> Trace:
        """Every request of the made-up sessions kept by `options`."""
        rows = [placed.content for placed in in_order(_rows(source, watch), _ORDER, watch)]
        requests = _chats(rows, options.block_tokens or UNIT_TOKENS, options.seed)
        sessions = SessionNumbers(options)
        kept = [
            Request(
                request.path,
                request.num_prompt_tokens,
                request.num_output_tokens,
                request.num_known_tokens,
                request.arrival_s,
                number,
                request.turn,
            )
            for request in requests
            if (number := sessions.number(request.session)) is not None
        ]
        return arranged(source, options.block_tokens or UNIT_TOKENS, kept)


_ORDER: Order[_Row] = Order("TIMESTAMP", lambda row: row.time, str)


def _rows(source: Source, watch: Watch) -> Iterator[Placed[_Row]]:
    zoned: bool | None = None

    def row(line: bytes) -> _Row:
        nonlocal zoned
        read = _row(line)
        if zoned not in (None, read.time.tzinfo is not None):
            raise BadRecord("TIMESTAMP has a time zone where others have none, or the other way round")
        zoned = read.time.tzinfo is not None
        return read

    for document in source.documents():
        numbered = document.lines()
        header = next(numbered, (1, b""))[1].decode("utf-8-sig", "replace").strip().split(",")
        if header != COLUMNS:
            raise ValueError(
                f"{document.name}, line 1: the columns are {','.join(header)[:60]!r}, must be {','.join(COLUMNS)}"
            )
        yield from document_lines(document.name, numbered, watch, row)


def _row(line: bytes) -> _Row:
    try:
        values = next(csv.reader([line.decode("utf-8", "replace")]))
    except csv.Error as error:
        raise BadRecord(f"not CSV ({error})") from None
    if len(values) != len(COLUMNS):
        raise BadRecord(f"{len(values)} columns, must be {len(COLUMNS)}: cut off or malformed")
    try:
        time = datetime.fromisoformat(values[0])
    except ValueError:
        raise BadRecord(f"TIMESTAMP is {values[0][:40]!r}, must be a date and time") from None
    return _Row(time, _count(values[1], COLUMNS[1], 1), _count(values[2].strip(), COLUMNS[2], 0))


def _count(value: str, column: str, minimum: int) -> int:
    if not (value.isascii() and value.removeprefix("-").isdigit()):
        raise BadRecord(f"{column} is {shown(value)}, must be a whole number")
    if len(value) > MAX_DIGITS:
        raise BadRecord(f"{column} has {len(value)} digits, must be at most {MAX_TOKENS}")
    check_bounds(column, int(value), minimum, MAX_TOKENS)
    return int(value)


def _chats(rows: list[_Row], unit: int, seed: int) -> Iterator[Request]:
    rng = np.random.default_rng(seed)
    chats: list[_Chat] = []
    open_chats: list[tuple[int, int]] = []
    """(history in tokens, index in `chats`), sorted."""
    num_blocks = 0
    for row in rows:
        arrival_s = (row.time - rows[0].time).total_seconds()
        goes_on = rng.random() < GOES_ON
        chat = _taken(open_chats, chats, row, arrival_s) if goes_on else None
        if chat is None:
            chat = _Chat(len(chats), 0, 0, np.empty(0, np.uint32), 0.0, 0.0)
            chats.append(chat)
        num_tokens = row.num_prompt_tokens + row.num_output_tokens
        num_kept = chat.num_tokens // unit
        num_named = max(num_tokens // unit, -(-row.num_prompt_tokens // unit))
        if num_blocks + num_named - num_kept > MAX_ID:
            raise ValueError(f"more than {MAX_ID} blocks, too many for one trace")
        fresh = np.arange(num_blocks, num_blocks + num_named - num_kept, dtype=np.uint32)
        num_blocks += len(fresh)
        blocks = np.concatenate([chat.blocks[:num_kept], fresh])
        yield Request(
            path=blocks.astype("<u4").tobytes(),
            num_prompt_tokens=row.num_prompt_tokens,
            num_output_tokens=row.num_output_tokens,
            num_known_tokens=num_tokens // unit * unit,
            arrival_s=arrival_s,
            session=chat.session,
            turn=chat.num_turns,
        )
        chat.num_turns += 1
        chat.num_tokens, chat.blocks = num_tokens, blocks
        chat.last_s, chat.ready_s = arrival_s, arrival_s + row.num_output_tokens / ANSWER_TOKENS_PER_S
        bisect.insort(open_chats, (num_tokens, chat.session))


def _taken(open_chats: list[tuple[int, int]], chats: list[_Chat], row: _Row, arrival_s: float) -> _Chat | None:
    """The open chat with the longest history that the request fits, taken out of `open_chats`."""
    index = bisect.bisect_left(open_chats, (row.num_prompt_tokens, 0)) - 1
    while index >= 0 and open_chats[index][0] >= row.num_prompt_tokens - MAX_NEW_TOKENS:
        chat = chats[open_chats[index][1]]
        if arrival_s - chat.last_s > MAX_PAUSE_S:
            chat.blocks = chat.blocks[:0]
            del open_chats[index]
        elif chat.ready_s <= arrival_s:
            del open_chats[index]
            return chat
        index -= 1
    return None
