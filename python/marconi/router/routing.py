"""The worker of a request: a rule sees the request and the workers that may take it, and chooses one.

    expected first token on w   =  wait on w  +  prefill from what w has of the prompt
    cost on w                   =  prefill from what w has of the prompt
                                   + turnover of w x prefill of what w has no KV of
    price of w                  =  wait on w  +  (1 + queue) x cost on w
    prefill from what w has     =  from the deepest state on w, or from the one in the store behind w, once that is read
    all in seconds, by the model's own prefill times (`model.LatencyModel`) and the worker's pace (`pace.Paces`)
    queue                       =  the least wait of all workers / the prefill of the whole prompt

    round-robin    each worker in its turn, by name
    least-loaded   the least wait, then the fewest requests running
    sticky-hash    the worker that the request's key belongs to, as long as it is not overloaded
    kv-only        the soonest first token, as if any KV could be started from
    state-aware    the least price, from the deepest state with all KV before it; near it, the most KV

Rules are deterministic. Of equal workers the one that was the last to serve an *akin* request is chosen, one of the
same `prompt_cache_key` in the same name space, else one by rendezvous hashing of the request's `key`, so that requests
that begin alike meet on the same worker, and a worker that goes moves only its own. A rule gets what the router knows
when the request comes, so the same object routes a live fleet and a simulated one.

A worker is *in time* if its first token (of state-aware: its price) is no more than `slack` times the least, and on top
of it `grace_share` of the prefill of the whole prompt, at most `grace_s`: a request waits for its prefix, but not for a
multiple of what it takes to compute it where nothing waits. To state-aware, `slack_with_room` times is in time as long
as no worker's memory turns over, unless the prompt continues another: a copy displaces nothing there, and the next
request that wants it finds it, but nobody else wants a conversation's own turns. Where no worker has `min_share` of the
prompt, it is *cold*: there is little to lose, and it is placed among the workers whose first token is in time. With a
smaller share a common greeting decides where a long document goes; with a larger one hits are ignored.

**state-aware**, of a prompt that is not cold:

1. *Stay.* Of the workers in time, the one with the most KV of the prompt. Without slack a session wanders whenever two
   workers are nearly equal, and each leaves a copy that the other then lacks. KV without a state saves nothing now, but
   the request makes the state there again; on a worker without the KV it would leave a second copy of all of it.
2. *Displacement.* A worker also keeps what it computes and has no KV of. Where memory turns over
   (`Candidate.turnover`), that evicts what other requests would have resumed from, which is computed again. Where there
   is room, a copy costs its prefill and nothing else, so what is new fills the workers alike.
3. *Queue.* Where a worker is idle, computing costs the time that it takes. Where requests wait on every worker, each of
   those behind it waits as much longer: about as many as prefills fit into the least wait. So a fleet with capacity
   copies what is wanted where it is wanted, and one without computes as little as it can.

A prefix that many want, a system prompt, needs no rule of its own: once its holders are so busy that they are not in
time, the next request leaves a copy elsewhere, which is a holder from then on.

It is one at once because it is asked for. By Marconi's rule a state is kept where a prefix is seen for the second time,
and its new worker sees this one for the first: it would keep no state there, and compute the prefix twice. So the
decision names the depth up to which some worker knows the prompt and its own does not (`Decision.shared_tokens`): for
the fleet this is the second time. A worker knows what it has KV of, and what it was sent last, of which there may be no
events yet. A prompt that continues another, as a conversation's next turn does, diverges from nobody where that ended,
and asks for nothing: where memory is scarce, such states displace what others resume from.

A cold prompt is placed by memory:

a. *Affinity.* On the worker that last served at least `AFFINITY_SHARE` of the prompt: it may still know it as a ghost,
   so that this occurrence counts as its second, and what its cache learns of the prefix is learned in one place.
b. Else *with its kin*: on the worker that was the last to serve an akin request, as long as it is no warmer than
   `AKIN_WARMTH` times the mean, this prompt counted, or than this prompt alone would make it (as `StickyHash` bounds
   requests). A client may give all its requests one key: without the bound they would fill one memory of several.
c. Else on *the least warm*: of the workers in time, the one whose prefixes were used least lately. At equal memory,
   workers that are equally warm evict prefixes of equal age, as one cache of the whole memory would.

**kv-only** stands for routers that know no states. It stays with the worker that has most as long as that is in time,
gives the prompt to the soonest if it is not, and places a cold one on the least loaded.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Final, NamedTuple, Protocol

from marconi.model.latency import LatencyModel

AFFINITY_SHARE: Final = 0.5
AKIN_WARMTH: Final = 1.25
LEAST_SHARED_TOKENS: Final = 64
"""Below, two workers' blocks may differ by nothing but where they end."""


class Reason(StrEnum):
    """Why a request has its worker."""

    TURN = "round robin"
    LEAST_LOADED = "least loaded"
    KEY = "consistent hash"
    HIT = "longest cached prefix"
    AFFINITY = "cached prefix too short, served it last"
    AKIN = "cached prefix too short, served its prompt_cache_key last"
    COLD = "cached prefix too short"
    OVERFLOW = "preferred worker overloaded"


