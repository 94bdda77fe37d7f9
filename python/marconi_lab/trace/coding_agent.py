"""Coding-agent sessions: one JSON document a session, with sub-agents, from github.com/callanjfox/kv-cache-tester.

What the files say and what is made of it:
- `hash_ids` name the whole blocks (64 tokens) of a prompt; each stands for its block and all before it, within its
  session only. They become ids that are dense over the trace.
- `tool_tokens` + `system_tokens` are the front of the session's first prompt. Sessions with the same pair of lengths
  are taken to have the same text there (`system_prompts="shared"`): its whole blocks get one identity. Sub-agents have
  a pair of their own. No such front is longer than the longest prompt; one that is makes the session bad.
- An entry of type `subagent` holds requests whose `t` counts from the sub-agent's start. The entry's own `t` is its
  *end* where `duration_ms` is given (the start is then `t - duration_ms`, just after the request that launched it), and
  its start where it is null (launched in the background). A sub-agent is a session of its own, numbered after its
  parent.
- Types `n` and `s` (streamed) are alike. A change of `model` within a session is left as one prefix space
  (`models="one"`: one model serves the trace) or becomes a namespace for each model (`models="separate"`).
- Decoded tokens are known as `identity.with_output` says.
- Some sessions are resumed copies of others (the same requests again). Both belong to the same `half`, so that nothing
  is tuned on what is reported; sessions whose first requests agree in lengths and duration are taken to be copies.

Sessions start as a Poisson process of `session_rate` a second, in the order listed; times within one are as recorded.
"""

import codecs
import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from marconi.policy.request import Request, Trace
from marconi.replay.trace.arrivals import session_starts
from marconi.replay.trace.base import BadRecord, Half, Reader, ReadOptions, ReadProgress, SessionNumbers, arranged
from marconi.replay.trace.decode import (
    MAX_INTEGER,
    Id,
    Milliseconds,
    PromptTokens,
    RecordDecoder,
    Seconds,
    Tokens,
    check_num_blocks,
    check_order,
)
from marconi.replay.trace.identity import MAX_ID, DenseIds, with_output
from marconi.replay.trace.source import Source

SESSION_RATE = 0.02

Ids = NDArray[np.int64]


class _Request(msgspec.Struct, tag_field="type", tag="n"):
    t: Seconds
    input: PromptTokens = msgspec.field(name="in")
    out: Tokens
    hash_ids: list[Id]
    model: str
    api_time: float | None = None


class _Streamed(_Request, tag="s"):
    pass


class _Subagent(msgspec.Struct, tag_field="type", tag="subagent"):
    t: Seconds
    tool_tokens: Tokens
    system_tokens: Tokens
    requests: list[_Request | _Streamed]
    duration_ms: Milliseconds | None = None


class _File(msgspec.Struct):
    block_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_INTEGER)]
    hash_id_scope: Literal["local"]
    tool_tokens: Tokens
    system_tokens: Tokens
    requests: list[_Request | _Streamed | _Subagent]


_decoded = RecordDecoder(_File, {"hash_id_scope": "'local'", "type": "n, s or, not within itself, subagent"})


@dataclass(frozen=True, slots=True)
class _Turn:
    start_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    blocks: Ids
    model: str


@dataclass(frozen=True, slots=True)
class _Chat:
    """The session itself, or one of its sub-agents."""

    start_s: float
    front: tuple[int, int]
    """Lengths of the tools' and the system's prompt."""
    turns: list[_Turn]


@dataclass(frozen=True, slots=True)
class _Session:
    block_tokens: int
    family: tuple[int, int, float | None]
    """Equal for a session and its resumed copies."""
    chats: list[_Chat]


def _read(source: Source, options: ReadOptions, watch: ReadProgress) -> Trace:
    """Every request of the sessions kept by `options`; a session with a fault is bad as a whole."""
    watch.num_total = source.num_documents()
    session_rate = SESSION_RATE if options.session_rate is None else options.session_rate
    starts = session_starts(session_rate, np.random.default_rng(options.seed))
    families = DenseIds()
    selected = SessionNumbers(dataclasses.replace(options, half=Half.ALL))
    identities = _Identities(shared=options.system_prompts == "shared")
    models = DenseIds()
    requests: list[Request] = []
    block_tokens = options.block_tokens
    num_sessions = 0
    for document in source.documents():
        if selected.full:
            break
        with watch.at(document.name):
            session = _session(_file(document.read()), block_tokens)
            if not options.half.keeps(families[session.family]):
                continue
            selected.number(document.name)
            block_tokens = session.block_tokens
            start_s = next(starts)
            blocks = identities.of(session)
            for chat in session.chats:
                for turn, request in enumerate(_requests(chat, blocks, block_tokens, options.models)):
                    namespace = models[chat.turns[turn].model] if options.models == "separate" else 0
                    requests.append(
                        dataclasses.replace(
                            request,
                            arrival_s=start_s + request.arrival_s,
                            session=num_sessions,
                            turn=turn,
                            namespace=namespace,
                        )
                    )
                num_sessions += 1
    return arranged(source, block_tokens or 1, requests)


CODING_AGENT = Reader(
    "coding-agent",
    lambda head: "hash_id_scope" in head.keys,
    _read,
    uses=frozenset({"session_rate", "max_sessions", "system_prompts", "models"}),
    is_of_lines=False,
)


