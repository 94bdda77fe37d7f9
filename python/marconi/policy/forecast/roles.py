"""What a state is to those who come: the end of a path, or a stop on the way.

The role decides how a state is used, so each has its own rates. A path's end waits for its conversation to go on, at a
rate that hangs on the conversation's rhythm, so every rhythm is a stratum of its own. A stop on the way to one child
was an end once (its conversation has gone on, and it is used again only if someone goes back) or a guard, left there on
purpose; a guard whose end is gone is what the conversation comes back to, and an end itself. A branch point serves
whoever comes through, and stays one when what branched off there is evicted.
"""

from enum import IntEnum
from typing import Final

from marconi.policy.forecast.hazard import Shape
from marconi.policy.forecast.traits import NUM_LEVELS, NUM_RHYTHMS


class Role(IntEnum):
    """The groups of strata."""

    END = 0
    PASSED = 1
    """An end that its conversation has gone on from."""
    GUARD = 2
    """Left before an end, which is still there."""
    BRANCH = 3
    """Several go on from it, or did when it was left."""


SHAPE: Final = Shape(
    group_of=(Role.END,) * NUM_RHYTHMS + (Role.PASSED, Role.GUARD, Role.BRANCH),
    group_priors=(0.3, 0.03, 0.03, 0.6),
    num_levels=NUM_LEVELS,
)
"""Ends by rhythm first, then a stratum for each other role."""

NUM_STRATA: Final = len(SHAPE.group_of)


def stratum_of(role: Role, rhythm: int) -> int:
    """The stratum of a state."""
    return rhythm if role is Role.END else NUM_RHYTHMS - 1 + role
