"""The part of each prompt of a trace that it shares with the requests before it.

A *stretch* of request i is a part of its prompt that earlier requests computed too, the last of them request j
("since"). KV there, and a state at its end, can be used by i only if it was held from j to i. Stretches of a request
follow each other from the front of its prompt, the later the longer unused.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from marconi.policy.request import Request, Trace
from marconi.tree.node import ID_BYTES, common_bytes


@dataclass(frozen=True, slots=True)
class Reuse:
    """The stretches of a trace, by request and from the front of its prompt; arrays of one element a stretch."""

    num_requests: int
    num_prompt_tokens: int
    """Of all requests, shared or not."""
    request: NDArray[np.int64]
    """Index of the request that it is a part of."""
    num_tokens: NDArray[np.int64]
    since: NDArray[np.int64]
    """Index of the last request before that computed it."""

    @classmethod
    def of(cls, trace: Trace) -> "Reuse":
        """Go through `trace` once. A prompt's last token is always computed, and what lies beyond what is known."""
        roots: dict[int, _Span] = {}
        rows: list[tuple[int, int, int]] = []
        for index, request in enumerate(trace.requests):
            root = roots.setdefault(request.namespace, _Span(b"", index))
            stretches = _computed_by(index, request, trace.unit_tokens, root)
            rows += [(index, num_units * trace.unit_tokens, since) for num_units, since in stretches]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 3).T
        num_prompt_tokens = sum(request.num_prompt_tokens for request in trace.requests)
        return cls(len(trace.requests), num_prompt_tokens, *columns)

    @property
    def num_shared_tokens(self) -> int:
        """Prompt tokens that some earlier request had computed: what a cache without limits could hit."""
        return int(self.num_tokens.sum())

    @property
    def num_new_tokens(self) -> int:
        """Prompt tokens that no cache could have."""
        return self.num_prompt_tokens - self.num_shared_tokens


class _Span:
    """A stretch of what was computed, all of it last by the same request."""

    __slots__ = ("children", "key", "last")

    def __init__(self, key: bytes, last: int) -> None:
        self.key = key
        self.last = last
        self.children: dict[bytes, _Span] = {}


def _computed_by(index: int, request: Request, unit_tokens: int, span: _Span) -> list[tuple[int, int]]:
    """Record below the root `span` the units that `request` computes; returns those it finds, and since when."""
    num_usable = min(request.num_prompt_tokens - 1, request.num_known_tokens) // unit_tokens
    num_computed = max(num_usable, request.last_known_depth(unit_tokens) // unit_tokens)
    path, found, position = request.path[: num_computed * ID_BYTES], [], 0
    while position < len(path):
        first = path[position : position + ID_BYTES]
        child = span.children.get(first)
        if child is None:
            span.children[first] = _Span(path[position:], index)
            break
        if path[position : position + len(child.key)] != child.key:
            size = common_bytes(child.key, path[position:])
            upper = _Span(child.key[:size], child.last)
            child.key = child.key[size:]
            upper.children[child.key[:ID_BYTES]] = child
            span.children[first] = child = upper
        num_units = min(len(child.key), num_usable * ID_BYTES - position) // ID_BYTES
        if num_units > 0:
            found.append((num_units, child.last))
        child.last = index
        span = child
        position += len(child.key)
    return found
