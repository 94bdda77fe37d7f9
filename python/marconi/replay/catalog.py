"""Every policy that a replay knows: those that a server offers, and what is installed beside them.

    marconi replay --policy NAME[:NUMBER][@ADMISSION]       lru   marconi-static:0.5   best@judicious:64
    marconi replay --policy FILE.py:RULE                    ./mine.py:LargestFirst

The command lines of `replay` and `plan`, the docs and the tests take their names from here. Policies that no server
offers are found by their entry point (`extensions.py`), those of this distribution in `marconi_lab/catalog.py`.
A rule of one's own is a class in a file, made from costs and needs. `build` makes the target that a replay drives by
one.
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

from marconi import extensions
from marconi.policy.base import Costs, Eviction, Need
from marconi.policy.catalog import (
    OF_A_FILE,
    SERVED,
    SGLANG_MAMBA_RATIO,
    Policy,
    PolicyInputs,
    PolicySpec,
    Rules,
    require_host_rule,
)
from marconi.policy.eviction.order import Order
from marconi.policy.host_tier import HostTier, LoadTimes, Tier
from marconi.policy.hybrid_cache import HybridCache
from marconi.policy.request import Trace
from marconi.replay.admission.named import admission_of
from marconi.replay.int8 import Int8Pools
from marconi.replay.pools import Pool
from marconi.replay.scheduling import Scheduling
from marconi.replay.server import ServerReplay
from marconi.replay.stock_tier import StockTier
from marconi.replay.store import StoreReplay
from marconi.replay.target import Blocks, CacheConfig, ReplayTarget
from marconi.tree import RadixTree

Another: TypeAlias = Callable[[PolicySpec], ServerReplay]
"""Makes an empty server of the same memory by another policy."""


def _server(hybrid: HybridCache, pools: Pool, scheduling: Scheduling, _another: Another) -> ServerReplay:
    return ServerReplay(hybrid, pools, scheduling)


@dataclass(frozen=True, slots=True)
class ReplayPolicy(Policy):
    """A policy as a replay knows it."""

    blocks: Callable[[int, int, Costs], Blocks] | None = None
    """Makes a cache of a trace's blocks, of so many bytes and tokens a block, in place of a server."""
    alternatives: tuple[PolicySpec, ...] = ()
    """The one with the most hit tokens is the policy."""
    requires: Callable[[Trace], object] | None = None
    """Raises `ValueError` for a trace that lacks a field that the policy needs."""
    server: Callable[[HybridCache, Pool, Scheduling, Another], ServerReplay] = _server

    @classmethod
    def of(cls, policy: Policy) -> "ReplayPolicy":
        """A policy that a server offers."""
        return cls(**{field.name: getattr(policy, field.name) for field in fields(policy)})

    @property
    def caches_blocks(self) -> bool:
        """Whether its memory may be a number of blocks."""
        return self.blocks is not None

    def choices(self, spec: PolicySpec) -> tuple[PolicySpec, ...]:
        """The policies to replay for `spec`: itself, or each of the alternatives with its admission."""
        if not self.alternatives:
            return (spec,)
        return tuple(replace(choice, admission=spec.admission) for choice in self.alternatives)

    def laid_out(self, config: CacheConfig) -> CacheConfig:
        """`config` with the policy's own pools where none are asked for; `ValueError` for pools that cannot be."""
        if config.int8 is not None and config.mamba_ratio is None:
            return replace(config, mamba_ratio=SGLANG_MAMBA_RATIO)
        if config.mamba_ratio is None:
            return replace(config, mamba_ratio=self.mamba_ratio)
        if self.caches_blocks or not config.has_states:
            one = "a block cache" if self.caches_blocks else "a model without states"
            got = f"got {config.mamba_ratio:g}: there is one pool"
            raise ValueError(f"--mamba-full-memory-ratio must be left out for {one}, {got}")
        return config


@cache
def known_policies() -> Mapping[str, ReplayPolicy]:
    """By name, in the order in which they are listed."""
    beside = [policy for found in extensions.installed(extensions.POLICIES) for policy in found]
    return MappingProxyType({each.name: each for each in (*map(ReplayPolicy.of, SERVED.values()), *beside)})


def resolve_policy(spec: PolicySpec) -> ReplayPolicy:
    """The policy of that name, its number and admission checked; `ValueError`, with the known names, for others."""
    policy = _of_file(spec.name) if OF_A_FILE in spec.name else known_policies().get(spec.name)
    if policy is None:
        raise ValueError(f"a policy must be one of {', '.join(known_policies())}, got {spec.name!r}")
    policy.number(spec)
    if spec.admission is not None:
        try:
            if policy.caches_blocks:
                raise ValueError(f"a block cache must have no admission, got {spec.admission!r}: it takes every block")
            admission_of(spec.admission, unit_tokens=1)
        except ValueError as error:
            raise ValueError(f"policy {str(spec)!r}: {error}") from None
    return policy


