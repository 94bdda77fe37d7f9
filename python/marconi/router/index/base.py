"""What an index is asked, and what it answers.

The hit of a worker is the largest position of a request's chain at which the worker keeps a state *and* holds the KV of
every block up to it: attention needs all tokens before a position, a recurrent layer the one state that stands there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from marconi.events.base import Namespace


@dataclass(frozen=True, slots=True)
class Chain:
    """The positions of a prompt that a request may start from, all before its last token: that one is always computed.

    Hashes are chained, so one that is equal says that all before it are.
    """

    namespace: Namespace
    hashes: Sequence[int]
    """Those of the full blocks: the one at `index` ends `(index + 1) * block_tokens` deep."""
    tail: Callable[[int], int | None] | None = None
    """The hash of the part of a block that ends at a depth; None beyond the prompt. Called only for lengths of parts
    that somebody holds there."""


class Hit(NamedTuple):
    """The tokens of a chain that a worker has."""

    num_tokens: int
    """Not computed again: the depth of the deepest state with all KV before it; 0 if there is none."""
    num_kv_tokens: int
    """Tokens whose KV is held without a hole from the first on, in whole blocks or up to the hit: what an index that
    knows no states would promise."""


NO_HIT: Final = Hit(0, 0)


@dataclass(slots=True)
class IndexStats:
    """Entries that an index refused; never a wrong answer, at most a missed hit."""

    num_malformed: int = 0
    """No 64-bit hash, or a block of another size than the fleet's."""
    num_conflicting: int = 0
    """Stored in another namespace than before, or a part behind another block or of another length."""
    num_unknown_removals: int = 0
    """Removed, but not held: refused when it was stored."""
    num_over_limit: int = 0
    """More than one worker, or all of them together, may hold."""
