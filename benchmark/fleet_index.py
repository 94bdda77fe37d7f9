"""What a router's index costs: a decision, an event, a snapshot, at the size of a fleet.

The index is filled with documents of the length of the prompt, of which every worker holds some first part with a state
every few thousand tokens, and with conversations of one worker each that go on from a few system prompts.

    decision   who of all workers has how much of a prompt (`Fleet.hits`); the prompt is a document and a new question.
               Of every fourth document no worker has a state: that is the longest walk
    dispatch   a whole decision (`Dispatcher.dispatch`, by the rule `state-aware`): hits, loads, affinity, the rule, and
               the notes of what the chosen worker now has to do and will hold. `LIVE` requests are under way
    events     a batch is written down (`Fleet.receive`): turns of conversations begin, an event a block as SGLang has
               them, and whole conversations go, an event a turn
    snapshot   a worker's entries replace what was known of it, in pieces of `--piece` entries with a decision after
               every tenth: all new (after a restart of the router), and with one in a hundred blocks changed. The
               median of workers that join and leave, one after the other, and the worst of them: the first finds no
               room and every table grows. What a decision has to wait for is the longest piece of all

Times are the thread's processor time, with the garbage collector as a router has it. No figure is printed if an answer
is not what the definition says, or the index breaks an invariant.

    python benchmark/fleet_index.py [--blocks N] [--workers N] [--prompt-tokens N] [--entries N] [--json FILE]
"""

import argparse
import gc
import math
import platform
import resource
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from marconi.events.base import Batch, Event, KvRemoved, KvStored, Snapshot, StateRemoved, StateStored
from marconi.model import DEVICES, PrefillLatency, load
from marconi.model.learned_latency import LearnedLatency
from marconi.replay.result import write
from marconi.router.dispatch import Dispatcher, Prompt, Ticket
from marconi.router.gateway.app import collect_seldom
from marconi.router.index import Chain, FleetIndex, Hit
from marconi.router.routing import routing_of
from marconi.router.sync import Fleet

RESULTS = Path(__file__).parent / "results"
SEED = 1
BLOCK_TOKENS = 16
NUM_BLOCKS, NUM_WORKERS = 1_000_000, 64
PROMPT_TOKENS = 100_000
NUM_ENTRIES, NUM_JOINING = 100_000, 5
PIECE_ENTRIES = 256

STATE_EVERY_BLOCKS = 250
SYSTEM_BLOCKS, TURN_BLOCKS, NUM_TURNS = 128, 20, 8
EVENTS_A_BATCH = 512
PROFILE = "nemotron-h-8b"
REQUEST_S, LIVE, NUM_KEYS = 0.02, 200, 50


class Differs(Exception):
    """An answer is not what the definition says."""


class Bar(NamedTuple):
    """A figure's limit."""

    name: str
    unit: str
    value: float
    is_most: bool
    """Whether it is the most that a figure may be, or the least."""


BARS = (
    Bar("decision_p99_ms", "ms", 2.0, is_most=True),
    Bar("dispatch_p99_ms", "ms", 2.0, is_most=True),
    Bar("events_per_s", "events/s", 100_000, is_most=False),
    Bar("snapshot_new_ms", "ms", 200.0, is_most=True),
    Bar("snapshot_changed_ms", "ms", 200.0, is_most=True),
)


