"""When the scheduler has nothing to do: what a finished request would have been told is told then, too."""

from typing import Any


def after_idle_metrics(_result: Any, reporter: Any, *_: Any) -> None:
    """After `SchedulerMetricsReporter._maybe_log_idle_metrics`, which an idle scheduler calls again and again."""
    on_idle = getattr(reporter.scheduler.tree_cache, "on_idle", None)
    if on_idle is not None:
        on_idle()
