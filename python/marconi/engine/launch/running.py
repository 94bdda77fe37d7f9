"""How many requests SGLang runs at once, by the state slots that it counts for each.

    SGLang    slots // (3 + tracking slots)    3: to work in, to start from, to leave; 2 track where steps overlap
    here      slots // 3                       where a request holds no tracking slot (`scheduler.lends_slots`)

SGLang counts as it sizes its pools, before a cache exists (`sizing.py`). If a server with more requests at once than
SGLang would run stops planning, there are too few slots to track: `may_track` is False, and the cache keeps the ends of
answers alone (`cache/radix_cache.py`).

Source: `srt/mem_cache/kv_cache_configurator.py:resolve_max_num_reqs`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from marconi.policy.int8 import RUNNING_SLOTS


class Tracking(NamedTuple):
    """The tracking slots of a server whose cache plans states."""

    num_slots: int
    """Those of a request, as SGLang counts them."""
    are_lent: bool
    """True if the cache has them in the request's place."""


def tracking_of(view: Any, page_tokens: int) -> Tracking:
    """The tracking slots by SGLang's resolved arguments, and `--page-size`; its cache plans states."""
    from sglang.srt.arg_groups.overrides import mamba_extra_buffer_lazy_of, mamba_extra_buffer_of
    from sglang.srt.mem_cache.allocation_sizing import get_mamba_tracking_slots

    from marconi.engine.cache.scheduler import lends_slots
    from marconi.engine.cache.speculation import EndStateSource

    is_lazy = mamba_extra_buffer_lazy_of(view)
    num_slots = get_mamba_tracking_slots(
        extra_buffer=mamba_extra_buffer_of(view), overlap=not view.disable_overlap_schedule, lazy=is_lazy
    )
    return Tracking(num_slots, lends_slots(EndStateSource.of(view, page_tokens * view.dcp_size, num_slots), is_lazy))


def may_track(num_requests: int, num_slots: int, num_tracking: int) -> bool:
    """True if `num_requests` at once are no more than SGLang itself would run where each has `num_tracking` slots."""
    return num_requests * (RUNNING_SLOTS + num_tracking) <= num_slots


def excess_note(num_requests: int, num_slots: int, num_tracking: int) -> str | None:
    """How many requests run at once, in a line; None where SGLang would run as many."""
    if may_track(num_requests, num_slots, num_tracking):
        return None
    counted = RUNNING_SLOTS + num_tracking
    return (
        f"up to {num_requests} requests run at once, {num_slots // counted} by SGLang's own count: a request has no "
        f"tracking slots here, and counts as {RUNNING_SLOTS} of {num_slots} state slots, not {counted}"
    )


def against_rows(num_requests: int, num_slots: int, num_tracking: int) -> Iterator[str]:
    """A line where SGLang tracks the states of more requests than it would run."""
    if not may_track(num_requests, num_slots, num_tracking):
        yield (
            f"--max-running-requests must be at most {num_slots // (RUNNING_SLOTS + num_tracking)} where SGLang tracks "
            f"states, in {num_slots} slots, got {num_requests}"
        )
