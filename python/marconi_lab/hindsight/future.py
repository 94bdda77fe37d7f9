"""The future of a trace: which later requests could start from a state at a given prefix.

A request of p prompt tokens can start from any state on its path at no more than p - 1 tokens. `Future` holds the
prompts of a whole trace, cut there, in a radix tree of its own, and with each node the requests that reach its end.
A prefix that ends within a span is reached by the same requests as the span's end, for every request ends at a node.
"""

from bisect import bisect_right
from collections.abc import Sequence

from marconi.policy.request import Request, Trace
from marconi.tree.node import ID_BYTES, common_bytes


class Prefix:
    """A span of the future's tree, and who reaches its end."""

    __slots__ = ("children", "key", "uses")

    def __init__(self, key: bytes, uses: list[int]) -> None:
        self.key = key
        self.children: dict[bytes, Prefix] = {}
        self.uses = uses
        """Indices of the requests, rising."""

    def next_use(self, now: int, but_not: "Sequence[Prefix]" = ()) -> int | None:
        """The first request after index `now` that gets here but to none of `but_not`, prefixes further down."""
        uses = self.uses
        for position in range(bisect_right(uses, now), len(uses)):
            index = uses[position]
            if not any(below.is_used_by(index) for below in but_not):
                return index
        return None

    def is_used_by(self, index: int) -> bool:
        """True if request `index` gets here."""
        position = bisect_right(self.uses, index)
        return position > 0 and self.uses[position - 1] == index


class Future:
    """The prompts of a trace."""

    def __init__(self, trace: Trace) -> None:
        self.requests = trace.requests
        self.unit_tokens = trace.unit_tokens
        self._roots: dict[int, Prefix] = {}
        self._index_of: dict[tuple[int, float, bytes], int] = {}
        for index, request in enumerate(trace.requests):
            self._add(request, index)
            self._index_of.setdefault(_name(request), index)

    def index_of(self, request: Request, expected: int) -> int:
        """Where in the trace `request` is: at `expected`, or else the first such; `ValueError` if it is not there.

        Of a request its prompt may be all that is known.
        """
        name, requests = _name(request), self.requests
        if expected < len(requests) and _name(requests[expected]) == name:
            return expected
        index = self._index_of.get(name)
        if index is None:
            raise ValueError(f"request {expected} must be one of the trace that hindsight was made of, got another")
        return index

    def prefix(self, path: bytes, num_tokens: int, namespace: int = 0) -> Prefix | None:
        """The span that holds the end of the first `num_tokens` tokens of `path`; None if no prompt gets there."""
        size = num_tokens // self.unit_tokens * ID_BYTES
        span = self._roots.get(namespace)
        position = 0
        while span is not None and position < size:
            span = span.children.get(path[position : position + ID_BYTES])
            if span is None:
                return None
            overlap = min(len(span.key), size - position)
            if path[position : position + overlap] != span.key[:overlap]:
                return None
            position += overlap
        return span

    def _add(self, request: Request, index: int) -> None:
        num_tokens = min(request.num_prompt_tokens - 1, request.num_known_tokens)
        path = request.path[: num_tokens // self.unit_tokens * ID_BYTES]
        span = self._roots.setdefault(request.namespace, Prefix(b"", []))
        span.uses.append(index)
        position = 0
        while position < len(path):
            first = path[position : position + ID_BYTES]
            child = span.children.get(first)
            if child is None:
                span.children[first] = Prefix(path[position:], [index])
                return
            if path[position : position + len(child.key)] != child.key:
                size = common_bytes(child.key, path[position:])
                upper = Prefix(child.key[:size], child.uses.copy())
                child.key = child.key[size:]
                upper.children[child.key[:ID_BYTES]] = child
                span.children[first] = child = upper
            child.uses.append(index)
            span = child
            position += len(child.key)


def _name(request: Request) -> tuple[int, float, bytes]:
    return request.namespace, request.arrival_s, request.path
