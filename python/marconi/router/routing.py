"""Where a request goes: a rule sees the request and the workers that may take it, and chooses one.

    expected time to first token on worker w  =  work ahead of it on w
                                              +  prefill from what w has of the prompt
    both in seconds, by the model's own prefill times (`model.LatencyModel`)

    round-robin    each worker in its turn, by name
    least-loaded   the least work ahead, then the fewest requests running
    sticky-hash    the worker that the request's key belongs to, as long as it is not overloaded
    kv-only        the soonest first token, as if any KV could be started from
    state-aware    the soonest first token, from the deepest state with all KV before it

Rules are deterministic. Where workers are equal, the request's `key` chooses by rendezvous hashing, so that requests
that begin alike meet on the same worker, and a worker that goes moves only its own. A rule gets what the router knows
when the request comes and keeps nothing of it, so the same object routes a live fleet and a simulated one.

kv-only and state-aware are one rule, `Soonest`; they differ in what they count and in where cold prompts go. A worker
is *in time* if its first token is expected no later than `slack` times the soonest, and `grace_s` on top of it.

1. *Cold.* Where no worker has `min_share` of the prompt, there is little to lose: it is placed among the workers in
   time. With a smaller share a common greeting decides where a long document goes; with a larger one hits are ignored.
2. *Sticky while balanced.* The worker with the most of the prompt keeps it, as long as it is in time. Without slack a
   session wanders whenever two workers are nearly equal, and each leaves a copy that the other then lacks.
3. *Else the soonest.* The worker that has it is so busy that computing the prompt anew elsewhere comes first: the
   prefix is hot, and from now on has a second worker.

kv-only places a cold prompt on the least loaded worker, state-aware by memory:

a. *Affinity.* On the worker that last served at least `AFFINITY_SHARE` of the prompt: it may still know it as a ghost,
   so that this occurrence counts as its second, and what its cache learns of the prefix is learned in one place.
b. Else on *the least warm*: of the workers in time, the one whose prefixes were used least lately. At equal memory,
   workers that are equally warm evict prefixes of equal age, as one cache of the whole memory would.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Final, Protocol, TypeAlias

from marconi.model.latency import LatencyModel

AFFINITY_SHARE: Final = 0.5


class Reason(StrEnum):
    """Why a request went where it did."""

    TURN = "round robin"
    LEAST_LOADED = "least loaded"
    KEY = "consistent hash"
    HIT = "longest cached prefix"
    AFFINITY = "cached prefix too short, served it last"
    COLD = "cached prefix too short"
    OVERFLOW = "preferred worker overloaded"


@dataclass(frozen=True, slots=True)
class Query:
    """A request as a rule sees it."""

    num_prompt_tokens: int
    key: bytes
    """A hash of its beginning and its namespace: equal for requests that are likely to share a prefix."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that may take a request, as the router knows it now."""

    name: str
    num_hit_tokens: int = 0
    """Tokens of the prompt up to the deepest state with all KV before it: these are not computed again."""
    num_kv_tokens: int = 0
    """Tokens of the prompt whose KV it has: no fewer than `num_hit_tokens`, and of use only up to a state."""
    work_ahead_s: float = 0.0
    """Prefills that it was given and has not answered yet, by the model's times."""
    num_running: int = 0
    """Requests that it was given and has not finished."""
    num_seen_tokens: int = 0
    """Tokens of the prompt that this worker was the last to serve, whether it still holds them or not."""
    num_warm_tokens: float = 0.0
    """Tokens of all prefixes that it was the last to serve; those served long ago count less."""
    turnover: float = 0.0
    """How much of what it stores takes the place of something else, 0 to 1."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen worker, the reason, and when its first token is expected."""

    worker: Candidate
    reason: Reason
    expected_ttft_s: float


class Routing(Protocol):
    """A rule that chooses among workers."""

    def choose(self, query: Query, workers: Sequence[Candidate]) -> Decision:
        """Choose one of `workers`, of which there is at least one."""
        ...


def expected_ttft_s(latency: LatencyModel, query: Query, worker: Candidate, num_cached_tokens: int) -> float:
    """Time to the first token on a worker that has so many tokens of the prompt; the last is always computed."""
    num_cached_tokens = min(num_cached_tokens, query.num_prompt_tokens - 1)
    return worker.work_ahead_s + latency.seconds(num_cached_tokens, query.num_prompt_tokens)


