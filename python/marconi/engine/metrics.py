"""The cache's status as Prometheus metrics, with `--enable-metrics`; all names begin with `marconi_`.

The scheduler sets them from its `Status`, in the registry that SGLang's processes share: whenever a prefill begins or a
request has finished, and while it is idle, but at most once a second. Counts are kept by the parts that count; a
counter gets what they have grown by, since processes that share a registry share files of values, and no collector of
their own.
"""

from typing import Any

from sglang.srt.observability.metrics_collector import radix_cache_metric_labels
from sglang.srt.runtime_context import get_observability, get_parallel

from marconi.engine.ranks import dp_rank
from marconi.engine.status import HostUse, Status, Use

_INTERVAL_S = 1.0
_WAITS_S = (0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)


def labels() -> dict[str, Any]:
    """Those of SGLang's own cache metrics, the operator's too; `dp_rank` distinguishes replicas."""
    parallel = get_parallel()
    of_cache = radix_cache_metric_labels("marconi", parallel, parallel.attn_dp_enabled)
    # SGLang's is 0 in every replica.
    return {**of_cache, "dp_rank": dp_rank(), **(get_observability().extra_metric_labels or {})}


class _Growing:
    """A counter that follows a count which is kept elsewhere, from the start of this process."""

    def __init__(self, counter: Any) -> None:
        self._counter = counter
        self._seen: dict[tuple[Any, ...], float] = {}

    def follow(self, labels: dict[str, Any], count: float) -> None:
        """Set the counter to its current count; a smaller value means the source was reset."""
        key = tuple(labels.values())
        seen = self._seen.get(key, 0.0)
        self._counter.labels(**labels).inc(count - seen if count >= seen else count)
        self._seen[key] = count


class CacheMetrics:
    """Gauges and counters of one scheduler."""

    def __init__(self, labels: dict[str, Any]) -> None:
        """`labels` are on every metric."""
        # Reads PROMETHEUS_MULTIPROC_DIR when it is imported, which SGLang sets while it starts.
        from prometheus_client import Counter, Gauge, Histogram

        def gauge(name: str, what: str, *more: str) -> Gauge:
            return Gauge(f"marconi_{name}", what, [*labels, *more], multiprocess_mode="mostrecent")

        def counter(name: str, what: str, *more: str) -> _Growing:
            return _Growing(Counter(f"marconi_{name}", what, [*labels, *more]))

        self._labels = labels
        self._updated_s = -_INTERVAL_S
        self._kv = gauge("kv_tokens", "KV tokens by use", "use")
        self._slots = gauge("state_slots", "State slots by use", "use")
        self._joint = gauge(
            "joint_bytes", "Bytes of the one pool for KV and states by use; 0 where there are two", "use"
        )
        self._nodes = gauge("nodes", "Nodes of the tree that hold KV")
        self._ghosts = gauge("ghosts", "Prefixes that are remembered without KV")
        self._requests = counter("requests", "Requests by what they started from", "hit")
        self._prompt_tokens = counter("prompt_tokens", "Prompt tokens that were asked for")
        self._hit_tokens = counter("hit_tokens", "Prompt tokens that were not computed")
        self._evictions = counter("evictions", "Victims by what was short", "reason")
        self._evictions_unused = counter("evictions_unused", "Of the victims those that no request had started from")
        self._states_written = counter("states_written", "States that joined the tree")
        self._states_not_written = counter("states_not_written", "States that were planned and dropped")
        self._ends_not_kept = counter(
            "ends_not_kept", "Requests that ended in accepted drafts and left an earlier state"
        )
        self._uncached = counter("requests_uncached", "Requests that were served and could leave nothing")
        self._health_checks = counter("health_checks", "Health checks that were answered by a generated token")
        self._hook_faults = counter("hook_faults", "Errors in hooks of this project that were caught")
        self._planning_alive = gauge("planning_alive", "0 once states inside prefills are no longer planned, else 1")
        self._events = counter("events_published", "Events of KV and states that were sent")
        self._events_waiting = gauge("events_waiting", "Changes that are noted and not told yet")
        self._events_alive = gauge("events_alive", "Whether events are told; 0 where none are, or no more")
        waits = "Seconds that evictions waited for copies to the host, of those that did"
        self._waits = Histogram("marconi_eviction_wait_seconds", waits, [*labels], buckets=_WAITS_S)
        self._host = {
            name: counter(f"host_{name}", what)
            for name, what in (
                ("copied", "States that were copied to the host"),
                ("dropped", "Copies on the host that gave way to others"),
                ("loads", "Requests that started from a copy on the host"),
                ("loaded_tokens", "Tokens whose KV was loaded from the host"),
            )
        }
        self._host_kv = gauge("host_kv_tokens", "KV tokens of the host tier by use; 0 without one", "use")
        self._host_slots = gauge("host_state_slots", "State slots of the host tier by use; 0 without one", "use")
        self._alpha = gauge("alpha", "Weight of FLOPs saved per byte against recency")

    def is_due(self, now_s: float) -> bool:
        """True if a second has passed since the last update."""
        return now_s - self._updated_s >= _INTERVAL_S

    def waited(self, seconds: float) -> None:
        """An eviction has waited."""
        self._waits.labels(**self._labels).observe(seconds)

    def update(self, status: Status, now_s: float) -> None:
        """Set every metric."""
        self._updated_s = now_s
        labels = self._labels
        joint = status.joint_bytes or Use(0, 0, 0)
        host = status.host or HostUse(Use(0, 0, 0), Use(0, 0, 0), 0, 0, 0, 0, 0, 0.0)
        for gauge, use in (
            (self._kv, status.kv_tokens),
            (self._slots, status.state_slots),
            (self._joint, joint),
            (self._host_kv, host.kv_tokens),
            (self._host_slots, host.state_slots),
        ):
            for name, value in _uses(use):
                gauge.labels(**labels, use=name).set(value)
        for kind, count in status.hits.items():
            self._requests.follow({**labels, "hit": kind}, count)
        for reason in ("kv", "states", "bytes"):
            self._evictions.follow({**labels, "reason": reason}, status.evictions[reason])
        events = status.events
        counts: tuple[tuple[_Growing, int], ...] = (
            (self._prompt_tokens, status.num_prompt_tokens),
            (self._hit_tokens, status.num_hit_tokens),
            (self._evictions_unused, status.evictions["unused"]),
            (self._states_written, status.num_states_written),
            (self._states_not_written, status.num_states_not_written),
            (self._ends_not_kept, status.num_ends_not_kept),
            (self._uncached, status.num_requests_uncached),
            (self._health_checks, status.num_health_checks),
            (self._hook_faults, status.num_hook_faults),
            (self._events, events.num_events if events else 0),
        )
        for counter, count in (*counts, *((each, getattr(host, f"num_{name}")) for name, each in self._host.items())):
            counter.follow(labels, count)
        plain: tuple[tuple[Any, float], ...] = (
            (self._nodes, status.num_nodes),
            (self._ghosts, status.num_ghosts),
            (self._alpha, status.alpha or 0.0),
            (self._planning_alive, float(status.why_not_planned is None)),
            (self._events_waiting, events.num_waiting if events else 0),
            (self._events_alive, float(events is not None and events.is_publishing)),
        )
        for gauge, number in plain:
            gauge.labels(**labels).set(number)


def _uses(use: Use) -> tuple[tuple[str, int], ...]:
    return ("free", use.free), ("cached", use.cached), ("in_use", use.in_use)
