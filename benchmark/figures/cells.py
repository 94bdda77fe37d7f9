"""A replay of a figure, described by values alone, and what it measures of each request.

A *scene* is a trace that is drawn, a *host* the model that is cached for and the one whose prefill is timed (the
Marconi paper caches for its 7B model and takes times from Jamba), a *cell* a policy with so much memory on both.
Replays are serial, as the papers': one request after the other.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from marconi.model import PrefillLatency
from marconi.model.device import device
from marconi.model.profile import ModelProfile
from marconi.policy.catalog import PolicySpec
from marconi.policy.request import Trace
from marconi.replay import serial
from marconi.replay.catalog import build
from marconi.replay.result import nearest_rank
from marconi.replay.task import ReplayInputs, Task
from marconi.replay.trace import Demand, Workload, generate


@dataclass(frozen=True, slots=True)
class Scene:
    """Sessions of a workload."""

    workload: Workload
    demand: Demand
    unit_tokens: int = 1

    def trace(self) -> Trace:
        """Draw it; equal scenes give equal traces."""
        return generate(self.workload, self.demand, self.unit_tokens)


@dataclass(frozen=True, slots=True)
class Host:
    """What is cached and how fast prefill is."""

    model: ModelProfile
    timed: ModelProfile
    device_name: str

    def inputs(self, trace: Trace) -> ReplayInputs:
        """`trace` on this host."""
        on = device(self.device_name)
        return ReplayInputs(trace, self.model, on, PrefillLatency(self.timed, on))


@dataclass(frozen=True, slots=True)
class Cell:
    """One replay."""

    scene: Scene
    host: Host
    policy: str
    """As on the command line, with any budget of time or tokens spelt out."""
    memory_bytes: int

    def sample(self, trace: Trace) -> "Sample":
        """Replay `trace`, which is the scene's; `ValueError` for a policy that cannot be made for it."""
        inputs = self.host.inputs(trace)
        task = Task(PolicySpec.parse(self.policy), self.memory_bytes)
        outcome = serial.replay(trace, build(task.policy, task.config(inputs)), inputs.latency)
        lengths = [request.num_prompt_tokens for request in trace.requests]
        return Sample(
            prompt_tokens=np.array(lengths, dtype=np.int64),
            hit_tokens=np.array(outcome.hit_tokens, dtype=np.int64),
            ttft_s=np.array(outcome.ttft_s),
            cold_ttft_s=np.array([inputs.latency.seconds(0, length) for length in lengths]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """What a replay measured, an entry a request in order of arrival."""

    prompt_tokens: NDArray[np.int64]
    hit_tokens: NDArray[np.int64]
    ttft_s: NDArray[np.float64]
    cold_ttft_s: NDArray[np.float64]
    """Without any cache."""

    @property
    def token_hit_rate(self) -> float:
        """Hit tokens over prompt tokens."""
        return float(self.hit_tokens.sum() / self.prompt_tokens.sum())

    def ttft_percentile(self, percent: int) -> float:
        """Seconds that `percent` of the requests do not exceed."""
        return percentile(self.ttft_s, percent)

    def num_late(self, slo_s: float) -> int:
        """Requests whose first token came after `slo_s`."""
        return int((self.ttft_s > slo_s).sum())


def percentile(values: NDArray[np.float64], percent: int) -> float:
    """By nearest rank, of at least one value in any order."""
    return nearest_rank(np.sort(values).tolist(), percent)
