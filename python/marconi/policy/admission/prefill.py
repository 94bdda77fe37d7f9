"""Where a prefill leaves states in a server: known before it starts, so without the answer.

Of an admission rule's depths, those within the prompt. The one at the prompt's end is useless as it stands: the last
token is always computed anew for its logits, so a state there serves no repeat. One token (or page) earlier serves a
repeat and whatever goes on from the prompt, and is written *on probation* (`eviction/tiers.py`).
"""

from collections.abc import Sequence
from typing import NamedTuple

from marconi.policy.admission.base import Admission
from marconi.policy.lease import Lease


class PrefillPlan(NamedTuple):
    """Depths in tokens, rising, beyond the hit and before the prompt's last token."""

    depths: Sequence[int]
    on_probation: int | None
    """Which of them is there on probation, if any: the last."""


def prefill_plan(admission: Admission, lease: Lease, grid_tokens: int) -> PrefillPlan:
    """The plan of a request that has just been looked up; positions are multiples of `grid_tokens`."""
    request, match = lease
    last = (request.num_prompt_tokens - 1) // grid_tokens * grid_tokens
    depths = tuple(depth for depth in admission.depths(request, match) if depth <= last)
    above = depths[-1] if depths else match.checkpoint.depth
    return PrefillPlan((*depths, last), last) if last > above else PrefillPlan(depths, None)