def rendezvous(key: bytes, workers: Sequence[Candidate]) -> Candidate:
    """The worker that `key` belongs to: the one with the highest hash of both (Thaler and Ravishankar, 1998)."""
    return max(workers, key=lambda worker: (_weight(key, worker.name), worker.name))


def _weight(key: bytes, name: str) -> bytes:
    return blake2b(b"%d:%b%b" % (len(key), key, name.encode()), digest_size=8).digest()


def least_loaded(query: Query, workers: Sequence[Candidate]) -> Candidate:
    """The worker with the least work ahead, then the fewest requests, then the one that the key belongs to."""
    least = min((worker.work_ahead_s, worker.num_running) for worker in workers)
    return rendezvous(query.key, [each for each in workers if (each.work_ahead_s, each.num_running) == least])


@dataclass(slots=True)
class RoundRobin:
    """Each worker in its turn by name, so that one that comes or goes takes no other's turn."""

    latency: LatencyModel
    _last: str = field(default="", init=False)

    def choose(self, query: Query, workers: Sequence[Candidate]) -> Decision:
        """Choose the next name after the last, or the first."""
        after = [worker for worker in workers if worker.name > self._last]
        worker = min(after or workers, key=lambda each: each.name)
        self._last = worker.name
        return Decision(worker, Reason.TURN, expected_ttft_s(self.latency, query, worker, worker.num_hit_tokens))


@dataclass(frozen=True, slots=True)
class LeastLoaded:
    """The worker with the least to do, whatever it has of the prompt."""

    latency: LatencyModel

    def choose(self, query: Query, workers: Sequence[Candidate]) -> Decision:
        """Choose by work ahead, then by requests, then by the key."""
        worker = least_loaded(query, workers)
        ttft_s = expected_ttft_s(self.latency, query, worker, worker.num_hit_tokens)
        return Decision(worker, Reason.LEAST_LOADED, ttft_s)


@dataclass(frozen=True, slots=True)
class StickyHash:
    """The worker that the request's key belongs to, as a router that knows nothing of caches can choose.

    With a bound on its load, after consistent hashing with bounded loads (Mirrokni et al., 2018): a worker that runs
    `max_load` times the mean number of requests, this one counted, passes it on to the next that the key would belong
    to. With infinity a key never leaves its worker; smaller values spread hot prefixes sooner and lose more hits.
    """

    latency: LatencyModel
    max_load: float = 1.25

    def __post_init__(self) -> None:
        """Raise `ValueError` for a bound below the mean."""
        if not self.max_load >= 1:
            raise ValueError(f"max_load must be 1 or more, times the mean, got {self.max_load}")

    def choose(self, query: Query, workers: Sequence[Candidate]) -> Decision:
        """Choose by rendezvous, among those within the bound."""
        own = rendezvous(query.key, workers)
        mean = (sum(worker.num_running for worker in workers) + 1) / len(workers)
        bound = self.max_load * mean if math.isinf(self.max_load) else math.ceil(self.max_load * mean)
        worker = own
        if own.num_running >= bound:
            worker = rendezvous(query.key, [each for each in workers if each.num_running < bound])
        reason = Reason.KEY if worker is own else Reason.OVERFLOW
        return Decision(worker, reason, expected_ttft_s(self.latency, query, worker, worker.num_hit_tokens))


Placement: TypeAlias = Callable[[Query, Sequence[Candidate]], tuple[Candidate, Reason]]
"""Chooses one of the workers in time for a cold prompt, and gives the reason."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Which workers are in time, and from which share of a prompt on it is not cold."""

    min_share: float = 0.05
    slack: float = 1.5
    grace_s: float = 0.05

    def __post_init__(self) -> None:
        """Raise `ValueError` for a parameter out of its range."""
        if not 0 <= self.min_share <= 1:
            raise ValueError(f"min_share must be 0 to 1, got {self.min_share}")
        if not self.slack >= 1:
            raise ValueError(f"slack must be 1 or more, got {self.slack}")
        if not self.grace_s >= 0:
            raise ValueError(f"grace_s must be 0 or more, got {self.grace_s}")

    def latest_s(self, soonest_s: float) -> float:
        """The latest first token that is in time."""
        return self.slack * soonest_s + self.grace_s


