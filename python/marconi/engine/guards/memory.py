"""Memory that is released and resumed while a server runs, and a cache that is flushed: only where it can be.

    /release_memory_occupation    AssertionError, where the scheduler is not idle
    /resume_memory_occupation     KeyError, where what is named has not been released

Both end SGLang's scheduler, with all that it serves. Only the scheduler knows better, and its answers have no field for
a reason: here it is their `rid`, which nobody else uses, and the process that answers HTTP refuses with it.

A scheduler is not idle while copies to the host are under way, and a paused one never looks whether they have arrived:
without waiting for them no flush succeeds between `/pause_generation` and `/continue_generation`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput

BUSY: Final = "memory is released by an idle server, or by one whose requests wait: this one runs requests"


def before_flush_cache(scheduler: Any, *_: Any, **__: Any) -> None:
    """Before `Scheduler.flush_cache`: what is on its way to the host arrives."""
    _settle(scheduler.tree_cache)


def _settle(cache: Any) -> None:
    settle = getattr(cache, "settle", None)
    if settle is not None:
        settle()


def before_weights_count(updater: Any, *_: Any, **__: Any) -> None:
    """Before `flush_cache_after_weight_update`: until the cache is flushed its states are of no one set of weights."""
    forget = getattr(updater.scheduler.tree_cache, "weights_updated", None)
    if forget is not None:
        forget()


def around_release(release: Callable[..., Any], updater: Any, recv_req: "ReleaseMemoryOccupationReqInput") -> Any:
    """Around the scheduler's part of `/release_memory_occupation`: refuse where requests run."""
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqOutput

    scheduler = updater.scheduler
    _settle(scheduler.tree_cache)
    if not updater.is_fully_idle(ignore_waiting=scheduler._engine_paused):
        return ReleaseMemoryOccupationReqOutput(rid=BUSY)
    return release(updater, recv_req)


def around_resume(resume: Callable[..., Any], updater: Any, recv_req: "ResumeMemoryOccupationReqInput") -> Any:
    """Around the scheduler's part of `/resume_memory_occupation`: refuse what has not been released."""
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
    from sglang.srt.managers.io_struct import ResumeMemoryOccupationReqOutput

    tags = list(dict.fromkeys(recv_req.tags or GPU_MEMORY_ALL_TYPES))
    held = [tag for tag in tags if tag not in updater.offload_tags]
    if held:
        return ResumeMemoryOccupationReqOutput(rid=f"memory that is resumed must be released, got {', '.join(held)}")
    recv_req.tags = tags
    return resume(updater, recv_req)


async def release_memory_occupation(manager: Any, obj: "ReleaseMemoryOccupationReqInput", request: Any = None) -> None:
    """In place of the manager's own: raise ValueError, which becomes HTTP 400, with the scheduler's reason."""
    await _ask(manager, "release_memory_occupation", obj)


async def resume_memory_occupation(manager: Any, obj: "ResumeMemoryOccupationReqInput", request: Any = None) -> None:
    """In place of the manager's own, as above."""
    await _ask(manager, "resume_memory_occupation", obj)


async def _ask(manager: Any, what: str, obj: Any) -> None:
    manager.auto_create_handle_loop()
    for answer in await getattr(manager, f"{what}_communicator")(obj):
        if answer.rid is not None:
            raise ValueError(answer.rid)
