"""The results of simulations: as JSON, and as tables with a line a rule for each policy, memory and number of workers.

Definitions, beside those of `replay/result.py`

    single            one cache of the fleet's whole memory, requests one after the other: an upper bound but for chance
    share of single   token hit rate of the fleet over that of the single cache
    TTFT              from arrival to the first token: waiting and prefill
    imbalance         the most prompt tokens that a worker computed over the mean of all; 1 is even, N is one for all
    promised          hit tokens that the router expected of its choices, from events that are late by their delay
    reasons           why each worker was chosen, in the rule's words
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.box import SIMPLE
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from marconi.replay.memory import format_bytes
from marconi.replay.result import Percentiles, PolicyResult
from marconi.replay.task import ReplayInputs


@dataclass(frozen=True, slots=True)
class FleetRun:
    """The result of one rule before one fleet on one trace."""

    router: str
    policy: str
    num_replicas: int
    memory_bytes: int
    """The whole fleet's."""
    num_requests: int
    num_prompt_tokens: int
    num_hit_tokens: int
    num_promised_tokens: int
    ttft_s: Percentiles
    mean_ttft_s: float
    slo_s: float
    num_slo_violations: int
    computed_imbalance: float
    request_imbalance: float
    """The most requests of a worker, over the mean."""
    num_idle_workers: int
    """Workers without a request."""
    reasons: tuple[tuple[str, int], ...]
    requests_per_s: float
    """Speed of the simulation; depends on the machine."""

    @property
    def token_hit_rate(self) -> float:
        """Hit tokens over prompt tokens; 0 without a prompt token."""
        return self.num_hit_tokens / self.num_prompt_tokens if self.num_prompt_tokens else 0.0

    def to_json(self, timings: bool) -> dict[str, Any]:
        """The JSON value of the result file."""
        return {
            "router": self.router,
            "policy": self.policy,
            "replicas": self.num_replicas,
            "memory_bytes": self.memory_bytes,
            "num_requests": self.num_requests,
            "prompt_tokens": self.num_prompt_tokens,
            "hit_tokens": self.num_hit_tokens,
            "token_hit_rate": self.token_hit_rate,
            "promised_tokens": self.num_promised_tokens,
            "ttft_s": {**self.ttft_s.to_json(), "mean": self.mean_ttft_s},
            "slo_s": self.slo_s,
            "slo_violations": self.num_slo_violations,
            "computed_imbalance": self.computed_imbalance,
            "request_imbalance": self.request_imbalance,
            "idle_workers": self.num_idle_workers,
            "reasons": dict(self.reasons),
            "requests_per_s": self.requests_per_s if timings else None,
        }


@dataclass(frozen=True, slots=True)
class FleetReport:
    """Every run on one trace."""

    inputs: ReplayInputs
    speedup: float
    event_delay_s: float
    num_gateways: int
    unbounded_bytes: int | None
    """The memory of an unbounded cache at the end; None unless memory was given in shares of it."""
    host_bytes: int
    """Of all host tiers; 0 without any."""
    singles: tuple[PolicyResult, ...]
    """One cache of the whole memory, for each policy and amount."""
    runs: tuple[FleetRun, ...]
    """Sorted by policy, memory and number of workers."""

    def single(self, policy: str, memory_bytes: int) -> float:
        """Token hit rate of one cache."""
        asked = policy, memory_bytes
        return next(
            each.token_hit_rate for each in self.singles if (str(each.task.policy), each.task.memory_bytes) == asked
        )

    def share_of_single(self, run: FleetRun) -> float | None:
        """The run's token hit rate over that of one cache; None where that hits nothing."""
        single = self.single(run.policy, run.memory_bytes)
        return run.token_hit_rate / single if single else None

    def to_json(self, timings: bool = False) -> dict[str, Any]:
        """The JSON value of the result file."""
        inputs = self.inputs
        return {
            "trace": inputs.trace.name,
            "model": inputs.model.name,
            "seed": inputs.seed,
            "device": inputs.device_name,
            "speedup": self.speedup,
            "event_delay_s": self.event_delay_s,
            "gateways": self.num_gateways,
            "unbounded_bytes": self.unbounded_bytes,
            "host_memory_bytes": self.host_bytes,
            "single": [
                {
                    "policy": str(each.task.policy),
                    "memory_bytes": each.task.memory_bytes,
                    "token_hit_rate": each.token_hit_rate,
                }
                for each in self.singles
            ],
            "runs": [{**run.to_json(timings), "share_of_single": self.share_of_single(run)} for run in self.runs],
        }


def tables(report: FleetReport, timings: bool = False) -> RenderableType:
    """The tables of all runs; the simulation's own speed only with `timings`."""
    parts: list[RenderableType] = []
    for (policy, memory_bytes), runs in groupby(report.runs, key=lambda run: (run.policy, run.memory_bytes)):
        parts += [Text(_title(report, policy, memory_bytes), style="table.title"), _table(report, list(runs), timings)]
    return Group(*parts)


def _title(report: FleetReport, policy: str, memory_bytes: int) -> str:
    share = f" ({memory_bytes / report.unbounded_bytes:.3g}x of unbounded)" if report.unbounded_bytes else ""
    single = report.single(policy, memory_bytes)
    memory = f"{format_bytes(memory_bytes)} in all{share}"
    if report.host_bytes:
        memory += f" and {format_bytes(report.host_bytes)} on hosts"
    gateways = f"{report.num_gateways} gateways, " if report.num_gateways > 1 else ""
    inputs = report.inputs
    return (
        f"{inputs.trace.name}, {inputs.model.name} on {inputs.device_name}, {policy}, {memory}, {gateways}"
        f"seed {inputs.seed}; one cache of it: hit rate {100 * single:.2f} %"
    )


def _table(report: FleetReport, runs: Sequence[FleetRun], timings: bool) -> Table:
    table = Table(box=SIMPLE)
    names = ["hit rate", "of one cache", "TTFT p50", "p95", "p99", f"> {runs[0].slo_s:g} s", "imbalance", "idle"]
    table.add_column("workers", justify="right", no_wrap=True)
    table.add_column("router", no_wrap=True)
    for name in [*names, *(["requests/s"] if timings else [])]:
        table.add_column(name, justify="right", no_wrap=True)
    for run in runs:
        share = report.share_of_single(run)
        table.add_row(
            f"{run.num_replicas:,}",
            run.router,
            f"{100 * run.token_hit_rate:.2f} %",
            "-" if share is None else f"{share:.3f}",
            *(f"{seconds:.3g} s" for seconds in (run.ttft_s.p50, run.ttft_s.p95, run.ttft_s.p99)),
            f"{run.num_slo_violations:,}",
            f"{run.computed_imbalance:.2f}",
            f"{run.num_idle_workers:,}",
            *([f"{run.requests_per_s:,.0f}"] if timings else []),
        )
    return table