@dataclass(frozen=True, slots=True)
class Query:
    """A request as a rule sees it."""

    num_prompt_tokens: int
    key: bytes
    """A hash of its beginning and its namespace: equal for requests that are likely to share a prefix."""
    num_known_tokens: int = 0
    """Tokens of the prompt that some worker knows, whether it may take the request or not, and after which it diverges
    from another prompt; 0 where it continues one."""


class Candidate(NamedTuple):
    """A worker that may take a request, as the router knows it now."""

    name: str
    num_hit_tokens: int = 0
    """Tokens of the prompt up to the deepest state with all KV before it: these are not computed again."""
    num_kv_tokens: int = 0
    """Tokens of the prompt whose KV it has: no fewer than `num_hit_tokens`; it does not store them again."""
    work_ahead_s: float = 0.0
    """Seconds until a request that it is given now begins."""
    num_running: float = 0
    """Requests that it has and has not finished, those of other clients included where it reports its load."""
    num_seen_tokens: int = 0
    """Tokens of the prompt that this worker was the last to serve, whether it still holds them or not."""
    num_warm_tokens: float = 0.0
    """Tokens of all prefixes that it was the last to serve; those served long ago count less."""
    turnover: float = 0.0
    """How much of what it stores takes the place of something else, 0 to 1: by what it stored and removed of late.

    Not by the memory that it reports as free: a full cache first evicts states that nobody asks for, and no prefix.
    """
    pace: float = 1.0
    """Seconds of its prefills over those of the model's times, which are the fleet's (`pace.Paces`)."""
    num_stored_tokens: int = 0
    """Tokens of the prompt up to the deepest state in the store behind it, whoever put it there."""
    read_s: float = 0.0
    """Seconds until it has read that."""
    served_akin: bool = False
    """Whether it was the last to serve a request of the same `prompt_cache_key`."""


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen worker, the reason, and when its first token is expected."""

    worker: Candidate
    reason: Reason
    expected_ttft_s: float
    shared_tokens: int = 0
    """Tokens after which the worker should keep a state: prompts on other workers diverge there. 0 for none."""


class Routing(Protocol):
    """A rule that chooses among workers."""

    def choose(self, query: Query, workers: Sequence[Candidate]) -> Decision:
        """Choose one of `workers`, of which there is at least one."""
        ...


def expected_ttft_s(latency: LatencyModel, query: Query, worker: Candidate, num_cached_tokens: int) -> float:
    """Time to the first token on a worker that has so many tokens of the prompt; the last is always computed."""
    num_cached_tokens = min(num_cached_tokens, query.num_prompt_tokens - 1)
    return worker.work_ahead_s + worker.pace * latency.seconds(num_cached_tokens, query.num_prompt_tokens)


def reads(latency: LatencyModel, num_prompt_tokens: int, worker: Candidate, num_cached_tokens: int) -> float | None:
    """Seconds to read what its store has and compute the rest; None if computing what is not cached is sooner."""
    if worker.num_stored_tokens <= num_cached_tokens:
        return None
    stored = min(worker.num_stored_tokens, num_prompt_tokens - 1)
    read_s = worker.read_s + worker.pace * latency.seconds(stored, num_prompt_tokens)
    return read_s if read_s < worker.pace * latency.seconds(num_cached_tokens, num_prompt_tokens) else None


def rendezvous(key: bytes, workers: Sequence[Candidate]) -> Candidate:
    """The worker that `key` belongs to: the one with the highest hash of both (Thaler and Ravishankar, 1998)."""
    return max(workers, key=lambda worker: (_weight(key, worker.name), worker.name))


def _weight(key: bytes, name: str) -> bytes:
    return blake2b(b"%d:%b%b" % (len(key), key, name.encode()), digest_size=8).digest()


def least_loaded(query: Query, workers: Sequence[Candidate]) -> Candidate:
    """The worker with the least work ahead, then the fewest requests, then its kin's, or the one of its key."""
    least = min((worker.work_ahead_s, worker.num_running) for worker in workers)
    equal = [each for each in workers if (each.work_ahead_s, each.num_running) == least]
    return rendezvous(query.key, [each for each in equal if each.served_akin] or equal)


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
    slack_with_room: float = 1.25
    """The same where a copy displaces nothing and others want it, if it is less."""
    grace_share: float = 0.25
    grace_s: float = 0.1

    def __post_init__(self) -> None:
        """Raise `ValueError` for a parameter out of its range."""
        if not 0 <= self.min_share <= 1:
            raise ValueError(f"min_share must be 0 to 1, got {self.min_share}")
        for name, least in (("slack", 1), ("slack_with_room", 1), ("grace_share", 0), ("grace_s", 0)):
            if not getattr(self, name) >= least:
                raise ValueError(f"{name} must be {least} or more, got {getattr(self, name)}")

    def latest_s(self, soonest_s: float, whole_s: float, *, has_room: bool = False) -> float:
        """The latest first token that is in time, where the whole prompt's prefill takes `whole_s`."""
        slack = min(self.slack, self.slack_with_room) if has_room else self.slack
        return slack * soonest_s + min(self.grace_share * whole_s, self.grace_s)


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
        latest_s = self.tolerance.latest_s(soonest_s, expected_ttft_s(self.latency, query, _IDLE, 0))
        in_time = [worker for worker in workers if ttft_s[worker] <= latest_s]
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
    """Place a cold prompt on who served it last, else with its kin, else on the least warm; of several, by load."""
    num_tokens = query.num_prompt_tokens
    enough = max(AFFINITY_SHARE * num_tokens, 1)
    if seen := [worker for worker in workers if worker.num_seen_tokens >= enough]:
        return least_loaded(query, seen), Reason.AFFINITY
    mean = (math.fsum(worker.num_warm_tokens for worker in workers) + num_tokens) / len(workers)
    most = max(AKIN_WARMTH * mean, num_tokens)
    if akin := [worker for worker in workers if worker.served_akin and worker.num_warm_tokens <= most]:
        return least_loaded(query, akin), Reason.AKIN
    least = min(worker.num_warm_tokens for worker in workers)
    return least_loaded(query, [worker for worker in workers if worker.num_warm_tokens == least]), Reason.COLD


