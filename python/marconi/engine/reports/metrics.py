"""The cache's status as Prometheus metrics, with `--enable-metrics`; all names begin with `marconi_`.

The scheduler sets them from its `Status`, in the registry that SGLang's processes share: whenever a prefill begins or a
request has finished, and while it is idle, but at most once a second. Counts are kept by the parts that count; a
counter gets what they have grown by, since processes that share a registry share files of values, and no collector of
their own. `METRICS` has a row for each: how it is read off a status.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from sglang.srt.observability.metrics_collector import radix_cache_metric_labels
from sglang.srt.runtime_context import get_observability, get_parallel

from marconi.engine.ranks import dp_rank
from marconi.engine.reports.status import Status, Use
from marconi.policy.base import Need
from marconi.policy.residency import gap_s, place_of, stay_of
from marconi.tree import Kept, Node

_INTERVAL_S = 1.0
_WAITS_S = (0.0, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
_STAYS_S = (1.0, 4.0, 15.0, 60.0, 240.0, 900.0, 3_600.0, 14_400.0)
SAMPLED: Final = 4
"""The histograms of stays count one state in `SAMPLED`, chosen by serial number."""


def labels() -> dict[str, Any]:
    """Those of SGLang's own cache metrics, the operator's too; `dp_rank` distinguishes replicas."""
    parallel = get_parallel()
    of_cache = radix_cache_metric_labels("marconi", parallel, parallel.attn_dp_enabled)
    # SGLang's is 0 in every replica.
    return {**of_cache, "dp_rank": dp_rank(), **(get_observability().extra_metric_labels or {})}


Numbers: TypeAlias = float | Mapping[str, float] | None
"""A metric's value, or a value for each value of its label; None where it means nothing."""


class Metric(NamedTuple):
    """One metric, and how it is read."""

    name: str
    """Without `marconi_`."""
    what: str
    read: Callable[[Status], Numbers]
    label: str | None = None
    """The label that distinguishes its values; None for a single one."""


def _at(path: str) -> Callable[[Status], Numbers]:
    """Reads the field at `path` of a status, through the parts that a server may lack; a pool by its uses."""

    def read(status: Status) -> Numbers:
        found: Any = status
        for name in path.split("."):
            found = None if found is None else getattr(found, name)
        return {use: getattr(found, use) for use in ("free", "cached", "in_use")} if isinstance(found, Use) else found

    return read


