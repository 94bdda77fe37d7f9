"""One request between its first prefill and its end, as the cache follows it.

It hangs on SGLang's request (`attach`), so it goes when that goes; a retracted request begins anew. Slots are taken
when a prefill that passes their positions is about to run, and belong to the run until its states join the tree.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from marconi.engine.prefill.checkpoint import Checkpoint
from marconi.policy.admission.plan import PrefillPlan
from marconi.policy.forecast.turns import NO_CLOSING, closing_of
from marconi.policy.request import Lease
from marconi.tree import Node

HIT_KINDS = ("input_prefix", "conversation", "none")
"""What a request may start from."""
_MATCH = "marconi_match"
_RUN = "marconi_run"
_UNCACHED = "marconi_uncached"


@dataclass(slots=True)
class Run:
    """What was found, what is planned, and the slots of what the current prefill leaves."""

    lease: Lease
    plan: PrefillPlan
    started_s: float
    is_timed: bool = False
    """Whether its prefill has come to an end and its time was taken."""
    checkpoints: dict[int, Checkpoint] = field(default_factory=dict)
    """States that a prefill leaves and the tree has not taken yet, by depth in tokens."""


class EndState(NamedTuple):
    """The last state of a request."""

    depth: int
    slot: torch.Tensor
    tracking_index: int | None
    """Which of the request's tracking slots it is; None for the working slot."""


def end_state(req: Any, up_to: int, page_tokens: int, states: Any) -> EndState | None:
    """Where the last state of a finished request stands, within `up_to` tokens; None if it stands beyond or nowhere.

    `states` is SGLang's component of recurrent states.
    """
    kv = req.kv
    if page_tokens == 1:
        slot = kv.mamba_pool_idx.view(1).clone()
        return EndState(up_to, slot, None) if kv.kv_committed_len == up_to else None
    tracked = states._select_finished_checkpoint(req, up_to)
    if tracked is None or not tracked[0]:
        return None
    depth, index = tracked
    return EndState(depth, kv.mamba_ping_pong_track_buffer[index].view(1).clone(), index)


def closing_of_answer(req: Any) -> int:
    """How the answer of a finished request closed, and whether it thought before; `NO_CLOSING` of one token or none."""
    if len(req.output_ids) < 2:
        return NO_CLOSING
    return closing_of(req.output_ids[-2], thought=req.reasoning_tokens > 0)


def kind_of_hit(lease: Lease, ends: set[Node]) -> str:
    """What a request starts from; `ends` are the nodes at which one ended."""
    if lease.source is None:
        return "none"
    return "conversation" if lease.source in ends else "input_prefix"


def note_match(req: Any, match: Any) -> None:
    """Remember what the tree last knew of a waiting request."""
    setattr(req, _MATCH, match)


def last_match(req: Any) -> Any:
    """What the tree last knew of a request; None if it was not asked."""
    return getattr(req, _MATCH, None)


def attach(req: Any, run: Run) -> Run:
    """The request has begun."""
    setattr(req, _RUN, run)
    return run


def run_of(req: Any) -> Run | None:
    """The run of a request; None before its first prefill and after its end."""
    return getattr(req, _RUN, None)


def is_first_prefill(req: Any) -> bool:
    """Whether a request that could not begin is asked about for the first time."""
    seen = getattr(req, _UNCACHED, False)
    setattr(req, _UNCACHED, True)
    return not seen


def detach(req: Any) -> Run | None:
    """The request has ended, or was retracted."""
    run: Run | None = getattr(req, _RUN, None)
    if run is not None:
        setattr(req, _RUN, None)
    return run
