"""What a router counts, for Prometheus; names begin with `marconi_router_`.

What other parts count themselves (the index, its consistency, the sockets) is read when it is asked for.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics:
    """Of one router."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter(
            "marconi_router_requests", "Requests that were answered.", ("route", "status"), registry=registry
        )
        self.decisions = Counter(
            "marconi_router_decisions", "Where requests were sent, and why.", ("worker", "reason"), registry=registry
        )
        self.failures = Counter(
            "marconi_router_failed_attempts", "Attempts that brought no answer.", ("worker",), registry=registry
        )
        self.cut_off = Counter(
            "marconi_router_streams_cut_off", "Streams that ended before their worker did.", registry=registry
        )
        self.clients_gone = Counter(
            "marconi_router_clients_gone", "Requests whose client left before the end.", registry=registry
        )
        self.prompt_tokens = Counter("marconi_router_prompt_tokens", "Of prompts.", registry=registry)
        self.hit_tokens = Counter(
            "marconi_router_hit_tokens", "Of prompts that the chosen worker was known to have.", registry=registry
        )
        self.to_dispatch_s = Histogram(
            "marconi_router_to_dispatch_seconds",
            "From a request's last byte to its dispatch: reading, tokenizing, hashing, deciding.",
            buckets=_SECONDS,
            registry=registry,
        )
        self.ttft_s = Histogram(
            "marconi_router_ttft_seconds", "To the first byte of an answer.", buckets=_SECONDS, registry=registry
        )

    def watch(self, read: Callable[[], Iterator["Sample"]]) -> None:
        """Also tell what `read` gives, each time that metrics are asked for."""
        self.registry.register(_Read(read))

    def text(self) -> bytes:
        """All of them, in Prometheus' text format."""
        return generate_latest(self.registry)


@dataclass(frozen=True, slots=True)
class Sample:
    """A value that another part keeps."""

    name: str
    """Without `marconi_router_`."""
    help: str
    value: float
    labels: dict[str, str] = field(default_factory=dict)
    is_counter: bool = False


class _Read(Collector):
    def __init__(self, read: Callable[[], Iterator[Sample]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        families: dict[str, CounterMetricFamily | GaugeMetricFamily] = {}
        for sample in self._read():
            if sample.name not in families:
                kind = CounterMetricFamily if sample.is_counter else GaugeMetricFamily
                families[sample.name] = kind(f"marconi_router_{sample.name}", sample.help, labels=tuple(sample.labels))
            families[sample.name].add_metric(tuple(sample.labels.values()), sample.value)
        yield from families.values()
