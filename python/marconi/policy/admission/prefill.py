"""Where a prefill leaves states in a server: known before it starts, so without the answer.

Of an admission rule's depths, those within the prompt. The one at the prompt's end is useless as it stands: the last
token is always computed anew for its logits, so a state there serves no repeat. One token (or page) earlier serves a
repeat and whatever goes on from the prompt, and is written *on probation* (`eviction/tiers.py`).

A long stretch leaves *steps* as well, one every `STEP_TOKENS` back from its end. Few requests start from a step; it is
there for when KV gets short. KV is of use only before a state, so a path that ends in its only state is given up all at
once, however few tokens are wanted; with steps it goes back one step at a time, and what is left of it still serves.
Stock SGLang has this from its state every prefill chunk; what steps win, and at which distance, is in
`docs/hit-rate.md`. A step is a state like any other: the eviction rule says what it is worth.

What the program asks for (`hints.py`) is planned as well, never on probation, at the prompt's very end if it says so:
for branches that go on from there the last token need not be computed again.

Where slots run out, what is worth least is dropped. A state that is not there yet has no rank, so the plan goes by why
each is wanted, those that more requests share, the shallower, first:

    asked for, or admitted by the rule   ->   steps   ->   on probation

Invariant: depths rise, lie beyond the hit and, but for those asked for, before the prompt's last token, on the grid.
"""

from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

from marconi.policy.admission.base import Admission
from marconi.policy.lease import Lease

STEP_TOKENS: Final = 24_576
"""Three of SGLang's default prefill chunks: nearly all that a state a chunk wins, with a third of the states."""


class PrefillPlan(NamedTuple):
    """Depths in tokens, rising, beyond the hit and within the prompt."""

    depths: Sequence[int]
    on_probation: int | None
    """Which of them is there on probation, if any."""
    wanted: Collection[int] = frozenset()
    """Which of them were asked for or admitted by the rule; others but the one on probation are steps."""

    def precedence(self, depth: int) -> tuple[int, int]:
        """Of two planned depths the one that comes first gets a slot first."""
        if depth in self.wanted:
            return 0, depth
        return (2 if depth == self.on_probation else 1), depth

    def within(self, start: int, end: int) -> list[int]:
        """The depths beyond `start` and up to `end`, in the order in which they get slots."""
        return sorted((depth for depth in self.depths if start < depth <= end), key=self.precedence)


def prefill_plan(
    admission: Admission,
    lease: Lease,
    grid_tokens: int,
    step_tokens: int = STEP_TOKENS,
    asked: Sequence[int] = (),
) -> PrefillPlan:
    """The plan of a request that has just been looked up; positions are multiples of `grid_tokens`.

    `asked` are positions within the prompt, in tokens, that the program named.
    """
    request, match = lease
    last = (request.num_prompt_tokens - 1) // grid_tokens * grid_tokens
    start = match.checkpoint.depth
    wanted = {depth for position in asked if (depth := position // grid_tokens * grid_tokens) > start}
    if last <= start:
        return PrefillPlan(sorted(wanted), None, frozenset(wanted))
    wanted.update(depth for depth in admission.depths(request, match) if depth <= last)
    on_probation = None if last in wanted else last
    if not wanted and last - start <= step_tokens:
        return PrefillPlan([last], on_probation)
    steps = {depth // grid_tokens * grid_tokens for depth in range(last, start, -step_tokens)}
    depths = sorted({depth for depth in steps if depth > start} | wanted)
    return PrefillPlan(depths, on_probation, frozenset(wanted))