@cache
def _of_file(name: str) -> ReplayPolicy:
    """The policy of a rule that is named by its file and its class; `ValueError` for what is not there or no rule."""
    path, _, rule = name.rpartition(":")
    found = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert found is not None, "it ends in .py"
    assert found.loader is not None, "it ends in .py"
    module = importlib.util.module_from_spec(found)
    try:
        found.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"policy {name!r}: {path} must be a file of Python, got {error}") from None
    made = getattr(module, rule, None)
    if not (isinstance(made, type) and issubclass(made, Eviction)):
        raise ValueError(f"policy {name!r}: {rule} must be a class of {path} that extends Eviction, got {made!r}")
    own: Callable[[Costs, frozenset[Need]], Eviction] = made

    def make(inputs: PolicyInputs) -> Eviction:
        try:
            return own(inputs.costs, inputs.needs)
        except TypeError as error:
            raise ValueError(f"{rule} must be made from costs and needs, got {error}") from None

    return ReplayPolicy(name, (made.__doc__ or name).splitlines()[0], make)


def rules_of(policy: Policy, inputs: PolicyInputs, admission: str | None = None) -> Rules:
    """The rules of `policy`, with the admission of that name in place of its own; `ValueError` for an unknown name."""
    name = policy.admission if admission is None else admission
    return policy.rules(inputs, None if name is None else admission_of(name, inputs.unit_tokens))


def require_possible(spec: PolicySpec, config: CacheConfig) -> None:
    """`ValueError`, in which `spec` is named, if it cannot be built for `config`; quick, for nothing large is made."""
    policy = resolve_policy(spec)
    with _named(spec):
        if config.int8 is not None:
            _require_served_in_int8(spec, config)
        policy.laid_out(config)
        if config.host is not None and not config.has_states:
            raise ValueError("--host-memory must be left out for a model without states: the tier holds states")
        if config.host is not None and policy.caches_blocks:
            raise ValueError("--host-memory must be left out for a block cache, which has no host tier")
        if config.host is not None:
            require_host_rule(policy, known_policies())
        if config.storage is not None and policy.write_policy is not None:
            raise ValueError("--storage-memory must be left out for stock SGLang, whose writes are not replayed")
        if policy.blocks is not None:
            policy.blocks(config.memory_bytes, config.trace.unit_tokens, config.costs)
            return
        if spec.admission is not None:
            admission_of(spec.admission, config.trace.unit_tokens)
        if policy.requires is not None:
            policy.requires(config.trace)


def _require_served_in_int8(spec: PolicySpec, config: CacheConfig) -> None:
    """`ValueError` for what a server with checkpoints in int8 does not offer."""
    if config.host is not None:
        raise ValueError("--host-memory must be left out with --int8-checkpoints: a server refuses both")
    policy = SERVED.get(spec.name)
    if policy is None:
        raise ValueError(f"--int8-checkpoints: the policy must be one of {', '.join(SERVED)}, got {spec.name!r}")
    admission = policy.admission if spec.admission is None else spec.admission
    if admission is not None and not admission_of(admission, config.trace.unit_tokens).plans_ahead:
        raise ValueError(
            f"--int8-checkpoints: the admission must plan ahead, as {spec.name}@judicious does, got {admission}"
        )


def build(spec: PolicySpec, config: CacheConfig) -> ReplayTarget:
    """A new target for `spec`, which is not one with alternatives; `ValueError` if it cannot be."""
    policy = resolve_policy(spec)
    assert not policy.alternatives, f"{spec} is the best of several: replay its choices"
    with _named(spec):
        config = policy.laid_out(config)
        if policy.blocks is not None:
            return policy.blocks(config.memory_bytes, config.trace.unit_tokens, config.costs)
        return _prefix_cache(policy, spec, config)


def _prefix_cache(policy: ReplayPolicy, spec: PolicySpec, config: CacheConfig) -> ServerReplay:
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

    def another(other: PolicySpec) -> ServerReplay:
        target = build(replace(other, admission=spec.admission), config)
        assert isinstance(target, ServerReplay)
        return target

    server = policy.server(hybrid, memory, scheduling, another)
    if config.storage is not None:
        assert isinstance(host, HostTier), "a store is behind a host tier by worth"
        server.store = StoreReplay(tree, host, config.costs, config.storage)
    return server


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
    require_host_rule(policy, known_policies())
    return HostTier(tree, Order(policy.host_eviction(inputs, rule, times)), memory, times)


@contextmanager
def _named(spec: PolicySpec) -> Iterator[None]:
    """Put the policy's name before the message of a `ValueError`."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"policy {str(spec)!r}: {error}") from None
