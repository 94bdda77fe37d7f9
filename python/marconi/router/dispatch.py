"""One decision: what each worker has of a prompt, what is ahead of it there, and the rule that weighs both.

    ids --prompt_of--> Prompt: hashes of its blocks, as in the workers' events
    Prompt --Fleet.hits, Load.work_ahead_s, Affinity--> candidates --Routing.choose--> Ticket
    Ticket:  dispatched -> answered (its first token) -> ended (finished, or its client has disconnected)
                        -> refused (its worker would not or could not serve it)

    work ahead of the next request on a worker  =  the prefills that it was given and has not answered, by this router
                                                   or by others, or the time until there is room to run, if that is
                                                   longer (`Load`)

From its dispatch on the worker is expected to hold the prompt (`Fleet.expect`), so the next request with the same
beginning finds it there long before the worker's events say so. A ticket that ends unanswered leaves that expectation
to expire; one that is refused takes it back, and everything else that was counted for its worker. The same object
routes a live fleet and a simulated one; time is passed in. One thread.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Final

import numpy as np

from marconi.events.hashes import ID_BYTES, HashSpace
from marconi.model.latency import LatencyModel
from marconi.router.affinity import Affinity, Seen, Served
from marconi.router.index import NO_HIT, Chain, Hit
from marconi.router.load_report import Others
from marconi.router.pace import Paces
from marconi.router.routing import Candidate, Decision, Query, Routing, reads
from marconi.router.sync import Fleet

KEY_TOKENS: Final = 1024
"""Tokens of a prompt's beginning that its key is a hash of: enough to tell two system prompts apart, few enough for
turns of one conversation to agree."""
SLACK: Final = 1.5
GRACE_S: Final = 0.25
"""How much later than expected an answer may come and still have waited for nothing but prefills."""
HELD_S: Final = 1.0
"""How long a request is taken to be held until one has ended."""
_NUM_LATEST: Final = 20
"""Ends over which the time that a request is held is a mean."""
_USUAL_ENDS: Final = 5
"""Ends of a worker's own that weigh as much as the fleet's mean."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's prompt as its router knows it; `ValueError` for one without tokens."""

    chain: Chain
    num_tokens: int
    key: bytes
    """Equal for requests that are likely to share a prefix: a hash of its beginning, or of its client's session."""
    group: bytes | None = None
    """Equal for requests that their client calls akin, if it does: a hash of their `prompt_cache_key`."""

    def __post_init__(self) -> None:
        if self.num_tokens < 1:
            raise ValueError("a prompt must have 1 token or more, got 0 tokens")


def key_of(beginning: bytes) -> bytes:
    """The key of prompts that begin so, or of a session or a group so named."""
    return blake2b(beginning, digest_size=16).digest()


