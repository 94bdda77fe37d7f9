"""A random schedule of what goes wrong with workers, their events and clients, and what must hold all the same.

    requests   of conversations that grow, of one system prompt; streamed or whole; some clients leave
    workers    are killed and restarted, refuse, hang, break before or within an answer, are slow, evict; one of them
               fails at nothing, so each request has somewhere to be answered
    events     batches are lost, repeated and held back

What must hold: an answer is whole and right; or it is a stream that had begun and says that it broke; or two workers
went while they had the request, and it says that. No request goes to a third one then. Afterwards, with all workers
alive, the index is what they hold, every conversation's next turn hits what was promised, and nothing is counted as
running.
"""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from marconi.events.hashes import HashSpace
from marconi.router.dispatch import prompt_of

from .house import Answer, House, knows, right, routed, until
from .stand_in import BLOCK_TOKENS, MODEL, Fault, StandIn, living

FAULTS = (Fault.REFUSES, Fault.HANGS, Fault.BREAKS, Fault.BREAKS_LATER, Fault.SLOW)
SYSTEM = "the same words before every conversation of this schedule. "
SNAPSHOT_PERIOD_S = 0.5


@dataclass
class Schedule:
    """One of them, by its seed."""

    seed: int
    num_requests: int = 40
    num_troubles: int = 12
    outcomes: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = Random(self.seed)  # noqa: S311 - a schedule
        self.workers = [StandIn(f"w{number}") for number in range(self.rng.randint(2, 4))]
        self.conversations = [f"{SYSTEM}{number}: " for number in range(self.rng.randint(1, 6))]

    async def run(self) -> None:
        """`AssertionError` where something does not hold that must."""
        settings = {
            # On a machine that is busy elsewhere even the worker that fails at nothing is late at times.
            "max_attempts": len(self.workers) + 2,
            "first_byte_timeout_s": 15.0,
            "snapshot_period_s": SNAPSHOT_PERIOD_S,
        }
        async with living(*self.workers), routed(*self.workers, **settings) as home:
            await home.until_up(len(self.workers))
            await asyncio.gather(self._ask_all(home), self._trouble())
            self._require_that_none_met_a_third_death()
            await self._mend(home)
            await self._require_what_was_promised(home)

    async def _ask_all(self, home: House) -> None:
        asking = []
        for _ in range(self.num_requests):
            await asyncio.sleep(self.rng.random() * 0.03)
            which = self.rng.randrange(len(self.conversations))
            text = self.conversations[which] = self.conversations[which] + f"{self.rng.random():.10f} "
            asking.append(asyncio.create_task(self._ask(home, text, self.rng.random())))
        await asyncio.gather(*asking)

    async def _ask(self, home: House, text: str, luck: float) -> None:
        if luck < 0.1:
            asking = asyncio.create_task(home.ask(text, stream=luck < 0.05))
            await asyncio.sleep(luck)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
            self.outcomes["gone"] += 1
        else:
            stream = luck < 0.6
            self.outcomes[outcome(await home.ask(text, stream=stream), text, stream)] += 1

    # What goes wrong

    async def _trouble(self) -> None:
        for _ in range(self.num_troubles):
            await asyncio.sleep(self.rng.random() * 0.1)
            worker = self.rng.choice(self.workers)
            if self.rng.random() < 0.4:
                self._trouble_events(worker)
            elif worker is self.workers[0]:
                worker.holding.forget(self.rng)
            else:
                await self._trouble_worker(worker)

    async def _trouble_worker(self, worker: StandIn) -> None:
        what = self.rng.choice(("kill", "fault", "fault", "heal", "evict"))
        if not worker.lives:
            await worker.start()
        elif what == "kill":
            await worker.kill()
        elif what == "fault":
            worker.fault = self.rng.choice(FAULTS)
            worker.is_healthy = worker.fault is not Fault.HANGS and self.rng.random() < 0.5
        elif what == "heal":
            worker.fault, worker.is_healthy = Fault.NONE, True
        else:
            worker.holding.forget(self.rng)

    def _trouble_events(self, worker: StandIn) -> None:
        if worker.publisher is not None:
            worker.publisher._pub = Unreliable(worker.publisher._pub, Random(self.rng.random()))  # noqa: S311

    # What must hold afterwards

    def _require_that_none_met_a_third_death(self) -> None:
        deaths = Counter(text for worker in self.workers for text in worker.went_with)
        assert max(deaths.values(), default=0) <= 2, self.seed

    async def _mend(self, home: House) -> None:
        for worker in self.workers:
            worker.fault, worker.is_healthy = Fault.NONE, True
            if not worker.lives:
                await worker.start()
            assert worker.publisher is not None
            if isinstance(worker.publisher._pub, Unreliable):
                worker.publisher._pub = worker.publisher._pub.socket
        await home.until_up(len(self.workers))
        loads = home.gateway.dispatcher
        await until(lambda: all(loads.num_running(worker.url) == 0 for worker in self.workers))
        loads.check_invariants()
        # Last, since a request that ends is kept.
        await home.until_told(*self.workers)

    async def _require_what_was_promised(self, home: House) -> None:
        fleet, space = home.gateway.dispatcher.fleet, HashSpace.of(MODEL, None, None)
        for worker in self.workers:
            fleet.guesses.deny(worker.url, float("inf"))
        for text in self.conversations:
            prompt = prompt_of(list((text + "and on").encode()), space, BLOCK_TOKENS)
            hits = fleet.hits(prompt.chain, 0.0)
            for worker in self.workers:
                promised = hits[worker.url].num_tokens if worker.url in hits else 0
                assert promised == worker.holding.hit(space, prompt.chain.hashes), (self.seed, worker.name)
        assert all(knows(home.gateway, worker) for worker in self.workers)


def outcome(answer: Answer, text: str, stream: bool) -> str:
    """What an answer is; `AssertionError` for one that is wrong or none."""
    if answer.status == 502 and answer.message.startswith("2 workers failed "):
        return "lost twice"
    assert answer.status == 200, (answer.status, answer.body)
    if not stream:
        assert answer.json["text"] == right(text)
        return "whole"
    *sofar, last = answer.events
    texts = [json.loads(each)["text"] for each in sofar]
    assert texts, "a stream that had not begun is another worker's to answer"
    assert all(right(text).startswith(each) for each in texts)
    if last == "[DONE]":
        assert texts[-1] == right(text)
        return "stream"
    assert json.loads(last)["error"]["code"] == 502
    return "broken"


class Unreliable:
    """A socket that loses, repeats and holds back what is sent."""

    def __init__(self, socket: Any, rng: Random) -> None:
        self.socket = socket.socket if isinstance(socket, Unreliable) else socket
        self._rng = rng
        self._held: list[Callable[[], None]] = []

    def send_multipart(self, frames: Any) -> None:
        luck = self._rng.random()
        if luck < 0.3:
            return
        if luck < 0.5:
            self._held.append(lambda: self.socket.send_multipart(frames))
            return
        self.socket.send_multipart(frames)
        if luck < 0.7:
            self.socket.send_multipart(frames)
        while self._held:
            self._held.pop()()


async def run_schedule(seed: int) -> Counter[str]:
    """Of one seed: how its requests ended."""
    schedule = Schedule(seed)
    await asyncio.wait_for(schedule.run(), 120)
    return schedule.outcomes
