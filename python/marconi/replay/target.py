"""A replay's *target*: a server (`replay/server.py`) or a cache of blocks, and its memory."""

from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from marconi.lifecycle.pools import Amount
from marconi.model.latency import LatencyModel
from marconi.policy.base import Costs
from marconi.policy.catalog import SGLANG_MAMBA_RATIO
from marconi.policy.counters import Counters
from marconi.policy.host_tier import HostMemory
from marconi.policy.request import Request, Trace
from marconi.replay.int8 import Int8
from marconi.replay.pools import JointPool, Pool, TwoPools
from marconi.replay.server import ServerReplay
from marconi.replay.store import StoreSpec


@dataclass(frozen=True, slots=True)
class Host:
    """The host tier's memory, and the link to it."""

    memory_bytes: int
    bytes_per_s: float
    mamba_ratio: float = SGLANG_MAMBA_RATIO
    """Bytes for states over bytes for KV."""

    def memory(self, costs: Costs, unit_tokens: int) -> HostMemory:
        """Its pools, in whole units of KV and whole states."""
        state_bytes = int(self.memory_bytes * (self.mamba_ratio / (1 + self.mamba_ratio)))
        num_units = (self.memory_bytes - state_bytes) // (costs.kv_bytes_per_token * unit_tokens)
        return HostMemory(num_units * unit_tokens, state_bytes // costs.state_bytes)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The traffic, costs and memory that a cache is built for."""

    trace: Trace
    costs: Costs
    latency: LatencyModel
    memory_bytes: int
    mamba_ratio: float | None = None
    """Bytes for states over bytes for KV; None takes the policy's own layout."""
    has_states: bool = True
    """False for a model that keeps nothing but KV: then there is no pool of states, and they are free."""
    slo_s: float = 1.0
    """Time to first token that a policy may aim at."""
    max_ghosts: int = 100_000
    host: Host | None = None
    storage: StoreSpec | None = None
    """The store behind the host tier."""
    int8: Int8 | None = None
    """For checkpoints in int8, whose bytes are those of `costs`."""

    def memory(self) -> Pool:
        """All of it free: split at the ratio, in whole units of KV and whole states, or one pool if there is none."""
        costs, unit_tokens, ratio = self.costs, self.trace.unit_tokens, self.mamba_ratio
        if ratio is None:
            return JointPool(self.memory_bytes, costs.kv_bytes_per_token, costs.state_bytes, unit_tokens)
        # A state of a model without any counts as a byte, and there is no pool of them to divide memory with.
        state_bytes = int(self.memory_bytes * (ratio / (1 + ratio))) if self.has_states else 0
        num_units = (self.memory_bytes - state_bytes) // (costs.kv_bytes_per_token * unit_tokens)
        if self.int8 is not None:
            return self.int8.pools(num_units * unit_tokens, state_bytes, costs.state_bytes)
        num_slots = state_bytes // costs.state_bytes if self.has_states else self.memory_bytes
        return TwoPools(num_units * unit_tokens, num_slots)

    def host_memory(self) -> HostMemory | None:
        """The host tier's pools, divided as the device's are; None without a tier."""
        if self.host is None:
            return None
        # As SGLang divides it: as the device's pools.
        host = self.host if self.mamba_ratio is None else replace(self.host, mamba_ratio=self.mamba_ratio)
        return host.memory(self.costs, self.trace.unit_tokens)


def block_bytes(unit_tokens: int, costs: Costs) -> int:
    """Bytes of a block of `unit_tokens`: its KV and the state at its end."""
    return unit_tokens * costs.kv_bytes_per_token + costs.state_bytes


class Blocks(Protocol):
    """A cache of a trace's blocks, without a tree."""

    @property
    def counters(self) -> Counters:
        """The counts so far, as a server has them."""
        ...

    @property
    def held(self) -> Amount:
        """The contents of the cache, with a state a block."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks held."""
        ...

    def serve(self, request: Request) -> int:
        """Serve `request`; returns its hit tokens."""
        ...


ReplayTarget: TypeAlias = ServerReplay | Blocks
"""The cache that a replay drives."""
