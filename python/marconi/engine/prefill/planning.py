"""Where the scheduler is about to run a prefill: our cache says which states to keep, and SGLang tracks none itself.

Both hooks do nothing unless the batch's cache plans prefills (`engine/cache.py`).
"""

from collections.abc import Callable
from typing import Any, Final

PLAN: Final = "marconi_plan"
"""On a `ScheduleBatch`: a sequence of `Checkpoint`, or nothing. On a linear backend: a plan, for its next batch."""


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