GAUGES: Final = (
    Metric("kv_tokens", "KV tokens by use", _at("kv_tokens"), "use"),
    Metric("state_slots", "State slots by use", _at("state_slots"), "use"),
    Metric("joint_bytes", "Bytes of the one pool for KV and states by use", _at("joint_bytes"), "use"),
    Metric("host_kv_tokens", "KV tokens of the host tier by use", _at("host.kv_tokens"), "use"),
    Metric("host_state_slots", "State slots of the host tier by use", _at("host.state_slots"), "use"),
    Metric("store_ready", "1 while the store behind the host is read and written, else 0", _at("store.is_ready")),
    Metric("nodes", "Nodes of the tree that hold KV", _at("num_nodes")),
    Metric("ghosts", "Prefixes that are remembered without KV", _at("num_ghosts")),
    Metric("alpha", "Weight of FLOPs saved per byte against recency", _at("alpha")),
    Metric(
        "planning_alive",
        "0 once states inside prefills are no longer planned, else 1",
        lambda status: float(status.why_not_planned is None),
    ),
    Metric("events_waiting", "Changes that are noted and not published yet", _at("events.num_waiting")),
    Metric("events_alive", "1 while events are published, 0 once they are no longer", _at("events.is_publishing")),
)
COUNTERS: Final = (
    Metric("requests", "Requests by what they started from", _at("hits"), "hit"),
    Metric("prompt_tokens", "Prompt tokens that were asked for", _at("num_prompt_tokens")),
    Metric("hit_tokens", "Prompt tokens that were not computed", _at("num_hit_tokens")),
    Metric(
        "missed_tokens", "Prompt tokens that were computed, by the cause of the miss", _at("num_missed_tokens"), "cause"
    ),
    Metric("missed_seconds", "Seconds of prefill of missed tokens, by cause", _at("missed_s"), "cause"),
    Metric(
        "evictions",
        "Victims by what was short",
        lambda status: {reason: status.evictions[reason] for reason in ("kv", "states", "bytes")},
        "reason",
    ),
    Metric(
        "evictions_unused",
        "Of the victims those that no request had started from",
        lambda status: status.evictions["unused"],
    ),
    Metric("states_written", "States that joined the tree", _at("num_states_written")),
    Metric("states_not_written", "States that were planned and dropped", _at("num_states_not_written")),
    Metric(
        "ends_not_kept", "Requests that ended in accepted drafts and left an earlier state", _at("num_ends_not_kept")
    ),
    Metric("requests_uncached", "Requests that were served and could leave nothing", _at("num_requests_uncached")),
    Metric("health_checks", "Health checks that were answered by a generated token", _at("num_health_checks")),
    Metric("hook_faults", "Errors in hooks of this project that were caught", _at("num_hook_faults")),
    Metric("events_published", "Events of KV and states that were sent", _at("events.num_events")),
    Metric("host_copied", "States that were copied to the host", _at("host.num_copied")),
    Metric("host_dropped", "Copies on the host that gave way to others", _at("host.num_dropped")),
    Metric("host_loads", "Requests that started from a copy on the host", _at("host.num_loads")),
    Metric("host_loaded_tokens", "Tokens whose KV was loaded from the host", _at("host.num_loaded_tokens")),
    Metric("store_writes", "States that were written to the store, with their KV", _at("store.num_written")),
    Metric("store_written_bytes", "Bytes that were written to the store", _at("store.num_written_bytes")),
    Metric("store_reads", "States that were read from the store, with their KV", _at("store.num_read")),
    Metric("store_read_bytes", "Bytes that were read from the store", _at("store.num_read_bytes")),
    Metric("store_lost", "States that could not be read or written whole", _at("store.num_lost")),
    Metric("store_damaged", "Objects that were not whole, and were removed", _at("store.num_damaged")),
    Metric("store_errors", "Errors of the store", _at("store.num_failed")),
)


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

        def arguments(metric: Metric) -> tuple[str, str, list[str]]:
            more = [] if metric.label is None else [metric.label]
            return f"marconi_{metric.name}", metric.what, [*labels, *more]

        self._labels = labels
        self._updated_s = -_INTERVAL_S
        self._gauges = {each: Gauge(*arguments(each), multiprocess_mode="mostrecent") for each in GAUGES}
        self._counters = {each: _Growing(Counter(*arguments(each))) for each in COUNTERS}
        waits = "Seconds that an eviction waited for copies to the host"
        self._waits = Histogram("marconi_eviction_wait_seconds", waits, [*labels], buckets=_WAITS_S)

        def stays(name: str, what: str, *more: str) -> Any:
            name = f"marconi_state_{name}_seconds"
            return Histogram(name, f"{what}, one state in {SAMPLED}", [*labels, *more], buckets=_STAYS_S)

        self._lifetimes = stays("lifetime", "Seconds from when a state was left to its eviction", "place", "used")
        self._idle = stays("idle", "Seconds from the last use of a state to its eviction", "place")
        self._gaps = stays("gap", "Seconds between two uses of a state", "place")

    def is_due(self, now_s: float) -> bool:
        """True if a second has passed since the last update."""
        return now_s - self._updated_s >= _INTERVAL_S

    def evicted(self, waited_s: float) -> None:
        """An eviction above a host tier has ended."""
        self._waits.labels(**self._labels).observe(waited_s)

    def resuming(self, node: Node, now_s: float) -> None:
        """A request resumes from a state."""
        if node.serial % SAMPLED == 0:
            self._gaps.labels(**self._labels, place=place_of(node).value).observe(gap_s(node, now_s))

    def evicting(self, node: Node, need: Need, now_s: float, kept: Kept | None) -> None:
        """A state is about to be evicted."""
        if node.serial % SAMPLED == 0:
            stay = stay_of(node, now_s)
            labels = {**self._labels, "place": stay.place.value}
            self._lifetimes.labels(**labels, used="no" if stay.is_unused else "yes").observe(stay.lifetime_s)
            self._idle.labels(**labels).observe(stay.idle_s)

    def update(self, status: Status, now_s: float) -> None:
        """Set every metric."""
        self._updated_s = now_s
        for metric, gauge in self._gauges.items():
            for labels, number in self._numbers(metric, status):
                gauge.labels(**labels).set(number)
        for metric, counter in self._counters.items():
            for labels, number in self._numbers(metric, status):
                counter.follow(labels, number)

    def _numbers(self, metric: Metric, status: Status) -> list[tuple[dict[str, Any], float]]:
        """The values of a metric, each with its labels; none where it means nothing."""
        numbers = metric.read(status)
        if numbers is None:
            return []
        if isinstance(numbers, Mapping):
            return [({**self._labels, str(metric.label): value}, number) for value, number in numbers.items()]
        return [(self._labels, numbers)]
