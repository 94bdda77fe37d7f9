"""The log of SGLang's own requests: `--log-requests --log-requests-format json`, at level 3, which cuts nothing.

    line       JSON, with or without the logger's time in front; other lines of the server's output are passed over
    request    `request.finished`: the prompt's `input_ids`, or its `text`, in `obj`; the answer's `output_ids`, or its
               `text`, in `out`, or of neither the number that `meta_info` counts, with ids of the request's own;
               `extra_key` with `cache_salt` is a namespace
    time       that of `request.received` with the same `rid`, else of the end less `e2e_latency`
    session    `session_id` or `conversation_id`, else one of its own

A line of lower levels has no tokens, or some of them, and is bad. Aborted requests and embeddings are left out and
counted, and so are requests of which no end is logged. What the server had cached is summed up in a remark.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from marconi.policy.request import Request, Trace
from marconi.replay.trace.base import (
    BadRecord,
    Reader,
    ReadOptions,
    ReadProgress,
    SessionNumbers,
    arranged,
    placed,
    request_of,
)
from marconi.replay.trace.chats import Chats, MediaIds, chats
from marconi.replay.trace.decode import Id, RecordDecoder, Seconds, Tokens, clock_s, shown
from marconi.replay.trace.identity import MAX_ID, DenseIds
from marconi.replay.trace.source import Source
from marconi.replay.trace.tokens import ESTIMATED

_HALF_CUT = 1024
"""Characters that level 2 leaves of a text on either side of its cut."""
_CUT = "must be whole, which --log-requests-level 3 logs"


class _Asked(msgspec.Struct):
    text: str | None = None
    input_ids: list[Id | str | list[Any]] | None = None
    extra_key: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    conversation_id: str | None = None
    image_data: Any = None
    audio_data: Any = None
    video_data: Any = None


class _Meta(msgspec.Struct):
    prompt_tokens: Tokens | None = None
    completion_tokens: Tokens | None = None
    cached_tokens: Tokens = 0
    e2e_latency: Seconds = 0.0
    finish_reason: Any = None


class _Out(msgspec.Struct):
    text: str | None = None
    output_ids: list[Id | str] | None = None
    meta_info: _Meta | None = None
    embedding: Any = None


class _Finished(msgspec.Struct):
    obj: _Asked
    out: _Out
    timestamp: str
    rid: str | None = None


class _Event(msgspec.Struct):
    event: str
    timestamp: str | None = None
    rid: Any = None


_event = RecordDecoder(_Event)
_finished = RecordDecoder(_Finished)


def _read(source: Source, options: ReadOptions, watch: ReadProgress) -> Trace:
    """Every request that was finished, of the sessions kept by `options`."""
    texts: Chats | None = None
    came_s: dict[str, float] = {}
    names = DenseIds({("", ""): 0})
    found: list[tuple[Hashable, Request]] = []
    num_prompt = num_cached = 0
    for text in watch.lines(source):
        with watch:
            begin = text.find(b"{")
            if begin < 0 or b'"event"' not in text:
                watch.note("passed over, a line of the server's other output")
                continue
            event = _event(text[begin:])
            if event.event == "request.received" and isinstance(event.rid, str) and event.timestamp:
                came_s[event.rid] = clock_s("timestamp", event.timestamp)
            if event.event != "request.finished":
                continue
            if isinstance(event.rid, str) and b'"embedding"' in text and _is_embedding(text[begin:]):
                came_s.pop(event.rid, None)
                watch.note("left out, an embedding call")
                continue
            line = _finished(text[begin:])
            came = came_s.pop(line.rid or "", None)
            meta = line.out.meta_info or _Meta()
            if isinstance(meta.finish_reason, dict) and meta.finish_reason.get("type") == "abort":
                watch.note("left out, an aborted request")
                continue
            if texts is None and not line.obj.input_ids:
                texts = chats(options.tokenizer, options.model_folder, MediaIds(options.model_folder))
                if options.tokenizer is None and options.model_folder is None:
                    watch.remark(ESTIMATED)
            prompt, said = _prompt(line.obj, texts), _said(line.out, texts, len(found))
            if line.obj.image_data or line.obj.audio_data or line.obj.video_data:
                watch.note("images, sounds or films are as many tokens as the ids that the log has for them")
            if came is None:
                came = max(0.0, clock_s("timestamp", line.timestamp) - meta.e2e_latency)
            namespace = names[line.obj.extra_key or "", line.obj.cache_salt or ""]
            request = request_of(prompt, said, came, namespace=namespace)
            session = line.obj.session_id or line.obj.conversation_id
            found.append(((len(found),) if session is None else session, request))
            num_prompt, num_cached = num_prompt + len(prompt), num_cached + meta.cached_tokens
    if came_s:
        watch.remark(f"left out, requests of which the log has no end: {len(came_s)}")
    if num_prompt:
        watch.remark(f"the server had {num_cached:,} of {num_prompt:,} prompt tokens ({num_cached / num_prompt:.1%})")
    return arranged(source, 1, placed(_in_sessions(found, SessionNumbers(options)), options))


SGLANG_LOG = Reader(
    "sglang",
    lambda head: b'"event": "request.' in head.data or b'"event":"request.' in head.data,
    _read,
    uses=frozenset({"session_rate", "max_sessions", "tokenizer"}),
)


def _in_sessions(found: Sequence[tuple[Hashable, Request]], numbers: SessionNumbers) -> list[Request]:
    turns: dict[int, int] = {}
    requests: list[Request] = []
    for key, request in sorted(found, key=lambda each: each[1].arrival_s):
        number = numbers.number(key)
        if number is not None:
            turns[number] = turn = turns.get(number, -1) + 1
            requests.append(replace(request, session=number, turn=turn))
    return requests


def _is_embedding(text: bytes) -> bool:
    out = msgspec.json.decode(text).get("out")
    return isinstance(out, dict) and out.get("embedding") is not None


def _prompt(asked: _Asked, texts: Chats | None) -> Sequence[int]:
    if asked.input_ids:
        return _whole("obj.input_ids", asked.input_ids)
    if not asked.text or texts is None:
        raise BadRecord("obj must hold input_ids or text, which --log-requests-level 3 logs, got neither")
    return texts.text(_uncut("obj.text", asked.text), is_prompt=True)


def _said(out: _Out, texts: Chats | None, index: int) -> Sequence[int]:
    if out.output_ids is not None:
        return _whole("out.output_ids", out.output_ids)
    count = None if out.meta_info is None else out.meta_info.completion_tokens
    if out.text and texts is not None:
        return texts.text(_uncut("out.text", out.text), is_prompt=False)
    return [MAX_ID - index] * (count or 0)


def _uncut(name: str, text: str) -> str:
    if len(text) == 2 * _HALF_CUT + 3 and text[_HALF_CUT:-_HALF_CUT] == "...":
        raise BadRecord(f"{name} {_CUT}, got '...' in its middle")
    return text


def _whole(name: str, ids: Sequence[Any]) -> list[int]:
    wrong = next((each for each in ids if not isinstance(each, int)), None)
    if isinstance(wrong, list):
        raise BadRecord(f"{name} must be one request's, got those of a batch")
    if wrong is not None:
        raise BadRecord(f"{name} {_CUT}, got {shown(wrong)} in its middle")
    return list(ids)
