"""What is asked of an index, and what it answers.

The hit of a worker is the largest position of a request's chain at which the worker holds a state *and* the KV of every
block up to it: attention needs all tokens before a position, a recurrent layer the one state that stands there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from marconi.router.events.base import Namespace


@dataclass(frozen=True, slots=True)
class Chain:
    """The positions of a prompt that a request may start from, all before its last token: that one is always computed.

    Hashes are chained, so one that is equal says that all before it are.
    """

    namespace: Namespace
    hashes: Sequence[int]
    """Of the full blocks: the one at `index` ends `(index + 1) * block_tokens` deep."""
    tail: Callable[[int], int | None] | None = None
    """The hash of the partial block that ends at a depth; None beyond the prompt. Asked only where such a state is."""


class Hit(NamedTuple):
    """What a worker has of a chain."""

    num_tokens: int
    """Not computed again: the depth of the deepest state with all KV before it; 0 if there is none."""
    num_kv_tokens: int
    """Whose KV is held without a hole from the first token on, in whole blocks or up to the hit: what an index that
    knows no states would promise."""


NO_HIT = Hit(0, 0)


@dataclass(slots=True)
class Counters:
    """What an index refused or gave up, in entries; never a wrong answer, at most a missed hit."""

    num_malformed: int = 0
    """Not a 64-bit hash, a block of another size than the fleet's, a block after a partial one."""
    num_conflicting: int = 0
    """A block said to follow another block, or to stand in another namespace, than is known of it."""
    num_unknown_removals: int = 0
    """Removed, but not held: forgotten, or refused when it was stored."""
    num_over_limit: int = 0
    """Beyond what one worker may hold."""
    num_forgotten: int = 0
    """The coldest blocks, given up for room."""
