"""What a state is to those who come: the end of a path, or a stop on the way.

The role decides how a state is used, so each has its own rates. A path's end waits for its conversation to go on, at a
rate that hangs on the conversation's rhythm, so every rhythm is a stratum of its own. A stop on the way to one child
was an end once (its conversation has gone on, and it is used again only if someone goes back) or was left there on
purpose (a guard, or a branch point whose other side is gone). A branch point serves whoever comes through. What goes on
only to a state on probation has not gone on.

Where all that went on from a state is gone, it is a *remnant*: what is left of a path. It waits as the end did, and is
ranked as one; but it has no life of its own. A path that is given up state by state would leave one life after the
other, most of them unused, and among the lives of ends they would make it seem that nobody comes back.
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
