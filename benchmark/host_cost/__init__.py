"""What a server's cache costs the scheduler's thread: stock SGLang's, with either of its tree cores, and ours.

The real cache classes stand on pools of the host's memory, without a model (`rig`), and take turns in
one process, a few calls each, so that whatever else the machine does meets all of them alike. Read the ratios.

    match    `match_prefix` of a prompt that is held, limited to all but its last token, as the scheduler asks
    extend   the cache's work for a request that goes on from a held conversation by 500 tokens, 100 of them the
             answer: our plan, and what joins the tree after the prefill and at the end. Stock inserts the whole path
             twice. The conversation grows by a few such turns and is begun anew in every round
    victim   `evict` of one state, or of KV for 40 tokens, from a full tree that has so many states before each of them
             (`forest.py`); ours forgets a ghost for every one that it makes
    tier     the same victims of `best` above a host tier, where each has been copied ahead: `evict` alone, and with the
             step between two (`check_hicache_events`), which chooses what goes next, starts its copy and notes the end
             of others; beside `best` without a tier. No byte is copied: that is the device's work
    queue    what one pass of the scheduler asks of our cache but for matching, with so many requests waiting of which 8
             are taken and 8 come (`rig.queued`): the queue noted, who waits for a state, and plans;
             against a cache that knows of no queue, and one in whose queue nobody is left

    tick     a pass of the scheduler that receives nothing, from our receiver: with a tick that is made, pickled as the
             broadcast to other ranks has it, and adopted; and with none that is due

Times are the thread's processor time, with the garbage collector off. A stock cache whose victims take more than
`--box-s` in all has fewer of them timed, and none at a size where its filling takes that long, nor beyond.

    python benchmark/host_cost [--tokens N] [--sizes N,N,...] [--waiting N] [--rounds N] [--box-s SECONDS]
                               [--json FILE]
"""

import argparse
import gc
import json
import logging
import math
import os
import pickle
import platform
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from marconi.engine.launch.policies import PolicyChoice
from marconi.model import load
from marconi.policy.base import Costs
from marconi.policy.request import Request, pack
from rig.clock import TraceClock
from rig.driver import HostReplay
from rig.pools import Core, HostPools, marconi, stock
from rig.queued import NUM_TAKEN, SHARED_TOKENS, Queued

from .forest import LEAF_TOKENS, NEEDS, SLACK_TOKENS, Forest
from .report import RULES, STOCK, Row, Times, bars, figures_of, plain, table_of

RESULTS = Path(__file__).parents[1] / "results"
SEED = 1
NUM_TOKENS = 100_000
SIZES = (1_000, 10_000, 100_000)
MODEL = "qwen3-next-80b-a3b"

NUM_OTHERS = 1_000
CALLS_A_ROUND = 20
NUM_FIRST_CALLS = 3
"""Not counted: stock splits a node where a match ends for the first time."""
TURN_TOKENS = 500
ANSWER_TOKENS = 100
TURNS_A_ROUND = 8
PARTS = {"plan": "plan_prefill", "insert": "checkpoint", "match": "match_prefix"}
"""What a request asks of a cache, and by which method."""

VICTIMS_A_ROUND = 40
MAX_GHOSTS = 64
NUM_WARM_UPS = 2 * MAX_GHOSTS

HOST_RATIO = 4.0
NO_TIER, TIER, TIER_IN_ALL = "no tier", "tier", "tier, with the copy"
MAX_TIER_STATES = 10_000
"""A host tier takes memory for every number that it stands for."""

TICKS_A_ROUND = 400
NUM_WAITING = 1_000
PASSES_A_ROUND = 8
NUM_FIRST_PASSES = 2
"""Not counted: a queue that is new is noted whole."""
UNTOLD, NOBODY = "untold", "nobody waits"
QUEUE_CASES = {"all different": 0, "in groups": SHARED_TOKENS}
"""Tokens that the prompts of a group have in common."""
QUEUE_METHODS = {"note": "note", "who waits": "waits", "taken": "note_taken", "plan": "plan_prefill"}
ONCE = ("a request that comes", "a request that goes")
QUEUE_PARTS = ("a pass", *QUEUE_METHODS, "for each plan", *ONCE)
"""All of a pass, what it asks a cache or what that knows of the queue, and what a plan pays of it."""