@dataclass(frozen=True, slots=True)
class Soonest:
    """The worker whose first token is expected first, with a preference for the one that has the most of the prompt."""

    latency: LatencyModel
    num_cached_tokens: Callable[[Candidate], int]
    """Tokens that a worker is believed to have of the prompt."""
    place: Placement
    tolerance: Tolerance

    def choose(self, query: Query, workers: Sequence[Candidate]) -> Decision:
        """Choose where a cold prompt is placed, else the worker that has most, else the soonest."""
        cached = [self.num_cached_tokens(worker) for worker in workers]
        prefill_s = {num_tokens: self._prefill_s(query, num_tokens) for num_tokens in set(cached)}
        ttft_s = [worker.work_ahead_s + prefill_s[tokens] for worker, tokens in zip(workers, cached, strict=True)]
        most, soonest_s = max(cached), min(ttft_s)
        latest_s = self.tolerance.latest_s(soonest_s)
        known = list(zip(workers, cached, ttft_s, strict=True))
        if most == 0 or most < self.tolerance.min_share * query.num_prompt_tokens:
            worker, reason = self.place(query, [worker for worker, _, at_s in known if at_s <= latest_s])
            return Decision(worker, reason, worker.work_ahead_s + prefill_s[self.num_cached_tokens(worker)])
        best_s = min(at_s for _, tokens, at_s in known if tokens == most)
        if best_s <= latest_s:
            equal = [worker for worker, tokens, at_s in known if (tokens, at_s) == (most, best_s)]
            return Decision(rendezvous(query.key, equal), Reason.HIT, best_s)
        equal = [worker for worker, _, at_s in known if at_s == soonest_s]
        return Decision(rendezvous(query.key, equal), Reason.OVERFLOW, soonest_s)

    def _prefill_s(self, query: Query, num_cached_tokens: int) -> float:
        return expected_ttft_s(self.latency, query, _IDLE, num_cached_tokens)


_IDLE: Final = Candidate("")


def by_load(query: Query, workers: Sequence[Candidate]) -> tuple[Candidate, Reason]:
    """Place a cold prompt on the least loaded worker."""
    return least_loaded(query, workers), Reason.COLD


def by_memory(query: Query, workers: Sequence[Candidate]) -> tuple[Candidate, Reason]:
    """Place a cold prompt on the worker that served it last, else on the least warm, of several the least loaded."""
    enough = max(AFFINITY_SHARE * query.num_prompt_tokens, 1)
    if seen := [worker for worker in workers if worker.num_seen_tokens >= enough]:
        return least_loaded(query, seen), Reason.AFFINITY
    least = min(worker.num_warm_tokens for worker in workers)
    return least_loaded(query, [worker for worker in workers if worker.num_warm_tokens == least]), Reason.COLD


STATE_AWARE: Final = Tolerance(min_share=0.2, slack=2.0, grace_s=1.0)
"""Between values tried on tuning halves, whose differences are within chance: `docs/fleet-simulation.md`."""


def state_aware(latency: LatencyModel, tolerance: Tolerance = STATE_AWARE) -> Soonest:
    """The rule by what can be started from: states with all KV before them."""
    return Soonest(latency, lambda worker: worker.num_hit_tokens, by_memory, tolerance)


def kv_only(latency: LatencyModel, tolerance: Tolerance = Tolerance()) -> Soonest:
    """The rule by KV alone, as routers have it that know no states."""
    return Soonest(latency, lambda worker: worker.num_kv_tokens, by_load, tolerance)


ROUTINGS: Final[Mapping[str, Callable[[LatencyModel], Routing]]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "sticky-hash": StickyHash,
    "kv-only": kv_only,
    "state-aware": state_aware,
}
"""The rules by name, as command lines and reports call them."""


def routing_of(name: str, latency: LatencyModel) -> Routing:
    """The rule called `name` with its default parameters; `ValueError` for another name."""
    if name not in ROUTINGS:
        raise ValueError(f"routing must be one of {', '.join(ROUTINGS)}, got {name!r}")
    return ROUTINGS[name](latency)
