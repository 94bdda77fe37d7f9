"""What is known of a state when it is left, in levels of a few factors.

- `known`: how much of its path had been seen before: nothing beyond the first `SHORT_TOKENS` (a system prompt that
  everyone shares says little), else by octaves of the part that was new.
- `new`: tokens of the path that were new, in octaves. A conversation goes on by little, a document is new as a whole.
- `length`: tokens of the path, in octaves.
- `answer`: tokens of the output, in octaves.
- `turn`: how many states went before it, each started from the last.

and apart from these the *rhythm*: the octave of the time between the conversation's requests so far, halving the
weight of the past with each. It chooses the baseline rather than multiply it, for it says not whether but when.

Its *role* is what it is to those who come: the end of a path, or a stop on the way. It decides how a state is used, so
each role has its own rates. A path's end waits for its conversation to go on, at a
rate that hangs on the conversation's rhythm, so every rhythm is a stratum of its own. A stop on the way to one child
was an end once (its conversation has gone on, and it is used again only if someone goes back) or was left there on
purpose (a guard, or a branch point whose other side is gone). A branch point serves whoever comes through. What goes on
only to a state on probation has not gone on.

Where all that went on from a state is gone, it is a *remnant*: what is left of a path. It waits as the end did, and is
ranked as one; but it has no life of its own. A path that is given up state by state would leave one life after the
other, most of them unused, and among the lives of ends they would make it seem that nobody comes back.
"""

import math
from enum import IntEnum
from typing import Final, NamedTuple

from marconi.policy.forecast.hazard import Shape
from marconi.policy.request import Request

SHORT_TOKENS: Final = 512
NUM_RHYTHMS: Final = 7
"""None yet, and octave pairs of seconds: up to 4, 16, 64, 256, 1024, and beyond."""
NUM_LEVELS: Final = (8, 10, 12, 8, 5)
"""Of `known`, `new`, `length`, `answer` and `turn`."""


class Traits(NamedTuple):
    """What a state was like when it was left."""

    left_s: float
    log2_gap: float | None
    """log2 of the usual seconds between the requests of its conversation; None for a first one."""
    turn: int
    levels: tuple[int, ...]

    @property
    def rhythm(self) -> int:
        """The level of the rhythm."""
        return 0 if self.log2_gap is None else 1 + min(NUM_RHYTHMS - 2, int(self.log2_gap / 2))


def traits_of(request: Request, depth: int, num_seen_tokens: int, before: Traits | None, now_s: float) -> Traits:
    """Describe a state at `depth` tokens that `request` leaves, whose path was seen for `num_seen_tokens` tokens.

    `before` are the traits of the state that the request went on from, or would have, were it still held.
    """
    seen = min(num_seen_tokens, depth)
    if before is None:
        log2_gap, turn = None, 0
    else:
        gap = math.log2(max(now_s - before.left_s, 1.0))
        log2_gap = gap if before.log2_gap is None else 0.5 * (gap + before.log2_gap)
        turn = before.turn + 1
    known = 0 if seen <= SHORT_TOKENS else 1 + min(6, int(-math.log2(max(1.0 - seen / depth, 1 / 64))))
    levels = (
        known,
        # An octave is a bit length: 0 below 1, then 1 for each factor of two.
        min(((depth - seen) // 64).bit_length(), NUM_LEVELS[1] - 1),
        min((depth // 256).bit_length(), NUM_LEVELS[2] - 1),
        min((request.num_output_tokens // 16).bit_length(), NUM_LEVELS[3] - 1),
        min(turn, NUM_LEVELS[4] - 1),
    )
    return Traits(now_s, log2_gap, turn, levels)


class Role(IntEnum):
    """The groups of strata."""

    END = 0
    PASSED = 1
    """An end that its conversation has gone on from."""
    WAYPOINT = 2
    """Left on the way, with one child."""
    BRANCH = 3
    """Several children."""


SHAPE: Final = Shape(
    group_of=(Role.END,) * NUM_RHYTHMS + (Role.PASSED, Role.WAYPOINT, Role.BRANCH),
    group_priors=(0.3, 0.03, 0.03, 0.6),
    num_levels=NUM_LEVELS,
)
"""Ends by rhythm first, then a stratum for each other role."""

NUM_STRATA: Final = len(SHAPE.group_of)


def stratum_of(role: Role, rhythm: int) -> int:
    """The stratum of a state."""
    return rhythm if role is Role.END else NUM_RHYTHMS - 1 + role