class Contender(NamedTuple):
    """A cache on its pools, and what drives it."""

    name: str
    cache: Any
    clock: TraceClock
    replay: HostReplay


T = TypeVar("T")


def contend(name: str, host: HostPools) -> Contender:
    """The contender of that name, on new pools."""
    clock = TraceClock()
    if name in STOCK:
        cache = stock(host, Core(name))
    else:
        model = load(MODEL)
        costs = Costs(model.kv_bytes_per_token, max(model.checkpoint_bytes, 1), model.prefix_flops)
        cache = marconi(host, PolicyChoice(name, alpha=1.0, max_ghosts=MAX_GHOSTS), costs, clock)
    return Contender(name, cache, clock, HostReplay(cache, host, 1, clock))


def in_turn(contenders: Sequence[T], number: int) -> list[T]:
    """Each of them once; another is first in the next round."""
    first = number % len(contenders)
    return [*contenders[first:], *contenders[:first]]


def timed(method: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """`method`, whose calls leave their time in `seconds`."""

    def call(*args: Any, **kwargs: Any) -> Any:
        start_s = time.thread_time()
        result = method(*args, **kwargs)
        seconds.append(time.thread_time() - start_s)
        return result

    return call


def turns(first_id: int, num_tokens: int, turn_tokens: int) -> Iterator[Request]:
    """A conversation up to `num_tokens` by turns, the last of which may be shorter; a second passes between two."""
    for number, held in enumerate(range(0, num_tokens, turn_tokens)):
        length = min(held + turn_tokens, num_tokens)
        num_answered = min(ANSWER_TOKENS, (length - held) // 2)
        path = pack(range(first_id, first_id + length))
        yield Request(path, length - num_answered, num_answered, length, float(number))


def measure_match(num_tokens: int, rounds: int) -> dict[str, Row]:
    """By what else is held, and how the prompt came to be."""
    room = 2 * num_tokens + (NUM_OTHERS + 4) * 2 * LEAF_TOKENS
    slots = num_tokens // TURN_TOKENS * 4 + 2 * NUM_OTHERS + 64
    host = HostPools(room, slots, num_tokens + SLACK_TOKENS)
    contenders = [contend(name, host) for name in (*STOCK, "marconi")]

    # Not before a cache has been built: SGLang chooses its platform when it is first imported.
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    def serve(requests: Callable[[], Iterator[Request]]) -> None:
        for contender in contenders:
            for request in requests():
                contender.replay.serve(request)

    def match(first_id: int) -> Row:
        ids = array("q", range(first_id, first_id + num_tokens))
        times: Times = {contender.name: [] for contender in contenders}
        for number in range(1 + rounds):
            for name, cache, _, _ in in_turn(contenders, number):
                match_prefix = timed(cache.match_prefix, times[name])
                for _ in range(CALLS_A_ROUND if number else NUM_FIRST_CALLS):
                    result = match_prefix(MatchPrefixParams(key=RadixKey(ids, limit=num_tokens - 1)))
                assert result.device_prefix_len > 0.8 * num_tokens, f"{name} hits {result.device_prefix_len} tokens"
        return figures_of({name: each[NUM_FIRST_CALLS:] for name, each in times.items()})

    def others() -> Iterator[Request]:
        for number in range(NUM_OTHERS):
            yield from turns(4 * num_tokens + number * 2 * LEAF_TOKENS, 2 * LEAF_TOKENS, 2 * LEAF_TOKENS)

    rows = {}
    serve(lambda: turns(0, num_tokens, num_tokens))
    rows["alone"] = match(0)
    serve(others)
    rows[f"among {NUM_OTHERS:,} others"] = match(0)
    serve(lambda: turns(2 * num_tokens, num_tokens, TURN_TOKENS))
    rows[f"grown by {TURN_TOKENS}"] = match(2 * num_tokens)
    for contender in contenders:
        contender.replay.check_invariants()
    return rows


def measure_extend(num_tokens: int, rounds: int) -> dict[str, Row]:
    """All of it, and its parts; the match that comes before is beside it."""
    longest = num_tokens + TURNS_A_ROUND * TURN_TOKENS
    host = HostPools(longest + SLACK_TOKENS, 256, longest + SLACK_TOKENS)
    names = (*STOCK, *RULES)
    parts: dict[str, Times] = {part: {name: [] for name in names} for part in ("all", *PARTS)}
    for number in range(rounds):
        contenders = [contend(name, host) for name in names]
        for contender in contenders:
            contender.replay.serve(next(turns(0, num_tokens, num_tokens)))
        for contender in in_turn(contenders, number):
            spent: dict[str, list[float]] = {part: [] for part in PARTS}
            for part, method in PARTS.items():
                if hasattr(contender.cache, method):
                    setattr(contender.cache, method, timed(getattr(contender.cache, method), spent[part]))
            for length in range(num_tokens + TURN_TOKENS, longest + 1, TURN_TOKENS):
                path = pack(range(length))
                arrival_s = length / TURN_TOKENS
                contender.replay.serve(Request(path, length - ANSWER_TOKENS, ANSWER_TOKENS, length, arrival_s))
                for part, seconds in spent.items():
                    parts[part][contender.name].append(sum(seconds))
                parts["all"][contender.name].append(sum(spent["plan"]) + sum(spent["insert"]))
                for seconds in spent.values():
                    seconds.clear()
            contender.replay.check_invariants()
    return {part: figures_of(times) for part, times in parts.items()}


def measure_victim(sizes: Sequence[int], rounds: int, box_s: float, console: Console) -> dict[str, dict[int, Row]]:
    """By need and number of states."""
    rows: dict[str, dict[int, Row]] = {need: {} for need in NEEDS}
    left_out: set[str] = set()
    for size in sizes:
        forests = []
        for name in [name for name in (*STOCK, *RULES) if name not in left_out]:
            with console.status(f"{size:,} states: {name}"):
                contender = contend(name, Forest.host(size))
                forest = Forest(name, contender.replay, contender.clock, size, SEED)
                # Ours is never left out.
                if forest.fill(time.monotonic() + box_s if name in STOCK else math.inf):
                    forests.append(forest)
                else:
                    left_out.add(name)
        gc.collect()
        for need in NEEDS:
            with console.status(f"{size:,} states: victims for {need}"):
                times = take_victims(forests, need, rounds, box_s)
            rows[need][size] = {**dict.fromkeys(left_out), **figures_of(times)}
        for forest in forests:
            forest.cache.sanity_check()
    return rows


def take_victims(forests: Sequence[Forest], need: str, rounds: int, box_s: float) -> Times:
    """In turns; a stock cache stops at `box_s` seconds, after one victim at least."""
    times: Times = {forest.name: [] for forest in forests}
    for forest in forests:
        for _ in range(0 if forest.name in STOCK else NUM_WARM_UPS):
            forest.evict(need)
    for number in range(rounds):
        for forest in in_turn(forests, number):
            seconds = times[forest.name]
            for _ in range(VICTIMS_A_ROUND):
                if forest.name not in STOCK or sum(seconds) <= box_s:
                    seconds.append(forest.evict(need))
    return times


def measure_tier(num_states: int, rounds: int) -> dict[str, Row]:
    """By need."""
    forests = []
    for host_ratio in (0.0, HOST_RATIO):
        contender = contend("best", Forest.host(num_states, host_ratio))
        forest = Forest("best", contender.replay, contender.clock, num_states, SEED)
        forest.fill(math.inf)
        forests.append(forest)
    without, tiered = forests
    rows = {}
    for need in NEEDS:
        times: Times = {NO_TIER: [], TIER: [], TIER_IN_ALL: []}
        num_copied = tiered.num_copied
        for number in range(NUM_WARM_UPS + rounds * VICTIMS_A_ROUND):
            copying_s = tiered.copy_ahead()
            without_s, evicting_s = without.evict(need), tiered.evict(need)
            if number >= NUM_WARM_UPS:
                times[NO_TIER].append(without_s)
                times[TIER].append(evicting_s)
                times[TIER_IN_ALL].append(copying_s + evicting_s)
        assert tiered.num_copied - num_copied >= len(times[TIER]), "victims that were not copied"
        rows[need] = figures_of(times)
    for forest in forests:
        forest.settle()
        forest.cache.sanity_check()
    return rows


def untold(cache: Any) -> None:
    """Take the queue's word from `cache`."""
    waiting = cache.waiting
    waiting.note = waiting.expect = waiting.arrived = waiting.expect_nothing = lambda *_: None
    waiting.waits, waiting.begins = lambda *_: False, lambda *_: None


def measure_queue(num_shared_tokens: int, num_waiting: int, rounds: int) -> dict[str, Row]:
    """By part of a pass, and once for each request."""
    lengths = {UNTOLD: num_waiting, NOBODY: NUM_TAKEN, f"{num_waiting:,} wait": num_waiting}
    host = Queued.host(num_waiting + (NUM_FIRST_PASSES + rounds * PASSES_A_ROUND + 1) * NUM_TAKEN)
    names = list(lengths)
    parts: dict[str, Times] = {part: {name: [] for name in names} for part in QUEUE_PARTS}
    contenders = []
    for name, length in lengths.items():
        cache, clock = contend("best", host)[1:3]
        if name == UNTOLD:
            untold(cache)
        spent: dict[str, list[float]] = {}
        for part, method in QUEUE_METHODS.items():
            owner = cache if hasattr(cache, method) else cache.waiting
            setattr(owner, method, timed(getattr(owner, method), spent.setdefault(part, [])))
        contenders.append((name, Queued(cache, host, length, num_shared_tokens), clock, spent))
    for number in range(1 + rounds):
        for name, queued, clock, spent in in_turn(contenders, number):
            for _ in range(PASSES_A_ROUND if number else NUM_FIRST_PASSES):
                clock.now_s += 1
                num_taken = queued.take()
                assert num_taken, f"{name}: a pass that takes nothing"
                if number:
                    whole = sum(map(sum, spent.values()))
                    parts["a pass"][name].append(whole)
                    parts["for each plan"][name].append(whole / num_taken)
                    for part, seconds in spent.items():
                        parts[part][name].append(sum(seconds))
                for seconds in spent.values():
                    seconds.clear()
    for name, queued, *_ in contenders:
        queued.cache.sanity_check()
        if name not in (UNTOLD, NOBODY):
            for _ in range(rounds):
                come, gone = ONCE
                fresh = type(queued.cache.waiting)(queued.cache.tree_core, queued.cache.moments)
                for part, queue in ((come, queued.waiting), (gone, [])):
                    start_s = time.thread_time()
                    fresh.note(queue)
                    parts[part][name].append((time.thread_time() - start_s) / num_waiting)
    return {part: figures_of(times) for part, times in parts.items()}


def measure_tick(rounds: int) -> dict[str, Row]:
    """Passes with a tick, and as many with none."""
    from marconi.engine.cache.tick import INTERVAL_S, TickReceiver

    now_s = 0.0
    cache = contend("marconi", HostPools(4096, 64, 4096)).cache
    cache.first_rank.clock = lambda: now_s

    def broadcast(local_reqs: list[Any] | None) -> list[Any]:
        return pickle.loads(pickle.dumps(local_reqs)) if local_reqs else []  # noqa: S301 - SGLang's own way

    receiver = TickReceiver(SimpleNamespace(recv_requests=broadcast), cache)
    times: dict[str, Times] = {"a tick": {"marconi": []}, "none is due": {"marconi": []}}
    for index in range(rounds * TICKS_A_ROUND):
        case = "none is due" if index % 2 else "a tick"
        now_s += 0.0 if index % 2 else 2 * INTERVAL_S
        call = timed(receiver.recv_requests, times[case]["marconi"])
        call(local_reqs=[])
        assert cache.tick.now_s == now_s
    return {case: figures_of(each) for case, each in times.items()}


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    made = argparse.ArgumentParser(description="What a server's cache costs: stock SGLang's and ours, in turns.")
    made.add_argument("--tokens", type=int, default=NUM_TOKENS, metavar="N", help="held conversation (default: 100000)")
    made.add_argument("--sizes", type=sizes, default=list(SIZES), metavar="N,N,...", help="states, 100 or more each")
    made.add_argument("--waiting", type=int, default=NUM_WAITING, metavar="N", help="requests (default: 1000)")
    made.add_argument("--rounds", type=int, default=5, metavar="N", help="more of them, more calls (default: 5)")
    made.add_argument("--box-s", type=float, default=20.0, metavar="SECONDS", help="for stock's victims (default: 20)")
    made.add_argument("--json", type=Path, default=RESULTS / "host_cost.json", metavar="FILE")
    return made


def sizes(text: str) -> list[int]:
    """Rising numbers of states; `ValueError` unless 100 or more each."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 100:
        raise ValueError
    return sorted(set(found))


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; exit status 2 for bad input. Whether bars hold is for the reader."""
    made = parser()
    args = made.parse_args(argv)
    if args.tokens < 2 * TURN_TOKENS:
        made.error(f"--tokens {args.tokens}: give {2 * TURN_TOKENS} or more")
    if args.rounds < 1:
        made.error(f"--rounds {args.rounds}: give 1 or more")
    if args.waiting < 2 * NUM_TAKEN:
        made.error(f"--waiting {args.waiting}: give {2 * NUM_TAKEN} or more")
    if not args.box_s > 0:
        made.error(f"--box-s {args.box_s}: give more than 0")
    logging.disable(logging.WARNING)
    # Operations on indices are small: threads that wait for each other take longer, and blur what is timed.
    torch.set_num_threads(1)
    console = Console()
    load_before = os.getloadavg()[0]
    gc.disable()
    try:
        with console.status("match"):
            match = measure_match(args.tokens, args.rounds)
        gc.collect()
        with console.status("extend"):
            extend = measure_extend(args.tokens, args.rounds)
        gc.collect()
        victim = measure_victim(args.sizes, args.rounds, args.box_s, console)
        gc.collect()
        with console.status("tier"):
            tier = measure_tier(min(max(args.sizes), MAX_TIER_STATES), args.rounds)
        gc.collect()
        with console.status("queue"):
            queue = {
                case: measure_queue(num_shared, args.waiting, args.rounds) for case, num_shared in QUEUE_CASES.items()
            }
        with console.status("tick"):
            tick = measure_tick(args.rounds)
    finally:
        gc.enable()
    found = list(bars(match, extend, victim, tier, queue, tick))
    console.print(table_of(f"match {args.tokens:,} tokens", match))
    console.print(table_of(f"extend {args.tokens:,} tokens by {TURN_TOKENS}", extend))
    for need, by_size in victim.items():
        console.print(table_of(f"one victim for {need}", {f"{size:,} states": row for size, row in by_size.items()}))
    console.print(table_of("one victim of `best`, by need", tier))
    for case, rows in queue.items():
        console.print(table_of(f"a pass with {args.waiting:,} waiting, {case}", rows))
    console.print(table_of("a pass that receives nothing", tick))
    verdicts = Table("bar", "found", "at most", "", title="bars", box=SIMPLE, pad_edge=False)
    for bar in found:
        verdicts.add_row(bar.claim, f"{bar.value:.2f}", f"{bar.limit:g}", "holds" if bar.holds else "MISSED")
    console.print(verdicts)
    document = {
        "benchmark": "host_cost",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "load_average": [load_before, os.getloadavg()[0]],
        "seed": SEED,
        "tokens": args.tokens,
        "rounds": args.rounds,
        "match": plain(match),
        "extend": plain(extend),
        "victim": {need: plain(by_size) for need, by_size in victim.items()},
        "tier": plain(tier),
        "waiting": args.waiting,
        "queue": {case: plain(rows) for case, rows in queue.items()},
        "tick": plain(tick),
        "bars": [{**asdict(bar), "holds": bar.holds} for bar in found],
    }
    try:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"host_cost: error: {error}", file=sys.stderr)
        return 2
    console.print(f"load average {load_before:.1f} before, {os.getloadavg()[0]:.1f} after; written to {args.json}")
    return 0
