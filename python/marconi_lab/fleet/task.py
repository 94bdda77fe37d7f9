"""One simulation of a fleet, described by values alone, so that it can run in any process."""

import time
from dataclasses import dataclass

from marconi.policy.catalog import Knowledge, PolicySpec
from marconi.replay.catalog import build, resolve_policy
from marconi.replay.decode import DecodeLatency
from marconi.replay.grid import require_executable
from marconi.replay.outcome import Progress
from marconi.replay.queueing import Speed
from marconi.replay.result import Percentiles
from marconi.replay.task import ReplayInputs, Task
from marconi.router.dispatch import Dispatcher
from marconi.router.index import FleetIndex
from marconi.router.sync import Fleet
from marconi_lab.fleet.result import FleetRun
from marconi_lab.fleet.simulation import DEFAULT_EVENT_DELAY_S, FleetOutcome, simulate
from marconi_lab.fleet.variants import Variant
from marconi_lab.fleet.worker import SimulatedWorker

MAX_REPLICAS = 1000


@dataclass(frozen=True, slots=True)
class FleetTask:
    """A fleet and its rule of routing."""

    policy: PolicySpec
    memory_bytes: int
    """The whole fleet's; each worker has an equal part."""
    num_replicas: int
    variant: Variant
    mamba_ratio: float | None = None
    event_delay_s: float = DEFAULT_EVENT_DELAY_S
    host_bytes: int = 0
    """The host tiers' memory, likewise; 0 without any."""
    num_gateways: int = 1
    """Routers before the workers, each with an index of its own; requests come to them in turn."""
    reports_load: bool = True
    """Whether workers report their load with their events."""


def require_possible(inputs: ReplayInputs, task: FleetTask) -> None:
    """Raise `ValueError` for a task that `execute` would refuse."""
    require_for_fleets(task.policy)
    if task.memory_bytes < task.num_replicas:
        raise ValueError(f"--memory must be at least {task.num_replicas} bytes, 1 a worker, got {task.memory_bytes}")
    if task.num_gateways < 1:
        raise ValueError(f"a fleet must have 1 gateway or more, got {task.num_gateways}")
    require_executable(inputs, _of_one(task))


def require_for_fleets(spec: PolicySpec) -> None:
    """Raise `ValueError` for a policy that no worker of a fleet can have."""
    policy = resolve_policy(spec)
    if policy.caches_blocks:
        raise ValueError(f"policy {str(spec)!r}: a worker must have a cache with a tree, got a block cache")
    if policy.make is None or policy.knowledge is Knowledge.FUTURE:
        raise ValueError(f"policy {str(spec)!r}: a bound of hindsight is one of a single cache: leave out --replicas")


def execute(inputs: ReplayInputs, task: FleetTask, progress: Progress | None = None) -> FleetRun:
    """Simulate the fleet over the trace of `inputs`; `ValueError` for an impossible task."""
    require_possible(inputs, task)
    start_s = time.perf_counter()
    workers = _workers(inputs, task)
    gateways = [dispatcher_of(inputs, task.variant) for _ in range(task.num_gateways)]
    outcome = simulate(inputs.trace, workers, gateways, task.variant, task.event_delay_s, progress)
    return _summarise(inputs, task, workers, outcome, time.perf_counter() - start_s)


def dispatcher_of(inputs: ReplayInputs, variant: Variant) -> Dispatcher:
    """A live router's dispatcher for the trace of `inputs`, without workers."""
    return Dispatcher(Fleet(FleetIndex(inputs.trace.unit_tokens)), variant.make(inputs.latency), inputs.latency)


def _workers(inputs: ReplayInputs, task: FleetTask) -> list[SimulatedWorker]:
    config = _of_one(task).config(inputs)
    speed = Speed(inputs.latency, DecodeLatency.of(inputs.model, inputs.device))
    width = len(str(task.num_replicas - 1))
    return [
        SimulatedWorker(f"w{number:0{width}}", build(task.policy, config), speed, reports_load=task.reports_load)
        for number in range(task.num_replicas)
    ]


def _of_one(task: FleetTask) -> Task:
    num_replicas = task.num_replicas
    return Task(
        task.policy, task.memory_bytes // num_replicas, task.mamba_ratio, host_bytes=task.host_bytes // num_replicas
    )


def _summarise(
    inputs: ReplayInputs, task: FleetTask, workers: list[SimulatedWorker], outcome: FleetOutcome, wall_s: float
) -> FleetRun:
    """Sum up a simulation of at least one request."""
    requests = inputs.trace.requests
    return FleetRun(
        router=task.variant.name,
        policy=str(task.policy),
        num_replicas=task.num_replicas,
        memory_bytes=task.memory_bytes,
        num_requests=len(requests),
        num_prompt_tokens=sum(request.num_prompt_tokens for request in requests),
        num_hit_tokens=sum(outcome.hit_tokens),
        num_promised_tokens=sum(outcome.promised_tokens),
        ttft_s=Percentiles.of(outcome.ttft_s),
        mean_ttft_s=sum(outcome.ttft_s) / len(outcome.ttft_s),
        slo_s=inputs.slo_s,
        num_slo_violations=sum(ttft_s > inputs.slo_s for ttft_s in outcome.ttft_s),
        computed_imbalance=_imbalance([worker.num_computed_tokens for worker in workers]),
        request_imbalance=_imbalance([worker.num_requests for worker in workers]),
        num_idle_workers=sum(not worker.num_requests for worker in workers),
        reasons=tuple(sorted((reason.value, count) for reason, count in outcome.reasons.items())),
        requests_per_s=len(requests) / max(wall_s, 1e-9),
    )


def _imbalance(counts: list[int]) -> float:
    return max(counts) * len(counts) / sum(counts)
