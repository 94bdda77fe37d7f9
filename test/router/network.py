"""A network that loses, repeats, holds up and cuts off, and a fleet of made-up workers behind it."""

from dataclasses import dataclass, field
from random import Random

from marconi.events.base import Batch, ReplayEnd, Snapshot
from marconi.router.index import FleetIndex
from marconi.router.sync import Fleet, SnapshotRequest, SyncLimits

from .worlds import BLOCK_TOKENS, Prompts, Worker


@dataclass
class Network:
    """One random schedule of faults, a step at a time."""

    rng: Random
    fleet: Fleet = field(init=False)
    workers: list[Worker] = field(init=False)
    prompts: Prompts = field(init=False)
    under_way: list[Batch | Snapshot | ReplayEnd] = field(default_factory=list)
    sent: dict[str, list[Batch]] = field(default_factory=dict)
    """What each worker can send again, of its present life."""
    cut_off: set[str] = field(default_factory=set)
    now_s: float = 0.0
    does_work: bool = True

    def __post_init__(self) -> None:
        self.prompts = Prompts(self.rng, 6, runs=(1, 2, 3, 130))
        self.workers = [Worker(f"w{number}") for number in range(self.rng.choice((1, 2, 3)))]
        self.start_router()

    def start_router(self, limits: SyncLimits | None = None) -> None:
        if limits is None:
            limits = SyncLimits(max_waiting_batches=self.rng.choice((1, 3, 100)), max_replayed_batches=5)
        self.fleet = Fleet(FleetIndex(BLOCK_TOKENS), limits)
        for worker in self.workers:
            self.fleet.add_worker(worker.name)

    def send(self, worker: Worker, message: Batch | Snapshot | ReplayEnd) -> None:
        """Perhaps never, perhaps twice, at whatever time."""
        lost = worker.name in self.cut_off or self.rng.random() < 0.15
        self.under_way += [message] * (0 if lost else self.rng.choice((1, 1, 1, 2)))

    def step(self) -> None:
        """Something happens."""
        rng, worker = self.rng, self.rng.choice(self.workers)
        self.now_s += rng.random()
        roll = rng.random()
        if roll < 0.4:
            batch = worker.batch(worker.change(rng, self.prompts))
            self.sent.setdefault(worker.name, []).append(batch)
            self.send(worker, batch)
        elif roll < 0.5:
            self.send(worker, worker.snapshot(rng))
        elif roll < 0.53:
            worker.restart()
            self.sent[worker.name] = []
        elif roll < 0.55:
            self.start_router()
        elif roll < 0.6:
            self.cut_off ^= {worker.name}
        elif roll < 0.65:
            chain = self.prompts.chain(rng.randrange(len(self.prompts.paths)))
            if chain.hashes:
                self.fleet.expect(worker.name, chain, rng.randrange(len(chain.hashes)), self.now_s)
        elif roll < 0.75:
            self.answer_requests()
        else:
            self.deliver(rng.randint(1, 4))
        if rng.random() < 0.5:
            self.fleet.work(rng.choice((1, 20, 1000)))

    def answer_requests(self, *, snapshots: bool = True) -> list[SnapshotRequest]:
        """What is requested is sent, over the same network."""
        requests = self.fleet.requests(self.now_s)
        for name, first_batch in requests:
            worker = next(worker for worker in self.workers if worker.name == name)
            if first_batch is not None:
                for batch in self.sent.get(name, []):
                    if first_batch <= batch.sequence:
                        self.send(worker, batch)
                self.send(worker, ReplayEnd(name))
            elif snapshots:
                self.send(worker, worker.snapshot(self.rng))
        return requests

    def deliver(self, num: int) -> None:
        """In any order."""
        for _ in range(min(num, len(self.under_way))):
            self.fleet.receive(self.under_way.pop(self.rng.randrange(len(self.under_way))), self.now_s)

    def heal(self) -> None:
        """One snapshot of every worker arrives, and whatever was under way: before, after or around it."""
        self.under_way += [worker.snapshot(self.rng) for worker in self.workers]
        while self.under_way:
            self.deliver(1)
            if self.rng.random() < 0.5:
                self.fleet.work(self.rng.choice((1, 20)))
        self.fleet.settle()
