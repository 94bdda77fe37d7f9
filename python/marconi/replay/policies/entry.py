"""What stands behind a policy's name: a line of description and a recipe that makes it from a setting.

A *subject* is what a replay drives: a prefix cache or a cache of blocks, and what is to be told of each served request
(the online tuner). A policy that is the best of several in hindsight names its alternatives instead of a recipe.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from marconi.model.latency import LatencyModel
from marconi.policy.cache import Budget, JointBudget, SplitBudget
from marconi.policy.eviction.base import Costs, Need
from marconi.policy.request import Request, Trace
from marconi.replay.policies.block import BlockServer
from marconi.replay.policies.cache import ReplayCache
from marconi.replay.policies.spec import PolicySpec
from marconi.tuning import Objective


@dataclass(frozen=True, slots=True)
class Setting:
    """What a policy is made for."""

    trace: Trace
    costs: Costs
    latency: LatencyModel
    memory_bytes: int
    mamba_ratio: float | None = None
    """Bytes for states over bytes for KV; None takes the policy's own layout (`Entry.lay_out`)."""
    has_states: bool = True
    """False for a model that keeps nothing but KV: then there is no pool of states, and they are free."""
    slo_s: float = 1.0
    """Time to first token that a policy may aim at."""
    objective: Objective = Objective.TOKEN_HIT_RATE
    """What an online tuner maximises."""
    max_ghosts: int = 100_000

    def budget(self) -> Budget:
        """The memory, split at the ratio; one pool if there is none. `ValueError` for a pool without a byte."""
        ratio = self.mamba_ratio
        if ratio is None:
            return JointBudget(self.memory_bytes)
        if not self.has_states:
            # A state counts as a byte and has at least one of KV above it: the second pool is never short.
            return SplitBudget(self.memory_bytes, self.memory_bytes)
        state_bytes = int(self.memory_bytes * (ratio / (1 + ratio)))
        return SplitBudget(self.memory_bytes - state_bytes, state_bytes)


def needs_of(budget: Budget) -> frozenset[Need]:
    """What a pool, or either of two, may be short of."""
    return frozenset({Need.BYTES}) if isinstance(budget, JointBudget) else frozenset({Need.KV, Need.STATE})


@dataclass(frozen=True, slots=True)
class Subject:
    """What a replay drives."""

    cache: ReplayCache | BlockServer
    served: Callable[[Request, float], None] | None = None
    """Told of each request that has finished, and when, in seconds."""
    chosen: Callable[[], str] | None = None
    """Says, at the end, what the policy has settled on."""
    mamba_ratio: float | None = None
    """Bytes for states over bytes for KV that its pools have; None without two such pools."""


Recipe: TypeAlias = Callable[[Setting, PolicySpec, float], Subject]
"""Makes a subject from the setting, what the command line said, and the policy's number (nan if it takes none)."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """The number that a policy takes after the colon."""

    name: str
    default: float | None = None
    """None: it must be given."""
    is_whole: bool = False
    """Whether it counts something."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A policy: its name, what it is in a line, and how it is made."""

    name: str
    summary: str
    make: Recipe | None = None
    parameter: Parameter | None = None
    alternatives: tuple[PolicySpec, ...] = ()
    """In their place if `make` is None: the one with the most hit tokens is the policy."""
    mamba_ratio: float | None = None
    """Bytes for states over bytes for KV of its own layout; None is one pool."""
    requires: Callable[[Trace], object] | None = None
    """Raises `ValueError` for a trace that lacks what the policy is told of it."""
    caches_blocks: bool = False
    """Whether it caches the trace's blocks without a tree, so that its memory may be a number of them."""

    def number(self, spec: PolicySpec) -> float:
        """The number that `spec` gives or the default; `ValueError` for one too many, one missing or a wrong one."""
        if self.parameter is None:
            if spec.parameter is not None:
                raise ValueError(f"policy {str(spec)!r}: {self.name} takes no number")
            return math.nan
        name = f"{self.name}:{self.parameter.name.upper()}"
        if spec.parameter is None:
            if self.parameter.default is None:
                raise ValueError(f"policy {str(spec)!r}: {name} is right")
            return self.parameter.default
        try:
            number = float(spec.parameter)
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf or (self.parameter.is_whole and not number.is_integer()):
            kind = "whole number" if self.parameter.is_whole else "number"
            raise ValueError(f"policy {str(spec)!r}: {name} with a {kind}, 0 or more, is right")
        return number

    def lay_out(self, setting: Setting) -> Setting:
        """`setting` with the policy's own pools where it asks for none; `ValueError` for pools that cannot be."""
        if setting.mamba_ratio is None:
            return replace(setting, mamba_ratio=self.mamba_ratio)
        asked = f"--mamba-full-memory-ratio {setting.mamba_ratio:g}"
        if self.caches_blocks:
            raise ValueError(
                f"{asked} splits memory between KV and states, and a block cache has one pool: leave it out"
            )
        if not setting.has_states:
            raise ValueError(f"{asked}: the model keeps no states, so there is no split to choose: leave it out")
        return setting

    def choices(self, spec: PolicySpec) -> tuple[PolicySpec, ...]:
        """What to replay for `spec`: itself, or each of the alternatives with its admission."""
        if self.make is not None:
            return (spec,)
        return tuple(replace(choice, admission=spec.admission) for choice in self.alternatives)
