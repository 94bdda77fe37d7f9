"""The contract of an admission rule: the depths, in tokens, at which a request leaves a state.

A rule sees the request and what the tree knew of it when it came. Depths rise, lie beyond the state that the request
starts from, and end at a unit of the trace, at no more than the last token that is processed: the last sampled token
never is, so a request of p prompt and o output tokens processes p + max(o, 1) - 1.
"""

from collections.abc import Sequence
from typing import ClassVar, Final, Protocol

from marconi.policy.request import Request
from marconi.tree import Match

LEAST_GAIN_TOKENS: Final = 8
"""Tokens that a branch point or a copy must save, and that a request must reuse to count as a hit: prompts that share
only a template's header leave no branch point.

The largest of 8, 16 and 32 with which no shape of ordinary traffic loses (`benchmark/traffic`).
"""


class Admission(Protocol):
    """Chooses the checkpoints of a request."""

    plans_ahead: ClassVar[bool]
    """Whether a request is planned before its answer is known, by what else a server knows as well (`plan.py`).

    Otherwise its states stand at `depths`, the answer's included, and nowhere else: a baseline.
    """

    @property
    def grid_tokens(self) -> int:
        """Depths are multiples of this many tokens."""
        ...

    def depths(self, request: Request, match: Match) -> Sequence[int]:
        """Depths in tokens, rising, beyond `match.checkpoint`."""
        ...
