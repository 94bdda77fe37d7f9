"""A policy of the catalogue as a replay drives it.

A replay's *target* is a server (`replay/server.py`) or a cache of blocks, and how its memory is divided.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from marconi.baselines.admission.named import admission_of
from marconi.baselines.catalog import POLICIES, resolve_policy, rules_of
from marconi.baselines.eviction.tuned import TunedUtilityEviction
from marconi.model.latency import LatencyModel
from marconi.policy.base import Costs, Eviction
from marconi.policy.catalog import SERVED, SGLANG_MAMBA_RATIO, Policy, PolicyInputs, PolicySpec, require_host_rule
from marconi.policy.eviction.order import Order
from marconi.policy.host_tier import HostMemory, HostTier, LoadTimes, Tier
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.request import Trace
from marconi.replay.int8 import Int8, Int8Pools
from marconi.replay.policies.block import BlockServer
from marconi.replay.pools import JointPool, Pool, Pools
from marconi.replay.scheduling import Scheduling
from marconi.replay.server import ServerReplay
from marconi.replay.stock_tier import StockTier
from marconi.replay.tuned import TunedServer
from marconi.tree import RadixTree


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
        return Pools(num_units * unit_tokens, num_slots)

    def host_memory(self) -> HostMemory | None:
        """The host tier's pools, divided as the device's are; None without a tier."""
        if self.host is None:
            return None
        # As SGLang divides it: as the device's pools.
        host = self.host if self.mamba_ratio is None else replace(self.host, mamba_ratio=self.mamba_ratio)
        return host.memory(self.costs, self.trace.unit_tokens)

    def laid_out(self, policy: Policy) -> "CacheConfig":
        """Take the pools of `policy` where none are asked for; `ValueError` for pools that cannot be."""
        if self.int8 is not None and self.mamba_ratio is None:
            return replace(self, mamba_ratio=SGLANG_MAMBA_RATIO)
        if self.mamba_ratio is None:
            return replace(self, mamba_ratio=policy.mamba_ratio)
        asked = f"--mamba-full-memory-ratio {self.mamba_ratio:g}"
        if policy.caches_blocks:
            raise ValueError(
                f"{asked} splits memory between KV and states, and a block cache has one pool: leave it out"
            )
        if not self.has_states:
            raise ValueError(f"{asked}: the model keeps no states, so there is no split to choose: leave it out")
        return self


@dataclass(frozen=True, slots=True)
class ReplayTarget:
    """The cache that a replay drives."""

    cache: ServerReplay | BlockServer
    mamba_ratio: float | None = None
    """Bytes for states over bytes for KV that its pools have; None without two such pools."""


def require_possible(spec: PolicySpec, config: CacheConfig) -> None:
    """`ValueError`, in which `spec` is named, if it cannot be built for `config`; quick, for nothing large is made."""
    policy = resolve_policy(spec)
    with _named(spec):
        if config.int8 is not None:
            _require_served_in_int8(spec, config)
        config.laid_out(policy)
        if config.host is not None and not config.has_states:
            raise ValueError("--host-memory: the model keeps no states, and the tier is one for states: leave it out")
        if config.host is not None and policy.caches_blocks:
            raise ValueError("a block cache has no host tier: leave --host-memory out")
        if config.host is not None:
            require_host_rule(policy, POLICIES)
        if policy.caches_blocks:
            BlockServer(spec.name, config.memory_bytes, config.trace.unit_tokens, config.costs)
            return
        if spec.admission is not None:
            admission_of(spec.admission, config.trace.unit_tokens)
        if policy.requires is not None:
            policy.requires(config.trace)


def _require_served_in_int8(spec: PolicySpec, config: CacheConfig) -> None:
    """`ValueError` for what a server with checkpoints in int8 does not offer."""
    if config.host is not None:
        raise ValueError("--int8-checkpoints: a server refuses it with a host tier: leave --host-memory out")
    policy = SERVED.get(spec.name)
    if policy is None:
        raise ValueError(f"--int8-checkpoints: a server offers it with {', '.join(SERVED)}, and not with this policy")
    admission = policy.admission if spec.admission is None else spec.admission
    if admission is not None and not admission_of(admission, config.trace.unit_tokens).plans_ahead:
        raise ValueError(
            f"--int8-checkpoints: a server refuses it with this admission, {admission}: take {spec.name}@judicious"
        )


def build(spec: PolicySpec, config: CacheConfig) -> ReplayTarget:
    """A new target for `spec`, which is not one with alternatives; `ValueError` if it cannot be."""
    policy = resolve_policy(spec)
    assert not policy.alternatives, f"{spec} is the best of several: replay its choices"
    with _named(spec):
        config = config.laid_out(policy)
        if policy.caches_blocks:
            return ReplayTarget(
                BlockServer(spec.name, config.memory_bytes, config.trace.unit_tokens, config.costs),
                mamba_ratio=config.mamba_ratio if config.has_states else None,
            )
        return _prefix_cache(policy, spec, config)


def _prefix_cache(policy: Policy, spec: PolicySpec, config: CacheConfig) -> ReplayTarget:
    memory, trace = config.memory(), config.trace
    inputs = PolicyInputs(
        costs=config.costs,
        needs=frozenset({memory.kv_need, memory.state_need}),
        unit_tokens=trace.unit_tokens,
        number=policy.number(spec),
        latency=config.latency,
        ttft_budget_s=config.slo_s,
        trace=trace,
    )
    rules = rules_of(policy, inputs, spec.admission)
    rule, admission = rules.eviction, rules.admission
    tree = RadixTree(trace.unit_tokens, config.max_ghosts)
    host = _host_tier(policy, inputs, rule, tree, config)
    has_two_pools = memory.kv_need is not memory.state_need
    hybrid = HybridCache(tree, admission, Order(rule), turns=rule.turns, host=host, fills_spare=has_two_pools)
    scheduling = Scheduling.of(admission, trace.unit_tokens)
    if isinstance(memory, Int8Pools):
        # SGLang counts no slot for a request that it does not hold.
        scheduling = replace(scheduling, num_lent_slots=0)
    if isinstance(rule, TunedUtilityEviction):
        fixed = PolicySpec("marconi-static", "0", spec.admission)
        server: ServerReplay = TunedServer(hybrid, memory, scheduling, lambda: _server(build(fixed, config)))
    else:
        server = ServerReplay(hybrid, memory, scheduling)
    return ReplayTarget(server, mamba_ratio=config.mamba_ratio if config.has_states else None)


def _server(target: ReplayTarget) -> ServerReplay:
    assert isinstance(target.cache, ServerReplay)
    return target.cache


def _host_tier(
    policy: Policy, inputs: PolicyInputs, rule: Eviction, tree: RadixTree, config: CacheConfig
) -> Tier | None:
    """The tier below `tree`, which `rule` evicts from; None without one."""
    memory = config.host_memory()
    if config.host is None or memory is None:
        return None
    times = LoadTimes(config.costs, config.latency.seconds, config.host.bytes_per_s)
    if policy.write_policy is not None:
        return StockTier(tree, memory, times, policy.write_policy)
    require_host_rule(policy, POLICIES)
    return HostTier(tree, Order(policy.host_eviction(inputs, rule, times)), memory, times)


@contextmanager
def _named(spec: PolicySpec) -> Iterator[None]:
    """Put the policy's name before the message of a `ValueError`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"policy {str(spec)!r}: {error}") from None
