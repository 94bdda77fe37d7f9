"""Where a prefill leaves states in a server: known before it starts, so without the answer.

Of an admission rule's depths, those within the prompt. The one at the prompt's end is useless as it stands: the last
token is always computed anew for its logits, so a state there serves no repeat. One token (or page) earlier serves a
repeat and whatever goes on from the prompt, and is written *on probation* (`eviction/tiers.py`).

A long stretch leaves *steps* as well, one every `STEP_TOKENS` back from its end. Few requests start from a step; it is
there for when KV gets short. KV is of use only before a state, so a path that ends in its only state is given up all at
once, however few tokens are wanted; with steps it goes back one step at a time, and what is left of it still serves.
Stock SGLang has this from its state every prefill chunk; what steps win, and at which distance, is in
`docs/hit-rate.md`. A step is a state like any other: the eviction rule says what it is worth.

Invariant: depths rise, lie beyond the hit and before the prompt's last token, on the grid.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

from marconi.policy.admission.base import Admission
from marconi.policy.lease import Lease

STEP_TOKENS: Final = 24_576
"""Three of SGLang's default prefill chunks: nearly all that a state a chunk wins, with a third of the states."""


class PrefillPlan(NamedTuple):
    """Depths in tokens, rising, beyond the hit and before the prompt's last token."""

    depths: Sequence[int]
    on_probation: int | None
    """Which of them is there on probation, if any: the last."""


def prefill_plan(admission: Admission, lease: Lease, grid_tokens: int, step_tokens: int = STEP_TOKENS) -> PrefillPlan:
    """The plan of a request that has just been looked up; positions are multiples of `grid_tokens`."""
    request, match = lease
    last = (request.num_prompt_tokens - 1) // grid_tokens * grid_tokens
    start = match.checkpoint.depth
    if last <= start:
        return PrefillPlan([], None)
    admitted = [depth for depth in admission.depths(request, match) if depth <= last]
    on_probation = None if last in admitted else last
    if not admitted and last - start <= step_tokens:
        return PrefillPlan([last], on_probation)
    steps = {depth // grid_tokens * grid_tokens for depth in range(last, start, -step_tokens)}
    depths = sorted({depth for depth in steps if depth > start}.union(admitted))
    return PrefillPlan(depths, on_probation)
