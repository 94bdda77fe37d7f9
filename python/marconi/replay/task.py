"""One replay, described by values alone, so that it can be done in any process."""

from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache
from pathlib import Path

from marconi.model.device import DeviceProfile
from marconi.model.latency import LatencyModel
from marconi.model.measured_latency import MeasuredLatency
from marconi.model.profile import ModelProfile
from marconi.policy.admission.plan import Judicious
from marconi.policy.base import Costs
from marconi.policy.catalog import PolicySpec
from marconi.policy.request import Trace
from marconi.replay.int8 import Int8
from marconi.replay.outcome import PROGRESS_STEP, Progress
from marconi.replay.queueing import Batching
from marconi.replay.store import StoreSpec
from marconi.replay.target import CacheConfig, Host
from marconi.tree import RadixTree

UNBOUNDED_BYTES = 1 << 80
NUM_LENGTHS_KEPT = 1 << 17
"""Lengths of prefixes whose FLOPs are worked out once a replay: rules ask for few of them, again and again."""


class Mode(StrEnum):
    """How requests run: one after the other, or beside each other."""

    SERIAL = "serial"
    QUEUEING = "queueing"


@dataclass(frozen=True, slots=True)
class ReplayInputs:
    """The inputs that all replays of a report share."""

    trace: Trace
    model: ModelProfile
    device: DeviceProfile
    latency: LatencyModel
    mode: Mode = Mode.SERIAL
    batching: Batching = field(default_factory=Batching)
    slo_s: float = 1.0
    seed: int = 0
    remarks: tuple[str, ...] = ()
    """Differences between the trace and what was served."""

    @property
    def device_name(self) -> str:
        """Whose speed it is: the device's, or the table's that was measured."""
        latency = self.latency
        return Path(latency.source).name if isinstance(latency, MeasuredLatency) else self.device.name

    @property
    def has_states(self) -> bool:
        """True if a checkpoint of the model takes memory beyond its KV."""
        return self.model.checkpoint_bytes > 0

    @property
    def costs(self) -> Costs:
        """Bytes and FLOPs of a checkpoint; what a model does not keep counts as 1 byte, so that it has a price."""
        model = self.model
        flops = lru_cache(NUM_LENGTHS_KEPT)(model.prefix_flops)
        return Costs(max(model.kv_bytes_per_token, 1), max(model.checkpoint_bytes, 1), flops)

    @property
    def has_int8_checkpoints(self) -> bool:
        """True if a checkpoint of the model is a recurrent state, which int8 makes smaller."""
        model = self.model
        return 0 < model.int8_state_bytes < model.state_bytes == model.checkpoint_bytes


@dataclass(frozen=True, slots=True)
class Task:
    """A policy and its memory."""

    policy: PolicySpec
    memory_bytes: int
    mamba_ratio: float | None = None
    """Bytes for states over bytes for KV; None takes the policy's own layout, or is one pool once it has run."""
    host_bytes: int = 0
    """The host tier's memory; 0 without one."""
    int8_checkpoints: bool = False
    """`--enable-int8-mamba-checkpoint`."""
    storage: StoreSpec | None = None
    """The store behind the host tier."""

    def costs(self, inputs: ReplayInputs) -> Costs:
        """Bytes and FLOPs of a checkpoint, in int8 if it is kept so."""
        costs = inputs.costs
        return replace(costs, state_bytes=inputs.model.int8_state_bytes) if self.int8_checkpoints else costs

    def config(self, inputs: ReplayInputs) -> CacheConfig:
        """The configuration of the cache."""
        max_running = inputs.batching.max_running
        return CacheConfig(
            trace=inputs.trace,
            costs=self.costs(inputs),
            latency=inputs.latency,
            memory_bytes=self.memory_bytes,
            mamba_ratio=self.mamba_ratio,
            host=Host(self.host_bytes, inputs.device.host_bytes_per_s) if self.host_bytes else None,
            storage=self.storage,
            has_states=inputs.has_states,
            slo_s=inputs.slo_s,
            int8=Int8(inputs.costs.state_bytes, max_running) if self.int8_checkpoints else None,
        )


def unbounded_bytes(inputs: ReplayInputs, progress: Progress | None = None) -> int:
    """Bytes that a cache without a limit holds at the end: judicious admission at the trace's unit, no eviction."""
    unit_tokens, costs = inputs.trace.unit_tokens, inputs.costs
    tree, admission = RadixTree(unit_tokens), Judicious(unit_tokens)
    for index, request in enumerate(inputs.trace.requests, start=1):
        path = request.path[: tree.offset(request.num_known_tokens // unit_tokens * unit_tokens)]
        match = tree.match(path, request.num_prompt_tokens - 1, request.namespace)
        depths = admission.depths(request, match)
        if depths:
            tree.insert(path, depths, request.namespace)
            tree.take_changed()
        if progress is not None and (index % PROGRESS_STEP == 0 or index == len(inputs.trace.requests)):
            progress((index - 1) % PROGRESS_STEP + 1)
    return tree.num_tokens * costs.kv_bytes_per_token + tree.num_states * costs.state_bytes
