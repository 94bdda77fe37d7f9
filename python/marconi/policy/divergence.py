"""Where a prompt diverges from what its name space knows, and the tokens on both sides.

    before                   both sides share it; its last token is at `position`
    prompt    ... before |   continues like this
    known     ... before |   continues like that: the edge at the divergence, and from its end the newest edges

Where several edges begin, the one that shares most of the prompt's next page is taken, and of equals the newest. A
prompt that shares no token with the others of its name space diverges from nothing, and neither does one that extends
what is known, or is known up to its last token.

It reads one name space of the tree and costs one match. Owner: `engine/cache/radix_cache.py`, where an operator
allows it.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Final, NamedTuple

from marconi.policy.request import Request
from marconi.tree import Match, Node, RadixTree
from marconi.tree.node import common_bytes

MAX_TOKENS: Final = 16
"""Shown of each side."""
_MAX_EDGES: Final = 16


class Divergence(NamedTuple):
    """A prompt and what is known part; tokens are packed ids, at most `MAX_TOKENS` of them."""

    position: int
    """Tokens that both sides share."""
    before: bytes
    prompt: bytes
    known: bytes


def divergence_of(request: Request, tree: RadixTree) -> Divergence | None:
    """Where `request` diverges from its name space in `tree`, whose unit is a page; None if it does not."""
    unit = tree.unit_tokens
    num_tokens = max(min(request.num_prompt_tokens - 1, request.num_known_tokens), 0) // unit * unit
    path = request.path[: tree.offset(num_tokens)]
    match = tree.match(path, num_tokens, request.namespace)
    if match.num_seen_tokens == num_tokens or not match.diverges:
        return None
    token_bytes, start = tree.unit_bytes // unit, tree.offset(match.num_seen_tokens)
    size = MAX_TOKENS * token_bytes

    def num_shared(known: bytes) -> int:
        return common_bytes(known, path[start : start + tree.unit_bytes], token_bytes)

    known = max(_edges(match, tree, size + tree.unit_bytes), key=num_shared)
    shared = num_shared(known)
    at = start + shared
    if not at:
        return None
    return Divergence(
        at // token_bytes, path[max(at - size, 0) : at], path[at : at + size], known[shared : shared + size]
    )


def _edges(match: Match, tree: RadixTree, size: int) -> Iterator[bytes]:
    """The edges that begin where a match ends, the newest first: up to `size` bytes of each, and beyond it."""
    if match.num_span_tokens_left:
        yield _onwards(match.last, tree.offset(match.num_span_tokens_left), size)
    else:
        for child in islice(reversed(match.last.children.values()), _MAX_EDGES):
            yield _onwards(child, len(child.key), size)


def _onwards(node: Node, num_bytes: int, size: int) -> bytes:
    """From the last `num_bytes` of the span of `node` on, by the newest edges, up to `size` bytes."""
    start = len(node.key) - num_bytes
    known = node.key[start : start + size]
    while len(known) < size and node.children:
        node = next(reversed(node.children.values()))
        known += node.key[: size - len(known)]
    return known