class SyntheticFleet:
    """Made-up workers, and the fleet that knows them; hashes are random numbers, which is what hashes are."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rng = Random(SEED)  # noqa: S311 - a workload, not a secret
        self.workers = [f"worker-{number}" for number in range(args.workers)]
        self.fleet = Fleet(FleetIndex(BLOCK_TOKENS, max_blocks=2 * args.blocks + 100 * NUM_BLOCKS // 10))
        self.sequences = dict.fromkeys(self.workers, 0)
        for worker in self.workers:
            self.fleet.add_worker(worker)
        collect_seldom()
        self.prompt_blocks = args.prompt_tokens // BLOCK_TOKENS
        self.documents: list[tuple[int, ...]] = []
        self.systems = [self.hashes(SYSTEM_BLOCKS) for _ in range(8)]
        self._fill(args.blocks)

    def hashes(self, num_blocks: int) -> tuple[int, ...]:
        """New blocks."""
        return tuple(self.rng.getrandbits(64) for _ in range(num_blocks))

    def publish(self, worker: str, events: list[Event]) -> None:
        """Have a worker's next batch arrive."""
        self.fleet.receive(Batch(worker, 0, self.sequences[worker], tuple(events)), 0.0)
        self.sequences[worker] += 1

    def _fill(self, num_blocks: int) -> None:
        index = self.fleet.index
        while index.num_blocks < num_blocks // 4 or len(self.documents) < 4:
            document = self.hashes(self.prompt_blocks)
            has_states = len(self.documents) % 4 != 3
            for worker in self.workers:
                part = document[: self.rng.randint(1, len(document))]
                events: list[Event] = [KvStored(part, None, b"", BLOCK_TOKENS)]
                if has_states:
                    ends = (*range(STATE_EVERY_BLOCKS, len(part), STATE_EVERY_BLOCKS), len(part))
                    events += [StateStored(part[end - 1], end * BLOCK_TOKENS, b"") for end in ends]
                self.publish(worker, events)
            self.documents.append(document)
        while index.num_blocks < num_blocks:
            worker = self.rng.choice(self.workers)
            for turn in self.conversation():
                self.publish(worker, list(turn))

    def conversation(self) -> Iterator[tuple[Event, ...]]:
        """The events of a conversation, turn by turn."""
        system = self.rng.choice(self.systems)
        state = StateStored(system[-1], len(system) * BLOCK_TOKENS, b"")
        yield KvStored(system, None, b"", BLOCK_TOKENS), state
        last, num_blocks = system[-1], len(system)
        for _ in range(NUM_TURNS):
            new = self.hashes(TURN_BLOCKS)
            num_blocks += TURN_BLOCKS
            yield KvStored(new, last, b"", BLOCK_TOKENS), StateStored(new[-1], num_blocks * BLOCK_TOKENS, b"")
            last = new[-1]

    def prompt(self) -> Chain:
        """A document, or a part of one, and a new question."""
        document = self.rng.choice(self.documents)
        part = document[: self.rng.randint(len(document) // 2, len(document))]
        return Chain(b"", part + self.hashes(self.prompt_blocks - len(part)))


def timed(run: Callable[[], Any]) -> float:
    """Processor time in ms."""
    start = time.thread_time()
    run()
    return (time.thread_time() - start) * 1e3


def percentile(times: list[float], share: float) -> float:
    """The least that so large a share does not exceed."""
    return sorted(times)[math.ceil(share * len(times)) - 1]


def walk(index: FleetIndex, worker: str, chain: Chain) -> Hit:
    """The definition: block after block."""
    holding = index.holding(worker)
    num_blocks = hit = 0
    for number, block_hash in enumerate(chain.hashes, 1):
        if block_hash not in holding.kv:
            break
        num_blocks = number
        if block_hash in holding.states:
            hit = number
    return Hit(hit * BLOCK_TOKENS, num_blocks * BLOCK_TOKENS)


def check(synthetic: SyntheticFleet, num_chains: int) -> None:
    """Raise `Differs` where an answer is not the walk's."""
    for _ in range(num_chains):
        chain = synthetic.prompt()
        hits = synthetic.fleet.hits(chain, 0.0)
        for worker in synthetic.workers:
            if (expected := walk(synthetic.fleet.index, worker, chain)) != (found := hits.get(worker, Hit(0, 0))):
                raise Differs(f"{worker} has {found}, but by definition {expected}")


def decisions(synthetic: SyntheticFleet, num: int) -> list[float]:
    """Times in ms; the prompts are made before."""
    num_chains = min(num, 200)
    chains = [synthetic.prompt() for _ in range(num_chains)]
    return [timed(lambda at=at: synthetic.fleet.hits(chains[at % num_chains], 0.0)) for at in range(num)]


def dispatches(synthetic: SyntheticFleet, num: int) -> list[float]:
    """Times in ms of whole decisions, a request every `REQUEST_S`, each under way until `LIVE` later ones came."""
    costs = load(PROFILE)
    latency = LearnedLatency(costs.prefix_flops, PrefillLatency(costs, DEVICES["h100"]))
    dispatcher = Dispatcher(Fleet(FleetIndex(BLOCK_TOKENS)), routing_of("state-aware", latency), latency)
    for worker in synthetic.workers:
        dispatcher.add_worker(worker)
    dispatcher.fleet = synthetic.fleet
    live: deque[Ticket] = deque()
    times_ms: list[float] = []
    for number in range(num):
        now_s = REQUEST_S * number
        prompt = Prompt(synthetic.prompt(), synthetic.prompt_blocks * BLOCK_TOKENS + 1, b"%d" % (number % NUM_KEYS))
        times_ms.append(timed(lambda prompt=prompt, now_s=now_s: live.append(dispatcher.dispatch(prompt, now_s))))
        if len(live) > LIVE:
            dispatcher.answered(live[0], now_s)
            dispatcher.ended(live.popleft(), now_s)
    return times_ms


def singly(event: Event) -> Iterator[Event]:
    """The same, an event a block."""
    if not isinstance(event, KvStored):
        yield event
        return
    parent = event.parent_hash
    for block_hash in event.block_hashes:
        yield KvStored((block_hash,), parent, event.namespace, event.block_tokens)
        parent = block_hash


def events_per_s(synthetic: SyntheticFleet, num_events: int) -> tuple[float, float]:
    """Events, and entries in them, a second: conversations come, turn by turn, and the oldest go."""
    batches: list[tuple[str, list[Event]]] = []
    ended: dict[str, list[tuple[Event, ...]]] = {}
    num_made = 0
    while num_made < num_events:
        worker = synthetic.rng.choice(synthetic.workers)
        events: list[Event] = []
        while len(events) < EVENTS_A_BATCH:
            turns = list(synthetic.conversation())
            events += [event for turn in turns for each in turn for event in singly(each)]
            ended.setdefault(worker, []).append(tuple(event for turn in turns[1:] for event in turn))
            if len(ended[worker]) > 4:
                for event in reversed(ended[worker].pop(0)):
                    if isinstance(event, KvStored):
                        events.append(KvRemoved(tuple(reversed(event.block_hashes))))
                    elif isinstance(event, StateStored):
                        events.append(StateRemoved(event.block_hash))
        batches.append((worker, events))
        num_made += len(events)
    num_entries = sum(len(getattr(event, "block_hashes", (0,))) for _, events in batches for event in events)
    took_s = sum(timed(lambda at=at: synthetic.publish(*batches[at])) for at in range(len(batches))) / 1e3
    return num_made / took_s, num_entries / took_s


@dataclass(frozen=True, slots=True)
class Applied:
    """A snapshot: what it took in all, and the longest that a decision waited for a piece of it."""

    total_ms: float
    longest_ms: float
    decision_p99_ms: float
    """Between the pieces."""


def apply_snapshot(synthetic: SyntheticFleet, snapshot: Snapshot, piece: int) -> Applied:
    """Piece by piece, with a decision after every tenth."""
    pieces = [timed(lambda: synthetic.fleet.receive(snapshot, 0.0))]
    between: list[float] = []
    is_busy: list[bool] = [True]
    chains = [synthetic.prompt() for _ in range(8)]
    while is_busy.pop():
        pieces.append(timed(lambda: is_busy.append(synthetic.fleet.work(piece))))
        if len(pieces) % 10 == 0:
            chain = chains[len(pieces) // 10 % len(chains)]
            between.append(timed(lambda chain=chain: synthetic.fleet.hits(chain, 0.0)))
    return Applied(sum(pieces), max(pieces), percentile(between or [0.0], 0.99))


def snapshots(synthetic: SyntheticFleet, worker: str, num_entries: int, piece: int) -> tuple[Applied, Applied]:
    """Of a worker that joins, and of the same one when some of its conversations went and others came."""
    synthetic.fleet.add_worker(worker)
    # As a worker does, a prefix before what goes on from it.
    systems = [KvStored(system, None, b"", BLOCK_TOKENS) for system in synthetic.systems]
    conversations: list[list[tuple[Event, ...]]] = [[(system,)] for system in systems]
    entries = SYSTEM_BLOCKS * len(synthetic.systems)
    while entries < num_entries:
        conversations.append(list(synthetic.conversation())[1:])
        entries += NUM_TURNS * (TURN_BLOCKS + 1)

    def events() -> tuple[Event, ...]:
        return tuple(event for turns in conversations for turn in turns for event in turn)

    new = apply_snapshot(synthetic, Snapshot(worker, 0, 0, 0, events()), piece)
    for at in range(len(synthetic.systems), len(conversations), 100):
        conversations[at] = list(synthetic.conversation())[1:]
    changed = apply_snapshot(synthetic, Snapshot(worker, 0, 1, 1, events()), piece)
    synthetic.workers.append(worker)
    return new, changed


def joining(synthetic: SyntheticFleet, num_entries: int, piece: int) -> Iterator[tuple[Applied, Applied]]:
    """Of several, each when the one before it has left; the last one stays."""
    for number in range(NUM_JOINING):
        if number:
            synthetic.fleet.remove_worker(synthetic.workers.pop())
            synthetic.fleet.settle()
        yield snapshots(synthetic, f"joining-{number}", num_entries, piece)


def middle(applied: list[Applied]) -> Applied:
    """The median of what they took, and the longest waits of all."""
    return Applied(
        statistics.median(each.total_ms for each in applied),
        max(each.longest_ms for each in applied),
        max(each.decision_p99_ms for each in applied),
    )


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured."""

    num_blocks: int
    num_workers: int
    prompt_tokens: int
    decision_p50_ms: float
    decision_p99_ms: float
    dispatch_p50_ms: float
    dispatch_p99_ms: float
    events_per_s: float
    entries_per_s: float
    snapshot_new_ms: float
    snapshot_new_worst_ms: float
    snapshot_new_longest_ms: float
    snapshot_changed_ms: float
    snapshot_changed_longest_ms: float
    decision_p99_between_pieces_ms: float
    peak_memory_mb: int


def measure(synthetic: SyntheticFleet, args: argparse.Namespace) -> Figures:
    """Check, time, check; raises `Differs`."""
    check(synthetic, 4)
    num_blocks = synthetic.fleet.index.num_blocks
    times_ms = decisions(synthetic, args.decisions)
    whole_ms = dispatches(synthetic, args.decisions)
    per_s, entries_per_s = events_per_s(synthetic, args.events)
    joined = list(joining(synthetic, args.entries, args.piece))
    new, changed = (middle([pair[which] for pair in joined]) for which in (0, 1))
    check(synthetic, 4)
    synthetic.fleet.index.check_invariants()
    return Figures(
        num_blocks=num_blocks,
        num_workers=args.workers,
        prompt_tokens=args.prompt_tokens,
        decision_p50_ms=statistics.median(times_ms),
        decision_p99_ms=percentile(times_ms, 0.99),
        dispatch_p50_ms=statistics.median(whole_ms),
        dispatch_p99_ms=percentile(whole_ms, 0.99),
        events_per_s=per_s,
        entries_per_s=entries_per_s,
        snapshot_new_ms=new.total_ms,
        snapshot_new_worst_ms=max(first.total_ms for first, _ in joined),
        snapshot_new_longest_ms=new.longest_ms,
        snapshot_changed_ms=changed.total_ms,
        snapshot_changed_longest_ms=changed.longest_ms,
        decision_p99_between_pieces_ms=max(new.decision_p99_ms, changed.decision_p99_ms),
        peak_memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    )


def table_of(figures: Figures) -> Table:
    """A row a figure, with its bar where it has one."""
    size = f"{figures.num_blocks:,} blocks, {figures.num_workers} workers"
    caption = f"{size}, a prompt of {figures.prompt_tokens:,} tokens"
    table = Table(title="the index of a fleet", caption=caption, box=SIMPLE, pad_edge=False)
    table.add_column("figure", no_wrap=True)
    for column in ("measured", "bar", ""):
        table.add_column(column, justify="right", no_wrap=True)
    bars = {bar.name: bar for bar in BARS}
    for name, value in list(asdict(figures).items())[3:]:
        limit = said = ""
        if (bar := bars.get(name)) is not None:
            limit = f"{'<' if bar.is_most else '>'} {bar.value:,.0f} {bar.unit}"
            said = "holds" if (value <= bar.value if bar.is_most else value >= bar.value) else "MISSED"
        table.add_row(name, f"{value:,.3f}" if value < 100 else f"{value:,.0f}", limit, said)
    return table


def positive(text: str) -> int:
    """1 or more; `ValueError` otherwise."""
    if (value := int(text)) < 1:
        raise ValueError
    return value


def main(argv: list[str] | None = None) -> int:
    """Run, print and write; exit status 1 if an answer is wrong, 2 for bad input."""
    parser = argparse.ArgumentParser(description="What a router's index costs at the size of a fleet.")
    for name, default, text in (
        ("--blocks", NUM_BLOCKS, "blocks in the index"),
        ("--workers", NUM_WORKERS, "workers"),
        ("--prompt-tokens", PROMPT_TOKENS, f"of a prompt, {4 * BLOCK_TOKENS} or more"),
        ("--entries", NUM_ENTRIES, "of a snapshot"),
        ("--piece", PIECE_ENTRIES, "entries of a snapshot applied at a time"),
        ("--decisions", 5000, "decisions timed"),
        ("--events", 200_000, "events timed"),
    ):
        parser.add_argument(name, type=positive, default=default, metavar="N", help=f"{text} (default: {default:,})")
    parser.add_argument("--json", type=Path, default=RESULTS / "fleet_index.json", metavar="FILE")
    args = parser.parse_args(argv)
    if args.prompt_tokens < 4 * BLOCK_TOKENS:
        parser.error(f"--prompt-tokens {args.prompt_tokens}: give {4 * BLOCK_TOKENS} or more")
    console = Console()
    try:
        with console.status(f"{args.blocks:,} blocks"):
            figures = measure(SyntheticFleet(args), args)
    except Differs as error:
        print(f"fleet_index.py: error: {error}", file=sys.stderr)
        return 1
    finally:
        gc.unfreeze()
    console.print(table_of(figures))
    machine = {"machine": platform.machine(), "python": platform.python_version(), "seed": SEED}
    result = machine | {"bars": {bar.name: bar.value for bar in BARS}} | asdict(figures)
    try:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        write(args.json, result)
    except OSError as error:
        print(f"fleet_index.py: error: {error}", file=sys.stderr)
        return 2
    console.print(f"written to {args.json}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
