"""The policies that a server offers: each with its rules, its number and the inputs it needs.

    python -m sglang.launch_server --marconi-eviction NAME --marconi-admission ADMISSION

A policy is an eviction rule and the admission that it runs with unless another is asked for. `Policy` makes both from
`PolicyInputs`; who serves by them, and from how much memory, is the caller's. A server's flags take their names from
here. A replay has these and others (`replay/catalog.py`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple

from marconi.model.latency import LatencyModel
from marconi.policy.admission.base import Admission
from marconi.policy.admission.plan import Guarded, Judicious
from marconi.policy.base import Costs, Eviction, Need
from marconi.policy.eviction.best import BestEviction
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.eviction.tail import TailEviction
from marconi.policy.eviction.utility import ALPHA, AgeingUtilityEviction
from marconi.policy.forecast.forecast import Forecast
from marconi.policy.forecast.turns import Turns
from marconi.policy.host_tier import NEEDS as HOST_NEEDS
from marconi.policy.host_tier import LoadTimes, WritePolicy
from marconi.policy.request import Trace

OF_A_FILE: Final = ".py:"
"""Ends the path in the name of a rule of one's own; the rule follows."""
SGLANG_MAMBA_RATIO: Final = 0.9
"""SGLang 0.5.23's default of `--mamba-full-memory-ratio`: bytes for states over bytes for KV."""


class Knowledge(Enum):
    """Knowledge that a policy has beside the requests that have arrived."""

    NOTHING = "nothing"
    PREFILL_TIMES = "prefill times and a budget"
    TRAFFIC = "the traffic's means"
    FUTURE = "the requests to come"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInputs:
    """The arguments that a policy is made from."""

    costs: Costs
    needs: frozenset[Need]
    """The resources that may run short: one pool's bytes, or KV and states."""
    unit_tokens: int = 1
    """Positions of states are multiples of it: the page, or the trace's unit."""
    number: float = math.nan
    """The policy's own number; nan takes the policy's default."""
    latency: LatencyModel | None = None
    ttft_budget_s: float | None = None
    """Time to first token that is good enough, in seconds."""
    trace: Trace | None = None
    """The requests that will be served; None where they are unknown."""

    @property
    def budget_s(self) -> float:
        """The policy's own number as a time to first token, else what is good enough; `ValueError` without either."""
        if self.latency is None or (math.isnan(self.number) and self.ttft_budget_s is None):
            missing = "prefill times" if self.latency is None else "budget"
            raise ValueError(f"the inputs must have prefill times and a budget to the first token, got no {missing}")
        return self.ttft_budget_s if math.isnan(self.number) and self.ttft_budget_s is not None else self.number


class Rules(NamedTuple):
    """The rules that a policy consists of."""

    eviction: Eviction
    admission: Admission


class Parameter(NamedTuple):
    """The number that a policy takes after the colon."""

    name: str
    default: float | None = None
    """None: it must be given."""
    is_whole: bool = False
    """Whether it counts something."""


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """The parts of a policy's name, not yet looked up: `NAME[:NUMBER][@ADMISSION]`."""

    name: str
    """One that is known, or the path of a file and, after a colon, the class of a rule in it."""
    parameter: str | None = None
    """The text after the colon; None takes the policy's default."""
    admission: str | None = None
    """The text after the `@`; None takes the policy's own."""

    @classmethod
    def parse(cls, text: str) -> "PolicySpec":
        """Read one policy; `ValueError` where a part is empty."""
        head, at, admission = text.strip().partition("@")
        file, ending, rule = head.rpartition(OF_A_FILE)
        name, colon, parameter = (rule if ending else head).partition(":")
        name = name and file + ending + name
        if not name or (at and not admission) or (colon and not parameter):
            raise ValueError(
                f"a policy must be NAME, NAME:NUMBER or FILE.py:RULE, each perhaps with @ADMISSION, got {text!r}"
            )
        return cls(name, parameter if colon else None, admission if at else None)

    def __str__(self) -> str:
        parameter = "" if self.parameter is None else f":{self.parameter}"
        return f"{self.name}{parameter}" + ("" if self.admission is None else f"@{self.admission}")


def parse_list(text: str) -> tuple[PolicySpec, ...]:
    """Read policies separated by commas; `ValueError` for an empty list or the same one twice."""
    specs = tuple(PolicySpec.parse(part) for part in text.split(","))
    if len(set(specs)) != len(specs):
        raise ValueError(f"--policy must name each policy once, got {text!r}")
    return specs


