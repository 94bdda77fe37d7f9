"""Explanations in OpenAI's streams: one more chunk, whose `choices` are empty as in the chunk with the usage.

    data: {"id": ..., "choices": [{"index": 0, ...}]}     SGLang's chunks, as they come
    data: {"id": ..., "choices": [], "usage": ...}        if the client asks for its usage
    data: {"id": ..., "choices": [], "metadata": ...}     if it asks for its explanation: as in an answer in one piece
    data: [DONE]

SGLang's models of chunks have no field for it, so the meta-information of each choice that has ended stays at the HTTP
request, by the choice's `rid`, until the stream ends. As in an answer in one piece, the first choice is explained. A
stream that ends by an error has no such chunk. A client that disconnects ends SGLang's generator with ours.

Owner: the process that answers HTTP.
"""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any, Final

from marconi.engine.faults import beside
from marconi.engine.reports.explain import is_wanted

_ENDED: Final = "marconi_ended"
"""In the `state` of an HTTP request: the meta-information of what has ended, by `rid`, if its stream explains."""
_DATA: Final = "data: "
_DONE: Final = f"{_DATA}[DONE]\n\n"
_HEAD: Final = ("id", "object", "created", "model")


def around_stream(
    stream: Callable[..., Any], serving: Any, adapted_request: Any, request: Any, raw_request: Any
) -> AsyncIterator[str]:
    """Around the generators of OpenAI's streams: SGLang's own, unless the client asks for its explanation."""
    chunks: AsyncGenerator[str, None] = stream(serving, adapted_request, request, raw_request)
    if raw_request is None or not is_wanted(request.custom_params):
        return chunks
    ended: dict[str, Mapping[str, Any]] = {}
    setattr(raw_request.state, _ENDED, ended)
    return _explaining(chunks, ended)


def note_explained(raw_request: Any, meta_info: Mapping[str, Any]) -> None:
    """A choice has ended, and its `meta_info` explains it; nothing is kept unless its stream waits for that."""
    ended = getattr(getattr(raw_request, "state", None), _ENDED, None)
    if ended is not None:
        ended[meta_info["id"]] = meta_info


async def _explaining(chunks: AsyncGenerator[str, None], ended: Mapping[str, Mapping[str, Any]]) -> AsyncIterator[str]:
    head: dict[str, Any] | None = None
    async with aclosing(chunks):
        async for chunk in chunks:
            head = head or beside("http.streams.around_stream", _head)(chunk)
            if chunk == _DONE and head is not None and head["id"] in ended:
                explanation = beside("http.streams.around_stream", _explanation)(head, ended[head["id"]])
                if explanation is not None:
                    yield explanation
            yield chunk


def _explanation(head: Mapping[str, Any], meta_info: Mapping[str, Any]) -> str:
    """The chunk with what `meta_info` says."""
    from sglang.srt.utils import weight_versions

    metadata = weight_versions.build_endpoint_weight_version_metadata(meta_info)
    return f"{_DATA}{json.dumps({**head, 'choices': [], 'metadata': metadata})}\n\n"


def _head(chunk: str) -> dict[str, Any] | None:
    """The fields that all chunks share; None for a chunk that is not of the first choice."""
    if not chunk.startswith(f"{_DATA}{{"):
        return None
    values = json.loads(chunk.removeprefix(_DATA))
    is_first = any(choice["index"] == 0 for choice in values.get("choices", ()))
    return {name: values[name] for name in _HEAD} if is_first else None