class _Identities:
    """Gives each session's block ids identities that are dense over the trace."""

    def __init__(self, *, shared: bool) -> None:
        self._shared: dict[tuple[int, int], Ids] | None = {} if shared else None
        self._num_ids = 0

    def of(self, session: _Session) -> Ids:
        """A table from the session's ids to the trace's."""
        table = np.full(_bound(session), -1, dtype=np.int64)
        for chat in session.chats:
            if self._shared is not None:
                front = _front(chat, session.block_tokens)
                # A sub-agent's front may begin with blocks that this session has named already: those stay.
                open_blocks = front[table[front] < 0]
                agreed = self._shared.get(chat.front)
                if agreed is None:
                    table[open_blocks] = self._fresh(len(open_blocks))
                    self._shared[chat.front] = table[front]
                else:
                    table[front] = np.where(table[front] < 0, agreed, table[front])
            for turn in chat.turns:
                unnamed = turn.blocks[table[turn.blocks] < 0]
                table[unnamed] = self._fresh(len(unnamed))
        return table

    def _fresh(self, count: int) -> Ids:
        first, self._num_ids = self._num_ids, self._num_ids + count
        if self._num_ids > MAX_ID:
            raise ValueError(f"more than {MAX_ID} blocks, too many for one trace")
        return np.arange(first, self._num_ids, dtype=np.int64)


def _bound(session: _Session) -> int:
    return (
        max((int(turn.blocks.max()) for chat in session.chats for turn in chat.turns if len(turn.blocks)), default=0)
        + 1
    )


def _front(chat: _Chat, block_tokens: int) -> Ids:
    num_blocks = sum(chat.front) // block_tokens
    return next(turn.blocks[:num_blocks] for turn in chat.turns if len(turn.blocks) >= num_blocks)


def _requests(chat: _Chat, table: Ids, unit: int, models: str) -> list[Request]:
    prompts = [
        Request(
            path=table[turn.blocks].astype("<u4").tobytes(),
            num_prompt_tokens=turn.num_prompt_tokens,
            num_output_tokens=turn.num_output_tokens,
            num_known_tokens=0,
            arrival_s=chat.start_s + turn.start_s,
        )
        for turn in chat.turns
    ]
    return [
        with_output(prompt, following if models == "one" or next_model == turn.model else None, unit)
        for turn, prompt, following, next_model in zip(
            chat.turns, prompts, [*prompts[1:], None], [*(turn.model for turn in chat.turns[1:]), ""], strict=True
        )
    ]


def _file(document: bytes) -> _File:
    try:
        return _decoded(document.removeprefix(codecs.BOM_UTF8))
    except BadRecord as error:
        if "trailing characters" in str(error):
            raise BadRecord(f"{error}; a session needs a file of its own, in a folder or a tar") from None
        raise


def _session(file: _File, block_tokens: int | None) -> _Session:
    unit = file.block_size
    if block_tokens is not None and unit != block_tokens:
        raise BadRecord(f"block_size must be {block_tokens} as asked for or as in the sessions before, got {unit}")
    own = [(f"requests[{i}]", entry) for i, entry in enumerate(file.requests) if not isinstance(entry, _Subagent)]
    chats = [_chat(file, own, unit)]
    for index, entry in enumerate(file.requests):
        if isinstance(entry, _Subagent):
            place = f"requests[{index}]"
            nested = [(f"{place}.requests[{i}]", request) for i, request in enumerate(entry.requests)]
            chats.append(_chat(entry, nested, unit, f"{place}."))
    chats = [chat for chat in chats if chat.turns]
    if not chats:
        raise BadRecord("requests must hold a request, got none")
    first = chats[0].turns[0]
    family = (first.num_prompt_tokens, first.num_output_tokens, own[0][1].api_time if own else None)
    return _Session(unit, family, _compact(chats))


def _compact(chats: list[_Chat]) -> list[_Chat]:
    """`chats` with small ids, so that a table of them is no larger than the session."""
    blocks = np.concatenate([turn.blocks for chat in chats for turn in chat.turns])
    if not len(blocks) or int(blocks.max()) <= 2 * len(blocks):
        return chats
    known = np.unique(blocks)
    return [
        dataclasses.replace(
            chat,
            turns=[dataclasses.replace(turn, blocks=np.searchsorted(known, turn.blocks)) for turn in chat.turns],
        )
        for chat in chats
    ]


def _chat(said: _File | _Subagent, requests: list[tuple[str, _Request]], unit: int, place: str = "") -> _Chat:
    """The chat of `requests`, each with its place; `place` is that of the chat itself."""
    start_s = 0.0
    if isinstance(said, _Subagent):
        start_s = max(0.0, said.t - (said.duration_ms or 0.0) / 1000)
    turns: list[_Turn] = []
    last_s = None
    for where, request in requests:
        try:
            check_num_blocks(request.hash_ids, request.input, unit, partial_named=False)
            check_order("t", request.t, last_s)
        except BadRecord as error:
            raise BadRecord(f"{where}: {error}") from None
        last_s = request.t
        blocks = np.array(request.hash_ids, dtype=np.int64)
        turns.append(_Turn(request.t, request.input, request.out, blocks, request.model))
    front = (said.tool_tokens, said.system_tokens)
    longest = max((turn.num_prompt_tokens for turn in turns), default=sum(front))
    if sum(front) > longest:
        raise BadRecord(
            f"{place}tool_tokens + system_tokens must be at most {longest}, its longest prompt, got {sum(front)}"
        )
    return _Chat(start_s, front, turns)