@dataclass(frozen=True, slots=True)
class Policy:
    """A named policy, from which its rules are made."""

    name: str
    summary: str
    """One line, for `marconi replay --list-policies`."""
    make: Callable[[PolicyInputs], Eviction] | None = None
    """The eviction rule; None for what a replay alone has without one."""
    knowledge: Knowledge = Knowledge.NOTHING
    admission: str | None = None
    """Which admission it runs with in a replay, by name; None is Marconi's, with the rule's guard where it has one."""
    parameter: Parameter | None = None
    mamba_ratio: float | None = None
    """Bytes for states over bytes for KV of its own layout in a replay; None is one pool."""
    write_policy: WritePolicy | None = None
    """When stock's host tier copies, for a policy that stands for stock; None takes the tier by worth."""
    ranks_copies: bool = False
    """Whether its rule can rank copies on the host: by what a node says of itself, or by a forecast that is shared."""

    def rules(self, inputs: PolicyInputs, admission: Admission | None = None) -> Rules:
        """Its rules, with `admission` in place of Marconi's; `ValueError` for what is not given."""
        assert self.make is not None, f"{self.name} has no rule of its own"
        eviction = self.make(inputs)
        if admission is not None:
            return Rules(eviction, admission)
        judicious = Judicious(inputs.unit_tokens)
        return Rules(
            eviction, judicious if eviction.guard is None else Guarded(judicious, eviction.guard, inputs.costs)
        )

    def host_eviction(self, inputs: PolicyInputs, of_device: Eviction, times: LoadTimes) -> Eviction:
        """Its rule for copies on the host, beside the one for the device; `inputs` is what that was made from.

        Only for a policy that ranks copies (`require_host_rule`).
        """
        assert self.make is not None, f"{self.name} has no rule of its own"
        assert self.ranks_copies, f"{self.name} has no rule for copies"
        return of_device.for_copies(HOST_NEEDS, times.worth_of) or self.make(replace(inputs, needs=HOST_NEEDS))

    def number(self, spec: PolicySpec) -> float:
        """The number that `spec` gives or the default; `ValueError` for one too many, one missing or a wrong one."""
        if self.parameter is None:
            if spec.parameter is not None:
                raise ValueError(f"the policy must be {self.name}, without a number, got {str(spec)!r}")
            return math.nan
        name = f"{self.name}:{self.parameter.name.upper()}"
        if spec.parameter is None:
            if self.parameter.default is None:
                raise ValueError(f"the policy must be {name}, with a number, got {str(spec)!r}")
            return self.parameter.default
        try:
            number = float(spec.parameter)
        except ValueError:
            number = math.nan
        if not 0 <= number < math.inf or (self.parameter.is_whole and not number.is_integer()):
            kind = "whole number" if self.parameter.is_whole else "number"
            raise ValueError(f"policy {str(spec)!r}: {name} must be a {kind}, 0 or more, got {spec.parameter!r}")
        return number


def _tail(inputs: PolicyInputs) -> Eviction:
    budget_s = inputs.budget_s
    assert inputs.latency is not None
    return TailEviction(inputs.latency.smallest_cached_tokens, budget_s, inputs.needs)


SERVED: Final[Mapping[str, Policy]] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            Policy(
                "lru",
                "stock SGLang: two pools, two LRUs, states at chunk ends",
                lambda inputs: SeparateLru(inputs.needs),
                admission="chunk-end",
                mamba_ratio=SGLANG_MAMBA_RATIO,
                write_policy=WritePolicy.THROUGH,
                ranks_copies=True,
            ),
            Policy(
                "marconi",
                "Marconi: recency + alpha * FLOP efficiency, ages in eviction ages",
                lambda inputs: AgeingUtilityEviction(inputs.costs, inputs.number, inputs.needs),
                parameter=Parameter("alpha", ALPHA),
                ranks_copies=True,
            ),
            Policy(
                "tail",
                "T-LRU for hybrid models: of a conversation, the shallowest state in time is kept",
                _tail,
                knowledge=Knowledge.PREFILL_TIMES,
                parameter=Parameter("seconds", math.nan),
            ),
            Policy(
                "best",
                "forecast: least expected saving per byte and second, learned while it serves; guarded admission",
                lambda inputs: BestEviction(inputs.costs, Forecast(Turns(inputs.unit_tokens)), inputs.needs),
                ranks_copies=True,
            ),
        )
    }
)
"""The policies that a server offers, by name, in the order of its listing."""


def served(name: str) -> Policy:
    """The policy that a server offers by `name`; an unknown name raises a `ValueError` that lists them."""
    policy = SERVED.get(name)
    if policy is None:
        raise ValueError(f"a server's policy must be one of {', '.join(SERVED)}, got {name!r}")
    return policy


def require_host_rule(policy: Policy, policies: Mapping[str, Policy]) -> None:
    """`ValueError`, with those of `policies` that are possible, for a rule that ranks by requests.

    It would have to receive them for copies on the host, too.
    """
    if not policy.ranks_copies:
        able = ", ".join(each.name for each in policies.values() if each.ranks_copies)
        raise ValueError(f"with a host tier the policy must be one of {able}, got {policy.name}")
