"""ShareGPT JSON: a list of conversations, each `id` and `conversations`, a list of `from` and `value`.

Every answer (`gpt`) after a prompt is a request: its prompt is all that was said before it, its output the answer, both
as tokens (`tokens`), all known. Several prompts in a row are one; an answer before any prompt (the file cuts long
conversations, and the rest begins so) is history; a conversation without an answered prompt gives no request.

There are no times: conversations start as a Poisson process of `session_rate` (1 a second) in the order of the file; a
next request comes when the answer is decoded (50 tokens a second) and `think_time_s` has passed in the mean. The file
is read in pieces, one conversation at a time (`array`). A JSONL file with a conversation a line is read as well.
"""

from collections.abc import Callable, Iterator
from functools import partial

import msgspec
import numpy as np

from marconi.policy.request import Request, Trace, pack
from marconi.replay.trace.arrivals import SESSION_RATE, Pace, session_starts
from marconi.replay.trace.base import BadRecord, Reader, ReadOptions, ReadProgress, SessionNumbers, arranged
from marconi.replay.trace.decode import RecordDecoder, shown
from marconi.replay.trace.source import Document, Source
from marconi.replay.trace.tokens import ESTIMATED, Tokenizer, tokenizer
from marconi_lab.trace import array

_PROMPTS = ("human", "user")
_ANSWERS = ("gpt", "chatgpt", "bing", "bard", "assistant", "model")
_SPEAKERS = ("system", *_PROMPTS, *_ANSWERS)

Turns = list[tuple[list[int], list[int]]]
"""Tokens that each request adds to its conversation: those before the answer, and the answer's."""


class _Message(msgspec.Struct):
    speaker: str = msgspec.field(name="from")
    value: str

    def __post_init__(self) -> None:
        if self.speaker not in _SPEAKERS:
            raise BadRecord(f"from must be one of {', '.join(_SPEAKERS)}, got {shown(self.speaker)}")


class _Conversation(msgspec.Struct):
    conversations: list[_Message]


_decoded = RecordDecoder(_Conversation)


def _read(source: Source, options: ReadOptions, watch: ReadProgress) -> Trace:
    """Every request of the conversations kept by `options`."""
    tokens = tokenizer(options.tokenizer)
    if options.tokenizer is None:
        watch.remark(ESTIMATED)
    numbers = SessionNumbers(options)
    pace = Pace(options.think_time_s)
    rng = np.random.default_rng(options.seed)
    starts = session_starts(SESSION_RATE if options.session_rate is None else options.session_rate, rng)
    requests: list[Request] = []
    for document in source.documents():
        for index, conversation in enumerate(_conversations(document)):
            if numbers.full:
                break
            with watch.at(document.name, index, "conversation"):
                turns = _turns(conversation(), tokens)
                session = numbers.number((document.name, index)) if turns else None
                if session is not None:
                    requests += _requests(turns, session, next(starts), pace, rng)
    return arranged(source, 1, requests)


SHAREGPT = Reader(
    "sharegpt",
    lambda head: "conversations" in head.keys,
    _read,
    uses=frozenset({"session_rate", "think_time_s", "max_sessions", "tokenizer"}),
    is_of_lines=False,
)


def _requests(turns: Turns, session: int, start_s: float, pace: Pace, rng: np.random.Generator) -> Iterator[Request]:
    history, arrival_s = b"", start_s
    num_history = 0
    for turn, (added, answer) in enumerate(turns):
        num_prompt = num_history + len(added)
        num_history = num_prompt + len(answer)
        history += pack([*added, *answer])
        yield Request(history, num_prompt, len(answer), num_history, arrival_s, session, turn)
        arrival_s += pace.gap_s(len(answer), rng)


def _turns(conversation: _Conversation, tokens: Tokenizer) -> Turns:
    turns: Turns = []
    added: list[int] = []
    prompted = False
    for message in conversation.conversations:
        said = tokens(message.value)
        if message.speaker in _ANSWERS and prompted and added:
            turns.append((added, said))
            added, prompted = [], False
        else:
            added = added + said
            prompted = prompted or message.speaker in _PROMPTS
    return turns


def _conversations(document: Document) -> Iterator[Callable[[], _Conversation]]:
    """A function for each conversation of a document that gives it, or `BadRecord`."""
    first = document.read(array.PIECE_BYTES)
    if first.lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
        for element in array.Array(document, first, "conversations").elements():
            yield lambda element=element: _decoded.convert(element())  # type: ignore[misc]
        return
    rest = first + document.read()
    for line in rest.splitlines():
        if line.strip():
            yield partial(_decoded, line)
