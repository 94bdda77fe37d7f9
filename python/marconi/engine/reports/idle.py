"""The hook of an idle scheduler: it publishes the same metrics and load as the end of a request."""

from typing import Any


def after_idle_metrics(_result: Any, reporter: Any, *_: Any) -> None:
    """After `SchedulerMetricsReporter._maybe_log_idle_metrics`, which an idle scheduler calls again and again."""
    on_idle = getattr(reporter.scheduler.tree_cache, "on_idle", None)
    if on_idle is not None:
        on_idle()
