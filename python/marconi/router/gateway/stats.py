"""A gateway's counts: metrics for Prometheus, named `marconi_router_*`, and the latest requests.

Counters of other parts (the index, the sync, the sockets) are read when they are requested. Of a request there are
lengths, names and times, never a word of its prompt.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from marconi.router.dispatch import Ticket
from marconi.router.gateway.connections import Connections
from marconi.router.gateway.gateway import Gateway
from marconi.router.gateway.placed import CachedTokens, FirstToken
from marconi.router.gateway.traffic import FleetTraffic

_PREFIX: Final = "marconi_router_"
_SECONDS: Final = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Metrics(Collector):
    """The metrics of one gateway."""

    def __init__(self, gateway: Gateway, connections: Connections) -> None:
        self._registry = CollectorRegistry()
        self._gateway = gateway
        self._connections = connections
        self.traffic = FleetTraffic()
        self.requests = self._counter("requests", "Requests that were answered.", "route", "status")
        self.health_checks = self._counter("health_checks", "Health checks of this router, no requests.", "status")
        self.decisions = self._counter("decisions", "Where requests were sent, and why.", "worker", "reason")
        self.failures = self._counter("failed_attempts", "Attempts that brought no answer.", "worker")
        self.cut_off = self._counter("streams_cut_off", "Streams that their worker did not finish.")
        self.clients_gone = self._counter("clients_gone", "Requests whose client left before the end.")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.hit_tokens = self._counter("hit_tokens", "Tokens of prompts that the chosen worker was known to have.")
        self.expected_tokens = self._counter(
            "expected_tokens",
            "Tokens that a worker should have had of prompts whose answers say what it had.",
            "worker",
        )
        self.cached_tokens = self._counter("cached_tokens", "Tokens of these that the worker had.", "worker")
        self.to_dispatch_s = self._histogram(
            "to_dispatch_seconds", "From a request's last byte to its dispatch: reading, tokenizing, hashing, deciding."
        )
        self.ttft_s = self._histogram("ttft_seconds", "Time to the first byte of an answer.")
        self.expected_ttft_s = self._histogram(
            "worker_expected_ttft_seconds", "Expected time from a stream's dispatch to its first token.", "worker"
        )
        self.worker_ttft_s = self._histogram(
            "worker_ttft_seconds", "Actual time from their dispatch to their first token.", "worker"
        )
        self._registry.register(self)

    def stream_began(self, ticket: Ticket, ttft_s: float) -> None:
        """Note the first token of a stream, `ttft_s` after its dispatch, beside when it was expected."""
        expected_s = ticket.decision.expected_ttft_s
        self.expected_ttft_s.labels(ticket.worker).observe(expected_s)
        self.worker_ttft_s.labels(ticket.worker).observe(ttft_s)
        if (placed := self._gateway.placed.get(ticket.worker)) is not None:
            placed.ttft_s.append(FirstToken(expected_s, ttft_s))

    def accepted(self, ticket: Ticket, num_cached: int | None) -> None:
        """Note a prompt of known tokens that a worker took, and how many were cached, if its answer reports it."""
        num_prompt, num_expected = ticket.prompt.num_tokens, ticket.num_cached_tokens
        self.prompt_tokens.inc(num_prompt)
        self.hit_tokens.inc(ticket.decision.worker.num_hit_tokens)
        self.traffic.add(time.time(), num_prompt, num_expected, num_cached)
        if num_cached is None:
            return
        self.expected_tokens.labels(ticket.worker).inc(num_expected)
        self.cached_tokens.labels(ticket.worker).inc(num_cached)
        if (placed := self._gateway.placed.get(ticket.worker)) is not None:
            placed.cached_tokens.append(CachedTokens(num_expected, num_cached, num_prompt))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Read the counters of other parts."""
        gateway = self._gateway
        dispatcher, wire = gateway.dispatcher, gateway.feed.subscriber.stats
        fleet, now_s = dispatcher.fleet, time.monotonic()
        yield _gauge("index_blocks", "Blocks of KV that any worker holds.", fleet.index.num_blocks)
        yield _gauge("index_guesses", "Guesses of what workers will hold that have not ended yet.", len(fleet.guesses))
        if gateway.remote is not None:
            yield _count("worker_tokenizations", "Prompts that a worker tokenized.", gateway.remote.num_asked)
            yield _count("worker_tokenizations_failed", "Of these, those without an answer.", gateway.remote.num_failed)
        yield _gauge("connections", "Connections of clients.", self._connections.num_open)
        yield _count("connections_refused", "Connections above the limit.", self._connections.num_refused)
        up = GaugeMetricFamily(_PREFIX + "worker_up", "Whether a worker takes requests.", labels=("worker",))
        checks = CounterMetricFamily(
            _PREFIX + "worker_health_checks", "Health checks sent to a worker, no requests.", labels=("worker",)
        )
        known = [
            GaugeMetricFamily(_PREFIX + name, words, labels=("worker",))
            for name, words in (
                ("worker_running", "Requests of a worker."),
                ("worker_work_ahead_seconds", "Seconds until a request that a worker is given now begins."),
                ("worker_entries", "Blocks of KV and states that a worker is known to hold."),
                ("worker_held_seconds", "Mean time from the first token of a request to its end."),
                ("worker_turnover", "Blocks that a worker lately evicted over those that it stored, 0 to 1."),
                ("worker_pace", "Seconds of a worker's prefills over those of the fleet's fit."),
                ("worker_limit", "Requests that a worker runs at once; without a value until one had to wait."),
            )
        ]
        for worker in gateway.workers.values():
            checks.add_metric((worker.url,), worker.health.num_checks)
            for name in (rank.name for rank in worker.ranks):
                up.add_metric((name,), float(worker.is_up))
                if name in gateway.ranks:
                    entries = fleet.index.holding(name).num_entries
                    load = dispatcher.load(name, now_s)
                    values = (
                        *(load.num_running, load.wait_s(now_s), entries, load.held.mean_s(now_s)),
                        *(fleet.sync(name).turnover.share, dispatcher.paces.of(name, now_s), load.limit),
                    )
                    for family, value in zip(known, values, strict=True):
                        if math.isfinite(value):
                            family.add_metric((name,), value)
        yield from (up, checks, *known)
        yield _count("event_messages", "Batches and snapshots that were read.", wire.num_messages)
        dropped = CounterMetricFamily(
            _PREFIX + "event_messages_dropped", "Batches and snapshots that could not be read.", labels=("why",)
        )
        for why, number in wire.dropped.items():
            dropped.add_metric((str(why),), number)
        yield dropped
        guesses = CounterMetricFamily(
            _PREFIX + "guesses", "Guesses of what a worker will hold: made, and by what ended them.", labels=("fate",)
        )
        for fate, number in fleet.guesses.fates.items():
            guesses.add_metric((fate,), number)
        yield guesses
        for of, stats in (("events", asdict(fleet.stats)), ("index", asdict(fleet.index.stats))):
            for name, value in stats.items():
                text = name.removeprefix("num_")
                yield _count(f"{of}_{text}", f"{text.replace('_', ' ')}; see /router.", value)

    def _counter(self, name: str, words: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, words, labels, registry=self._registry)

    def _histogram(self, name: str, words: str, *labels: str) -> Histogram:
        return Histogram(_PREFIX + name, words, labels, buckets=_SECONDS, registry=self._registry)


