"""Where the scheduler is about to run a prefill: our cache says which states to keep, and SGLang tracks none itself.

    order       what waits is noted                                            (`policy/waiting.py`)
    admission   a request for which a state is being computed waits for it; of one that is taken, what others share
    prefill     the plan, and slots for it

The hooks do nothing unless the batch's cache plans prefills (`engine/cache.py`).
"""

from collections.abc import Callable
from typing import Any, Final

PLAN: Final = "marconi_plan"
"""On a `ScheduleBatch`: a sequence of `Checkpoint`, or nothing. On a linear backend: a plan, for its next batch."""

MAX_PASSED: Final = 64
"""Requests passed over in one round: each was matched first, which takes the scheduler some tens of microseconds."""
_NUM_PASSED: Final = "marconi_num_passed"
"""On a `PrefillAdder`."""


def on_calc_priority(_result: None, policy: Any, waiting_queue: "list[Any]", *_args: Any, **_kwargs: Any) -> None:
    """After `SchedulePolicy.calc_priority`: what waits is known to the cache."""
    if getattr(policy.tree_cache, "cuts_prefills", False):
        policy.tree_cache.waiting.note(waiting_queue)


def around_add_one_req(add: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `PrefillAdder.add_one_req`: a request that waits for a state is passed over, and the next one is tried."""
    cache = adder.tree_cache
    if not getattr(cache, "cuts_prefills", False):
        return add(adder, req, *args, **kwargs)
    # Where nothing runs, nothing is computed that one could wait for. (A prefill server's running batch is empty.)
    if (adder.can_run_list or cache.num_running) and cache.waiting.waits(req):
        from sglang.srt.managers.schedule_policy import AddReqResult

        _give_slot_back(cache, req)
        num_passed = getattr(adder, _NUM_PASSED, 0) + 1
        setattr(adder, _NUM_PASSED, num_passed)
        return AddReqResult.CONTINUE if num_passed < MAX_PASSED else AddReqResult.OTHER
    num_taken = len(adder.can_run_list)
    result = add(adder, req, *args, **kwargs)
    if len(adder.can_run_list) > num_taken:
        cache.note_taken(req)
    return result


def _give_slot_back(cache: Any, req: Any) -> None:
    """Free the slot that a match took for a request that is not run now, as SGLang does for one that does not fit."""
    kv = req.kv
    kv.mamba_cow_src_index = None
    kv.mamba_needs_clear = False
    if kv.holds_mamba and not getattr(req, "session", None):
        cache.req_to_token_pool.mamba_allocator.free(kv.mamba_pool_idx.unsqueeze(-1))
        kv.mamba_pool_idx = None


def around_prepare_for_extend(prepare: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around `ScheduleBatch.prepare_for_extend`: plan before SGLang takes memory for the prefill."""
    plan = getattr(batch.tree_cache, "plan_prefill", None)
    if plan is not None:
        setattr(batch, PLAN, plan(batch.reqs))
    return prepare(batch, *args, **kwargs)


def around_track(prepare: Callable[..., Any], batch: Any, req: Any) -> Any:
    """Around `ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend`: track nothing on SGLang's own grid."""
    if not getattr(batch.tree_cache, "cuts_prefills", False):
        return prepare(batch, req)
    from sglang.srt.managers.schedule_batch import _MambaRadixCacheV2TrackEntry

    return _MambaRadixCacheV2TrackEntry(track_mask=False, track_position=req.kv.mamba_next_track_idx, track_seqlen=-1)
