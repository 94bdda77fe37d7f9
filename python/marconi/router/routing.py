"""Where a request goes: a rule sees the request and the workers that may take it, and chooses one.

    expected first token on w   =  wait on w  +  prefill from what w has of the prompt
    price of w                  =  expected first token
                                   + DISPLACED x turnover of w x prefill on w
    both in seconds, by the model's own prefill times (`model.LatencyModel`) and the worker's pace (`pace.Paces`)

    round-robin    each worker in its turn, by name
    least-loaded   the least wait, then the fewest requests running
    sticky-hash    the worker that the request's key belongs to, as long as it is not overloaded
    kv-only        the soonest first token, as if any KV could be started from
    state-aware    the least price, from the deepest state with all KV before it

Rules are deterministic. Where workers are equal, the request's `key` chooses by rendezvous hashing, so that requests
that begin alike meet on the same worker, and a worker that goes moves only its own. A rule gets what the router knows
when the request comes, so the same object routes a live fleet and a simulated one.

A worker is *in time* if its first token (of state-aware: its price) is no more than `slack` times the least, and
`grace_s` on top of it. Where no worker has `min_share` of the prompt, it is *cold*: there is little to lose, and it is
placed among the workers whose first token is in time. With a smaller share a common greeting decides where a long
document goes; with a larger one hits are ignored.

**state-aware**, of a prompt that is not cold:

1. *Stay.* Of the workers in time, the one with the most of the prompt. Without slack a session wanders whenever two
   workers are nearly equal, and each leaves a copy that the other then lacks.
2. *Price.* A worker also keeps what it computes. Where memory turns over (`Candidate.turnover`), the new states evict
   those that other requests would have resumed from; these are computed again and evict others in turn: under load a
   fleet that spreads documents over more workers than hold them computes ever more. Where there is room, a copy costs
   its prefill and nothing else, so what is new fills the workers alike.
3. *Replicate.* A prefix that many want, a system prompt, is worth a copy before one request alone would pay for it. So
   the waits beyond those of the cheapest other worker are added up for each prefix (the key, and how long it is: turns
   of chats that begin alike are not one), and once they reach what the copy costs there, that worker gets the next one.
   This is the ski-rental rule: wait until the waits have cost as much as a copy, then copy. One wait alone buys
   nothing: a session's own turns stay.

A cold prompt is placed by memory:

a. *Affinity.* On the worker that last served at least `AFFINITY_SHARE` of the prompt: it may still know it as a ghost,
   so that this occurrence counts as its second, and what its cache learns of the prefix is learned in one place.
b. Else on *the least warm*: of the workers in time, the one whose prefixes were used least lately. At equal memory,
   workers that are equally warm evict prefixes of equal age, as one cache of the whole memory would.

**kv-only** stands for routers that know no states. It stays with the worker that has most as long as that is in time,
gives the prompt to the soonest if it is not, and places a cold one on the least loaded.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Final, NamedTuple, Protocol

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
    REPLICA = "cached prefix wanted by many"


@dataclass(frozen=True, slots=True)
class Query:
    """A request as a rule sees it."""

    num_prompt_tokens: int
    key: bytes
    """A hash of its beginning and its namespace: equal for requests that are likely to share a prefix."""


class Candidate(NamedTuple):
    """A worker that may take a request, as the router knows it now."""

    name: str
    num_hit_tokens: int = 0
    """Tokens of the prompt up to the deepest state with all KV before it: these are not computed again."""
    num_kv_tokens: int = 0
    """Tokens of the prompt whose KV it has: no fewer than `num_hit_tokens`, and of use only up to a state."""
    work_ahead_s: float = 0.0
    """Seconds until a request that it is given now begins."""
    num_running: float = 0
    """Requests that it has and has not finished, those of other clients included where it tells its load."""
    num_seen_tokens: int = 0
    """Tokens of the prompt that this worker was the last to serve, whether it still holds them or not."""
    num_warm_tokens: float = 0.0
    """Tokens of all prefixes that it was the last to serve; those served long ago count less."""
    turnover: float = 0.0
    """How much of what it stores takes the place of something else, 0 to 1: by what it stored and removed of late.

    Not by the memory that it tells to be free: a full cache first evicts states that nobody asks for, and no prefix.
    """
    pace: float = 1.0
    """Seconds of its prefills over those of the model's times, which are the fleet's (`pace.Paces`)."""


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
    return worker.work_ahead_s + worker.pace * latency.seconds(num_cached_tokens, query.num_prompt_tokens)


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
class KvOnly:
    """The worker with the most KV while it is in time, else the soonest; a cold prompt on the least loaded in time."""

    latency: LatencyModel
    tolerance: Tolerance = Tolerance()

    def choose(self, query: Query, workers: Sequence[Candidate]) -> Decision:
        """Choose as if any KV could be started from."""
        cached = [worker.num_kv_tokens for worker in workers]
        prefill_s = {num_tokens: expected_ttft_s(self.latency, query, _IDLE, num_tokens) for num_tokens in set(cached)}
        ttft_s = {worker: worker.work_ahead_s + worker.pace * prefill_s[worker.num_kv_tokens] for worker in workers}
        most, soonest_s = max(cached), min(ttft_s.values())
        in_time = [worker for worker in workers if ttft_s[worker] <= self.tolerance.latest_s(soonest_s)]
        if most == 0 or most < self.tolerance.min_share * query.num_prompt_tokens:
            worker, reason = least_loaded(query, in_time), Reason.COLD
        elif holders := [worker for worker in in_time if worker.num_kv_tokens == most]:
            worker, reason = least_loaded(query, holders), Reason.HIT
        else:
            equal = [worker for worker in workers if ttft_s[worker] == soonest_s]
            worker, reason = rendezvous(query.key, equal), Reason.OVERFLOW
        return Decision(worker, reason, ttft_s[worker])


_IDLE: Final = Candidate("")


def by_memory(query: Query, workers: Sequence[Candidate]) -> tuple[Candidate, Reason]:
    """Place a cold prompt on the worker that served it last, else on the least warm, of several the least loaded."""
    enough = max(AFFINITY_SHARE * query.num_prompt_tokens, 1)
    if seen := [worker for worker in workers if worker.num_seen_tokens >= enough]:
        return least_loaded(query, seen), Reason.AFFINITY
    least = min(worker.num_warm_tokens for worker in workers)
    return least_loaded(query, [worker for worker in workers if worker.num_warm_tokens == least]), Reason.COLD


STATE_AWARE: Final = Tolerance(min_share=0.2, slack=1.5, grace_s=0.05)
DISPLACED: Final = 16.0
"""Prefills that one causes where memory turns over; of 0 to 32, tuned on synthetic shapes."""
MAX_PREFIXES: Final = 65_536
"""Prefixes whose waits are added up; the longest unused is forgotten."""


@dataclass(slots=True)
class LeastPrice:
    """The worker of the least price, with a preference for the one that has most; see the module."""

    latency: LatencyModel
    num_cached_tokens: Callable[[Candidate], int] = lambda worker: worker.num_hit_tokens
    """Tokens that a worker is believed to have of the prompt."""
    tolerance: Tolerance = STATE_AWARE
    _waited_s: OrderedDict[tuple[bytes, int], float] = field(default_factory=OrderedDict, init=False)
    """By key and tokens of the prefix, what was waited in vain since the last copy."""

    def choose(self, query: Query, workers: Sequence[Candidate]) -> Decision:
        """Place a cold prompt; else choose who has most of it among those near the least price, or is due a copy."""
        offers = self._offers(query, workers)
        most = max(offer.num_tokens for offer in offers)
        if most == 0 or most < self.tolerance.min_share * query.num_prompt_tokens:
            latest_s = self.tolerance.latest_s(min(offer.ttft_s for offer in offers))
            worker, reason = by_memory(query, [offer.worker for offer in offers if offer.ttft_s <= latest_s])
            return Decision(worker, reason, next(offer.ttft_s for offer in offers if offer.worker is worker))
        chosen = self._in_time(query, offers)
        if (copy := self._copy(query, chosen, offers)) is not None:
            return Decision(copy.worker, Reason.REPLICA, copy.ttft_s)
        return Decision(chosen.worker, Reason.HIT if chosen.num_tokens == most else Reason.OVERFLOW, chosen.ttft_s)

    def _offers(self, query: Query, workers: Sequence[Candidate]) -> list["_Offer"]:
        cached = [self.num_cached_tokens(worker) for worker in workers]
        prefill_s = {num_tokens: expected_ttft_s(self.latency, query, _IDLE, num_tokens) for num_tokens in set(cached)}
        return [
            _Offer(
                worker,
                num_tokens,
                worker.work_ahead_s + worker.pace * prefill_s[num_tokens],
                (cost_s := worker.pace * prefill_s[num_tokens] * (1 + DISPLACED * worker.turnover)),
                worker.work_ahead_s + cost_s,
            )
            for worker, num_tokens in zip(workers, cached, strict=True)
        ]

    def _in_time(self, query: Query, offers: Sequence["_Offer"]) -> "_Offer":
        """Among the offers in time, the longest hit; of equal hits, the least loaded worker."""
        latest_s = self.tolerance.latest_s(min(offer.price_s for offer in offers))
        in_time = [offer for offer in offers if offer.price_s <= latest_s]
        most = max(offer.num_tokens for offer in in_time)
        worker = least_loaded(query, [offer.worker for offer in in_time if offer.num_tokens == most])
        return next(offer for offer in in_time if offer.worker is worker)

    def _copy(self, query: Query, chosen: "_Offer", offers: Sequence["_Offer"]) -> "_Offer | None":
        """The offer of the worker that gets a copy in place of the chosen one; None if too little was waited yet."""
        others = [offer for offer in offers if offer.num_tokens < chosen.num_tokens]
        if not others:
            return None
        least_s = min(offer.price_s for offer in others)
        worker = rendezvous(query.key, [offer.worker for offer in others if offer.price_s == least_s])
        other = next(offer for offer in others if offer.worker is worker)
        in_vain_s = max(chosen.worker.work_ahead_s - other.worker.work_ahead_s, 0.0)
        prefix = query.key, chosen.num_tokens
        before_s = self._waited_s.pop(prefix, 0.0)
        waited_s = before_s + in_vain_s
        is_due = min(before_s, in_vain_s) > 0 and waited_s >= other.cost_s - chosen.cost_s
        if waited_s > 0 and not is_due:
            self._waited_s[prefix] = waited_s
            if len(self._waited_s) > MAX_PREFIXES:
                self._waited_s.popitem(last=False)
        return other if is_due else None


class _Offer(NamedTuple):
    """A worker's hit for a prompt, and the expected time of its first token."""

    worker: Candidate
    num_tokens: int
    ttft_s: float
    cost_s: float
    """The prefill and what it displaces."""
    price_s: float
    """Wait and cost."""


ROUTINGS: Final[Mapping[str, Callable[[LatencyModel], Routing]]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "sticky-hash": StickyHash,
    "kv-only": KvOnly,
    "state-aware": LeastPrice,
}
"""The rules by name, as command lines and reports call them."""


def routing_of(name: str, latency: LatencyModel) -> Routing:
    """The rule called `name` with its default parameters; `ValueError` for another name."""
    if name not in ROUTINGS:
        raise ValueError(f"routing must be one of {', '.join(ROUTINGS)}, got {name!r}")
    return ROUTINGS[name](latency)