def _gauge(name: str, words: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(_PREFIX + name, words, value=value)


def _count(name: str, words: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(_PREFIX + name, words, value=value)


@dataclass(slots=True)
class Record:
    """One request, filled in while it runs."""

    at_s: float
    """Unix time of its arrival."""
    route: str
    num_prompt_tokens: int | None = None
    """None where this router does not know its tokens."""
    worker: str | None = None
    """The last that it was tried on."""
    reason: str | None = None
    num_hit_tokens: int | None = None
    num_kv_tokens: int | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens that its worker had cached, as the answer reports; None where it does not."""
    expected_ttft_s: float | None = None
    ttft_s: float | None = None
    """From its arrival to the first byte of the answer."""
    num_attempts: int = 0
    status: int | None = None
    """The answer's; None while there is none, or if its client has disconnected."""
    failures: list[str] | None = None
    """Earlier attempts' errors, in words."""

    def attempt(self, ticket: Ticket) -> None:
        """Note that it was given to a worker."""
        self.num_attempts += 1
        decision = ticket.decision
        self.worker, self.reason = ticket.worker, str(decision.reason)
        self.num_hit_tokens, self.num_kv_tokens = decision.worker.num_hit_tokens, decision.worker.num_kv_tokens
        self.expected_ttft_s = round(decision.expected_ttft_s, 6)

    def fail(self, why: str) -> None:
        """Note that an attempt failed."""
        self.failures = [*(self.failures or ()), why]