def prompt_of(ids: Sequence[int], space: HashSpace, block_tokens: int, key: bytes | None = None) -> Prompt:
    """Hash token ids, each 0 or more, into a prompt; without a `key` it is that of the prompt's beginning.

        ids        |---- block ----|---- block ----|--- rest --- last id
        hashes                     1               2             .        of whole blocks before the last id
        tail(d)                                        of the part of a block that ends at depth d

    `ValueError` for no ids, a negative one, or one beyond 63 bits.
    """
    try:
        packed = np.asarray(ids, dtype="<i8")
    except OverflowError:
        raise ValueError("a token id must be below 2^63, got one beyond 63 bits") from None
    if len(packed) and int(packed.min()) < 0:
        raise ValueError(f"a token id must be 0 or more, got {int(packed.min())}")
    text = packed.tobytes()
    num_blocks = max(len(packed) - 1, 0) // block_tokens
    digests = space.digests(space.start, text[: num_blocks * block_tokens * ID_BYTES], block_tokens)

    def tail(depth: int) -> int | None:
        start = depth // block_tokens * block_tokens
        if not start < depth < len(packed) or start > num_blocks * block_tokens:
            return None
        before = digests[start // block_tokens - 1] if start else space.start
        (digest,) = space.digests(before, text[start * ID_BYTES : depth * ID_BYTES], block_tokens)
        return space.hash(digest)

    chain = Chain(space.namespace, tuple(space.hash(digest) for digest in digests), tail)
    if key is None:
        key = key_of(space.namespace + text[: KEY_TOKENS * ID_BYTES])
    return Prompt(chain, len(packed), key)


@dataclass(frozen=True, slots=True, eq=False)
class Ticket:
    """A request on a worker, from its dispatch to its end."""

    decision: Decision
    prompt: Prompt
    prefill_s: float
    """Time of the prompt's prefill on that worker, without waiting, by the model's times."""
    dispatched_s: float
    is_next: bool
    """Whether no prefill was ahead of it."""

    @property
    def worker(self) -> str:
        """The name of the worker that has it."""
        return self.decision.worker.name

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt that its worker need not compute; the last is always computed."""
        return min(self.decision.worker.num_hit_tokens, self.prompt.num_tokens - 1)

    @property
    def num_new_tokens(self) -> int:
        """Tokens of the prompt that its worker computes."""
        return self.prompt.num_tokens - self.num_cached_tokens


class Held:
    """Mean seconds from the first token of a request to its end.

        mean = time that all of them have run / number of ends

    Those that still run count with the time so far: the first to end are the shortest, so the mean over ends alone is
    far too short while a fleet fills. Of the past a twentieth of both is forgotten at each end.
    """

    __slots__ = ("_ended", "_num_running", "_run_s", "_since_s", "_usual")

    def __init__(self, usual: "Held | None" = None) -> None:
        """Begin with `usual`, the mean of all workers; without it, with `HELD_S`."""
        self._usual = usual
        self._num_running = 0
        self._run_s, self._ended = (HELD_S, 1.0) if usual is None else (0.0, 0.0)
        self._since_s = 0.0
        """The time until which that is counted."""

    def mean_s(self, now_s: float) -> float:
        """The mean; `HELD_S` before anything has run."""
        run_s, ended = self._run_s_until(now_s), self._ended
        if self._usual is not None:
            run_s, ended = run_s + _USUAL_ENDS * self._usual.mean_s(now_s), ended + _USUAL_ENDS
        return run_s / ended

    def begin(self, now_s: float) -> None:
        """Add a request that has its first token."""
        self._run_s, self._since_s = self._run_s_until(now_s), now_s
        self._num_running += 1
        if self._usual is not None:
            self._usual.begin(now_s)

    def end(self, began_s: float, now_s: float, *, is_served: bool) -> None:
        """Remove one that has ended, or was not served to its end and says nothing of how long one is held."""
        self._run_s, self._since_s = self._run_s_until(now_s), now_s
        self._num_running -= 1
        if is_served:
            kept = 1 - 1 / _NUM_LATEST
            self._run_s, self._ended = kept * self._run_s, kept * self._ended + 1
        else:
            self._run_s = max(self._run_s - (now_s - began_s), 0.0)
        if self._usual is not None:
            self._usual.end(began_s, now_s, is_served=is_served)

    def _run_s_until(self, now_s: float) -> float:
        return self._run_s + self._num_running * (now_s - self._since_s)


@dataclass(slots=True)
class Usual:
    """The numbers that some workers have shown stand for those that have not: all serve one model to one traffic."""

    held: Held = field(default_factory=Held)
    max_running: float = math.inf
    """The limit that any of them reported last."""


@dataclass(slots=True, eq=False)
class Load:
    """The unfinished work of one worker, and what a request that is dispatched now waits for.

        wait = max(prefills ahead, until running + 1 - limit have ended)

    *Prefills ahead.* A worker prefills in the order of arrival, so the first request has run since it was dispatched,
    or since the one before it was answered; it is never counted as more than done.

    *Limit.* A worker runs so many requests at once, by its flags or by its memory, and the next waits until one ends.
    One ends every `held / limit` seconds, where `held` is the mean time from first token to end, and those that were
    answered at about the same time end together, no sooner than `held` after it. Both are measured, not configured; a
    worker's own `held` begins as the fleet's (`Held`): a router would otherwise fill each worker that it comes to far
    beyond its limit. A request that is answered later than the prefills ahead of it explain
    has waited for room, so what runs then is the limit; more requests than that, answered in time, raise it. Only
    answers whose first token was seen count. While prefills take longer than the model's times say, every answer seems
    late, and requests spread evenly.

    *What the worker says.* As long as it reports its load, requests and prefills of other clients count with this
    router's own (`load_report.Others`), its own limit bounds the learned one, and where a request would not fit the
    memory that is free or evictable, as many requests as run are the limit. Beside requests of others nothing is
    learned. The limit that it reported, or another worker did where it never has, still counts once the rest of the
    report is stale.
    """

    usual: Usual = field(default_factory=Usual)
    """The fleet's, which its loads share."""
    num_running: int = 0
    limit: float = math.inf
    """Requests that run at once before others wait."""
    held: Held = field(init=False)
    others: Others = field(default_factory=Others)
    _work_s: float = 0.0
    _since_s: float = 0.0
    """When the first of those whose prefill is ahead became the first."""
    _due_s: dict[Ticket, float] = field(default_factory=dict)
    """Tickets whose prefill is ahead, in order of dispatch, and when each is answered at the latest, unless it waits
    for room."""
    _decoding: dict[Ticket, float | None] = field(default_factory=dict)
    """When each of the others was answered; None if nobody saw it."""

    def __post_init__(self) -> None:
        self.held = Held(self.usual.held)

    def wait_s(self, now_s: float, num_new_tokens: int = 1) -> float:
        """Seconds until a request that is dispatched now, with `num_new_tokens` to compute, begins."""
        reported = self.others.load(now_s)
        num_running: float
        limit: float
        if reported is None:
            told_limit = self.others.max_running or self.usual.max_running
            num_running, limit = self.num_running, min(self._learned_limit(now_s), told_limit)
        else:
            num_running, limit = self.num_all(now_s), reported.max_running
            if num_running == self.num_running:
                limit = min(limit, self._learned_limit(now_s))
            if not self.others.has_room(num_new_tokens, now_s):
                limit = min(limit, max(num_running, 1))
        num_over = num_running + 1 - limit
        return max(self._prefills_ahead_s(now_s), self._until_end_s(now_s, num_over, limit) if num_over > 0 else 0.0)

    def _until_end_s(self, now_s: float, num_ends: float, limit: float) -> float:
        """Seconds until `num_ends` of the requests that run have ended."""
        held_s = self.held.mean_s(now_s)
        in_turn_s, place = num_ends * held_s / limit, math.ceil(num_ends) - 1
        if self.others.num_requests(now_s):
            return in_turn_s
        if place >= len(self._decoding):
            return max(in_turn_s, held_s)
        answered_s = next(islice(self._decoding.values(), place, None))
        return in_turn_s if answered_s is None else max(in_turn_s, held_s - (now_s - answered_s))

    def num_all(self, now_s: float) -> float:
        """Requests of this router and of others that have not ended."""
        return self.num_running + self.others.num_requests(now_s)

    def _learned_limit(self, now_s: float) -> float:
        if self._due_s and self._decoding and now_s > next(iter(self._due_s.values())):
            return min(self.limit, len(self._decoding))
        return self.limit

    def _prefills_ahead_s(self, now_s: float) -> float:
        if not self._due_s:
            return self.others.prefill_s(now_s, 0.0)
        first = next(iter(self._due_s))
        done_s = min(max(now_s - self._since_s, 0.0), first.prefill_s)
        return max(self._work_s - done_s, 0.0) + self.others.prefill_s(now_s, done_s)

    def has_prefills(self, now_s: float) -> bool:
        """True if there is a prefill ahead of the next request."""
        return bool(self._due_s) or self.others.prefill_s(now_s, 0.0) > 0

    def begin(self, ticket: Ticket, now_s: float) -> None:
        """Add a request."""
        if not self._due_s:
            self._since_s = now_s
        # What nothing runs beside has waited for nothing, however late its answer is.
        due_s = now_s + SLACK * (self._prefills_ahead_s(now_s) + ticket.prefill_s) + GRACE_S
        self._due_s[ticket] = due_s if self.num_running else math.inf
        self._work_s += ticket.prefill_s
        self.num_running += 1
        self.others.note(now_s, 1, ticket.num_new_tokens)

    def answer(self, ticket: Ticket, now_s: float, *, is_seen: bool = True) -> None:
        """Note the first token of a request, which was seen or should have come by now; a second time does nothing."""
        if ticket not in self._due_s:
            return
        self._decoding[ticket] = now_s if is_seen else None
        if is_seen:
            self.held.begin(now_s)
        num_decoding = len(self._decoding)
        if is_seen and (now_s > self._due_s[ticket] or num_decoding > self.limit):
            self.limit = num_decoding
        self._remove(ticket, now_s)
        self.others.note(now_s, 0, -ticket.num_new_tokens)

    def end(self, ticket: Ticket, now_s: float, *, is_served: bool = True) -> None:
        """Remove a request, answered or not."""
        num_new_tokens = 0
        if ticket in self._due_s:
            self._remove(ticket, now_s)
            num_new_tokens = ticket.num_new_tokens
        elif (answered_s := self._decoding.pop(ticket)) is not None:
            self.held.end(answered_s, now_s, is_served=is_served)
        self.num_running -= 1
        self.others.note(now_s, -1, -num_new_tokens)

    def _remove(self, ticket: Ticket, now_s: float) -> None:
        """Take a request out of those whose prefill is ahead."""
        if ticket is next(iter(self._due_s)):
            self._since_s = now_s
        del self._due_s[ticket]
        # Sums of floats drift: nothing left is exactly nothing.
        self._work_s = self._work_s - ticket.prefill_s if self._due_s else 0.0

    def check_invariants(self) -> None:
        """Raise `AssertionError` where counts disagree."""
        assert self.num_running == len(self._due_s) + len(self._decoding)
        total_s = sum(ticket.prefill_s for ticket in self._due_s)
        assert abs(total_s - self._work_s) <= 1e-6 * max(total_s, 1.0), (total_s, self._work_s)
        self.others.check_invariants(self.num_running, sum(ticket.num_new_tokens for ticket in self._due_s))


@dataclass(frozen=True, slots=True)
class _InFlight:
    """Where a request in flight is counted, to be taken back when it ends; replacing a fleet drops its counts."""

    load: Load
    """A worker that was removed and came back has another."""
    affinity: Affinity
    served: Served
    fleet: Fleet
    is_expected: bool
    """Whether its state is expected because of this ticket alone."""


class Dispatcher:
    """Chooses a worker for each request, and keeps count of what each has to do; see the module."""

    def __init__(self, fleet: Fleet, routing: Routing, latency: LatencyModel) -> None:
        self.fleet = fleet
        self.routing = routing
        self.latency = latency
        self.affinity = Affinity(fleet.index.block_tokens)
        self.paces = Paces()
        self._usual = Usual()
        self._loads: dict[str, Load] = {}
        self._in_flight: dict[Ticket, _InFlight] = {}
        """By ticket that has not ended."""

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of all workers, in the order in which they were added."""
        return tuple(self._loads)

    def add_worker(self, name: str) -> None:
        """Add a worker that has nothing to do; `ValueError` if it is known."""
        self.fleet.add_worker(name)
        self.affinity.add_worker(name)
        self.paces.add_worker(name)
        self._loads[name] = Load(self._usual)

    def remove_worker(self, name: str) -> None:
        """Forget a worker and what it holds; tickets on it may still end. `KeyError` if it is not known."""
        self.fleet.remove_worker(name)
        self.affinity.remove_worker(name)
        self.paces.remove_worker(name)
        del self._loads[name]

    def use_fleet(self, fleet: Fleet) -> None:
        """Replace the fleet, whose index knows no worker yet, and add all workers to it; loads and paces stay."""
        self.affinity = Affinity(fleet.index.block_tokens)
        for name in self._loads:
            fleet.add_worker(name)
            self.affinity.add_worker(name)
        self.fleet = fleet

    def num_running(self, name: str) -> int:
        """Requests that a worker was given here and that have not ended."""
        return self._loads[name].num_running

    def load(self, name: str, now_s: float) -> Load:
        """The unfinished work of a worker, by what it last reported of others' and what it was given here."""
        load = self._loads[name]
        report = self.fleet.sync(name).load_report
        if load.others.is_news(report):
            load.others.update(report, self.latency.seconds, self.paces.of(name, now_s))
            self._usual.max_running = report.load.max_running
        return load

    def work_ahead_s(self, name: str, now_s: float) -> float:
        """Seconds until a request that is dispatched to a worker now begins."""
        return self.load(name, now_s).wait_s(now_s)

    def dispatch(self, prompt: Prompt, now_s: float, among: Collection[str] | None = None) -> Ticket:
        """Give a request to a worker, of those `among` if given; `ValueError` where there is none."""
        names = [name for name in self._loads if among is None or name in among]
        if not names:
            raise ValueError(f"a request must have a worker that can take it, got none of {len(self._loads)}")
        hits, seen = self.fleet.hits(prompt.chain, now_s), self.affinity.seen(prompt.chain)
        num_known_tokens = max([0 if seen is None else seen.num_tokens, *(hit.num_kv_tokens for hit in hits.values())])
        if seen is not None and seen.num_prompt_tokens <= num_known_tokens:
            # It continues that request, as a conversation's next turn does, and diverges from nobody.
            num_known_tokens = 0
        stored = self._stored(prompt.chain, names, now_s)
        akin = self.affinity.served_akin(prompt.chain, prompt.group)
        candidates = [
            self._candidate(name, prompt, hits.get(name, NO_HIT), seen, stored, now_s, served_akin=name == akin)
            for name in names
        ]
        decision = self.routing.choose(Query(prompt.num_tokens, prompt.key, num_known_tokens), candidates)
        name = decision.worker.name
        cached = min(decision.worker.num_hit_tokens, prompt.num_tokens - 1)
        load, last = self._loads[name], len(prompt.chain.hashes) - 1
        prefill_s = reads(self.latency, prompt.num_tokens, decision.worker, cached)
        if prefill_s is None:
            prefill_s = decision.worker.pace * self.latency.seconds(cached, prompt.num_tokens)
        ticket = Ticket(decision, prompt, prefill_s, now_s, not load.has_prefills(now_s))
        load.begin(ticket, now_s)
        served = self.affinity.serve(name, prompt.chain, now_s, prompt.group)
        # What the index itself knows needs no guess; one that is there already is renewed.
        is_held = decision.worker.num_hit_tokens >= (last + 1) * self.fleet.index.block_tokens
        is_guessed = last >= 0 and self.fleet.guesses.has(name, prompt.chain, last)
        is_expected = (not is_held or is_guessed) and self.fleet.expect(name, prompt.chain, last, now_s)
        self._in_flight[ticket] = _InFlight(load, self.affinity, served, self.fleet, is_expected)
        return ticket

    def answered(self, ticket: Ticket, now_s: float, *, is_seen: bool = True) -> None:
        """Note the first token of a request, which was seen or should have come by now; a second time does nothing."""
        request = self._in_flight.get(ticket)
        if request is not None:
            request.load.answer(ticket, now_s, is_seen=is_seen)

    def ended(self, ticket: Ticket, now_s: float) -> None:
        """End a request that finished, or whose client disconnected; after `refused`, or a second time, do nothing."""
        request = self._in_flight.pop(ticket, None)
        if request is not None:
            request.load.end(ticket, now_s)

    def refused(self, ticket: Ticket, now_s: float) -> None:
        """Take a request back that its worker has not served and never will."""
        request = self._in_flight.pop(ticket, None)
        if request is None:
            return
        request.load.end(ticket, now_s, is_served=False)
        request.affinity.take_back(request.served, now_s)
        if request.is_expected:
            chain = ticket.prompt.chain
            request.fleet.guesses.take_back(ticket.worker, chain, len(chain.hashes) - 1)

    def check_invariants(self) -> None:
        """Raise `AssertionError` where counts disagree."""
        loads = [request.load for request in self._in_flight.values()]
        for load in {*self._loads.values(), *loads}:
            load.check_invariants()
            assert load.num_running == sum(each is load for each in loads)

    def _stored(self, chain: Chain, names: Iterable[str], now_s: float) -> dict[int, int]:
        """Tokens of a chain up to the deepest state in each store behind the workers."""
        stores = {reach.store for name in names if (reach := self.load(name, now_s).others.store) is not None}
        return {store: self.fleet.num_stored_tokens(chain, store) for store in stores}

    def _candidate(
        self,
        name: str,
        prompt: Prompt,
        hit: Hit,
        seen: Seen | None,
        stored: Mapping[int, int],
        now_s: float,
        *,
        served_akin: bool,
    ) -> Candidate:
        load = self.load(name, now_s)
        reach = load.others.store
        num_stored_tokens = 0 if reach is None else stored[reach.store]
        num_new_tokens = prompt.num_tokens - min(hit.num_tokens, prompt.num_tokens - 1)
        return Candidate(
            name,
            hit.num_tokens,
            hit.num_kv_tokens,
            load.wait_s(now_s, num_new_tokens),
            load.num_all(now_s),
            seen.num_tokens if seen is not None and seen.worker == name else 0,
            self.affinity.warm_tokens(name, now_s),
            self.fleet.sync(name).turnover.share,
            self.paces.of(name, now_s),
            num_stored_tokens,
            0.0 if reach is None else reach.read_s(max(num_stored_tokens - hit.num_kv_tokens, 0)),
            served_akin,
        )
