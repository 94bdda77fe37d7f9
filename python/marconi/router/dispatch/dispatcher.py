"""One decision: what each worker has of a prompt, what is ahead of it there, and the rule that weighs both.

    prompt --Fleet.hits--> what each has --Load.work_ahead_s, Affinity--> workers --Routing.choose--> a ticket
    ticket:  dispatched -> answered (its first token) -> ended (finished, or its client has gone)
                        -> refused (its worker would not or could not serve it)

From its dispatch on the worker is expected to hold the prompt (`Fleet.expect`), so the next request with the same
beginning finds it there long before the worker can say so. A ticket that ends unanswered leaves that expectation to
expire; one that is refused takes it back, and whatever else was put down to its worker. The same object routes a fleet
and a simulation of one; time is passed in. One thread.
"""

from collections.abc import Collection
from dataclasses import dataclass

from marconi.model.latency import LatencyModel
from marconi.router.dispatch.affinity import Affinity, Served
from marconi.router.dispatch.base import Prompt, Ticket
from marconi.router.dispatch.loads import Load
from marconi.router.index.base import NO_HIT, Hit
from marconi.router.routing.base import Query, Routing, Worker
from marconi.router.sync import Fleet


@dataclass(frozen=True, slots=True)
class _Given:
    """The entries made for a ticket, to be taken back with it."""

    load: Load
    """A worker that was removed and came back begins another."""
    affinity: Affinity
    served: Served
    fleet: Fleet
    is_expected: bool
    """Whether its state is expected on its account alone."""


class Dispatcher:
    """Names a worker for each request, and keeps count of what each has; see the module."""

    def __init__(self, fleet: Fleet, routing: Routing, latency: LatencyModel) -> None:
        self.fleet = fleet
        self.routing = routing
        self.latency = latency
        self.affinity = Affinity(fleet.index.block_tokens)
        self._loads: dict[str, Load] = {}
        self._of: dict[Ticket, _Given] = {}
        """The entries of tickets that have not ended."""

    @property
    def workers(self) -> tuple[str, ...]:
        """All that were added, in order."""
        return tuple(self._loads)

    def add_worker(self, name: str) -> None:
        """A worker that has nothing to do; `ValueError` if it is known."""
        self.fleet.add_worker(name)
        self.affinity.add_worker(name)
        self._loads[name] = Load()

    def remove_worker(self, name: str) -> None:
        """Forget a worker and what it holds; tickets on it may still end. `KeyError` if it is not known."""
        self.fleet.remove_worker(name)
        self.affinity.remove_worker(name)
        del self._loads[name]

    def follow(self, fleet: Fleet) -> None:
        """Know workers by another fleet's index from now on, to which all are added; what they do goes on."""
        self.affinity = Affinity(fleet.index.block_tokens)
        for name in self._loads:
            fleet.add_worker(name)
            self.affinity.add_worker(name)
        self.fleet = fleet

    def num_running(self, name: str) -> int:
        """Tickets of a worker that have not ended."""
        return self._loads[name].num_running

    def work_ahead_s(self, name: str, now_s: float) -> float:
        """Seconds until a request that is dispatched to a worker now is begun."""
        return self._loads[name].work_ahead_s(now_s)

    def dispatch(self, prompt: Prompt, now_s: float, among: Collection[str] | None = None) -> Ticket:
        """Give a request to a worker, of those `among` if given; `ValueError` where there is none."""
        query = Query(prompt.num_tokens, prompt.key)
        decision = self.routing.choose(query, self._candidates(prompt, now_s, among))
        name = decision.worker.name
        cached = min(decision.worker.num_hit_tokens, prompt.num_tokens - 1)
        ticket = Ticket(decision, prompt, self.latency.seconds(cached, prompt.num_tokens), now_s)
        load, last = self._loads[name], len(prompt.chain.hashes) - 1
        load.begin(ticket, now_s)
        served = self.affinity.serve(name, prompt.chain, now_s)
        is_expected = last >= 0 and self.fleet.expect(name, prompt.chain, last, now_s)
        self._of[ticket] = _Given(load, self.affinity, served, self.fleet, is_expected)
        return ticket

    def answered(self, ticket: Ticket, now_s: float) -> None:
        """Note the first token of a request; a second time does nothing."""
        given = self._of.get(ticket)
        if given is not None:
            given.load.answer(ticket, now_s)

    def ended(self, ticket: Ticket, now_s: float) -> None:
        """End a request that has finished, or whose client has gone; after `refused`, or a second time, do nothing."""
        given = self._of.pop(ticket, None)
        if given is not None:
            given.load.end(ticket, now_s)

    def refused(self, ticket: Ticket, now_s: float) -> None:
        """Take a request back that its worker has not served and never will."""
        given = self._of.get(ticket)
        if given is None:
            return
        self.ended(ticket, now_s)
        given.affinity.take_back(given.served, now_s)
        if given.is_expected:
            chain = ticket.prompt.chain
            given.fleet.guesses.take_back(ticket.worker, chain, len(chain.hashes) - 1)

    def check_invariants(self) -> None:
        """Raise `AssertionError` where counts disagree."""
        loads = [given.load for given in self._of.values()]
        for load in {*self._loads.values(), *loads}:
            load.check_invariants()
            assert load.num_running == sum(each is load for each in loads)

    def _candidates(self, prompt: Prompt, now_s: float, among: Collection[str] | None) -> list[Worker]:
        names = [name for name in self._loads if among is None or name in among]
        if not names:
            raise ValueError(f"none of {len(self._loads)} workers can take it")
        hits = self.fleet.hits(prompt.chain, now_s)
        seen = self.affinity.seen(prompt.chain)
        return [self._worker(name, hits.get(name, NO_HIT), seen, now_s) for name in names]

    def _worker(self, name: str, hit: Hit, seen: tuple[str, int] | None, now_s: float) -> Worker:
        load = self._loads[name]
        return Worker(
            name,
            hit.num_tokens,
            hit.num_kv_tokens,
            load.work_ahead_s(now_s),
            load.num_running,
            seen[1] if seen is not None and seen[0] == name else 0,
            self.affinity.warm_tokens(name, now_s),
        )