STATE_AWARE: Final = Tolerance(min_share=0.2)


@dataclass(frozen=True, slots=True)
class LeastPrice:
    """The worker of the least price, with a preference for the one that has most KV; see the module."""

    latency: LatencyModel
    num_cached_tokens: Callable[[Candidate], int] = lambda worker: worker.num_hit_tokens
    """Tokens of the prompt that a worker is believed not to compute."""
    tolerance: Tolerance = STATE_AWARE
    asks_for_states: bool = True
    """Whether it asks for states."""

    def choose(self, query: Query, workers: Sequence[Candidate]) -> Decision:
        """Place a cold prompt; else choose who has most of it among those near the least price."""
        whole_s = expected_ttft_s(self.latency, query, _IDLE, 0)
        offers = self._offers(query, workers)
        most = max(worker.num_kv_tokens for worker in workers)
        has_room = not any(worker.turnover for worker in workers)
        is_wanted = query.num_known_tokens > 0
        if most == 0 or most < self.tolerance.min_share * query.num_prompt_tokens:
            latest_s = self.tolerance.latest_s(min(offer.ttft_s for offer in offers), whole_s, has_room=has_room)
            worker, reason = by_memory(query, [offer.worker for offer in offers if offer.ttft_s <= latest_s])
        else:
            soonest_s = min(offer.price_s for offer in offers)
            latest_s = self.tolerance.latest_s(soonest_s, whole_s, has_room=has_room and is_wanted)
            in_time = [offer.worker for offer in offers if offer.price_s <= latest_s]
            longest = max(worker.num_kv_tokens for worker in in_time)
            worker = least_loaded(query, [worker for worker in in_time if worker.num_kv_tokens == longest])
            has_most = longest == most or self.num_cached_tokens(worker) == max(map(self.num_cached_tokens, workers))
            reason = Reason.HIT if has_most else Reason.OVERFLOW
        ttft_s = next(offer.ttft_s for offer in offers if offer.worker is worker)
        known_here = max(worker.num_kv_tokens, worker.num_seen_tokens)
        asks = self.asks_for_states and query.num_known_tokens >= known_here + LEAST_SHARED_TOKENS
        return Decision(worker, reason, ttft_s, query.num_known_tokens if asks else 0)

    def _offers(self, query: Query, workers: Sequence[Candidate]) -> list["_Offer"]:
        cached = [self.num_cached_tokens(worker) for worker in workers]
        known = {0, *cached, *(worker.num_kv_tokens for worker in workers)}
        prefill_s = {num_tokens: expected_ttft_s(self.latency, query, _IDLE, num_tokens) for num_tokens in known}
        queue = min(worker.work_ahead_s for worker in workers) / prefill_s[0] if prefill_s[0] else 0.0
        offers = []
        for worker, num_tokens in zip(workers, cached, strict=True):
            computed_s = worker.pace * prefill_s[num_tokens]
            if worker.num_stored_tokens > num_tokens:
                computed_s = reads(self.latency, query.num_prompt_tokens, worker, num_tokens) or computed_s
            displaced_s = worker.pace * prefill_s[worker.num_kv_tokens] * worker.turnover
            price_s = worker.work_ahead_s + (1 + queue) * (computed_s + displaced_s)
            offers.append(_Offer(worker, worker.work_ahead_s + computed_s, price_s))
        return offers


class _Offer(NamedTuple):
    """A worker, when its first token is expected, and its price."""

    worker: Candidate
    ttft_s: float
    price_s: float


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
