"""From a log of chats to the five lines of `marconi plan`: seconds by stage, and of all processes together.

    python benchmark/plan.py [--chats N] [--seed N] [--memory AMOUNT] [--jobs N] [--json FILE]

The log has N requests in conversations of 1 to 7 turns, three in five under one of three system prompts, messages of 50
to 400 words, with times and answers. Its tokens are those of a small model, as `marconi tiny-model` writes it, by its
chat template. The stages:

    read      import and load the tokenizer, render and encode every chat, find the sessions
    replay    every candidate, in all the amounts of memory, and both halves; the bounds
    print     the tables and the lines
"""

import argparse
import itertools
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from marconi.plan.command import add_parser
from marconi.plan.plan import make_plan, render
from marconi.replay.command import positive
from marconi.replay.inputs import read_inputs, resolve
from marconi.replay.memory import MemorySize, parse_memories
from marconi.replay.parallel import num_usable_cores
from marconi.replay.report import console_for_tables

GOAL_S: Final = 120
NUM_CHATS: Final = 10_000
NUM_WORDS, NUM_SYSTEM_PROMPTS, MAX_TURNS = 6_000, 3, 7
WORDS, SYSTEM_WORDS = (50, 400), (200, 400)
SHARE_UNDER_SYSTEM_PROMPT: Final = 0.6
SESSIONS_PER_S, THINK_S = 0.7, 60.0
SYLLABLES: Final = ("ka", "lo", "mi", "ren", "tas", "vor", "pel", "nor", "est", "am", "ble", "ing", "tion", "der", "un")


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of the way: seconds that passed, and those of processors in all processes."""

    name: str
    wall_s: float
    cpu_s: float


class Clock:
    """Takes the time of stages, one after the other."""

    def __init__(self) -> None:
        self.stages: list[Stage] = []
        self._wall_s, self._cpu_s = time.perf_counter(), _cpu_s()

    def ends(self, name: str) -> None:
        """The stage that began with the end of the last one is over."""
        wall_s, cpu_s = time.perf_counter(), _cpu_s()
        self.stages.append(Stage(name, wall_s - self._wall_s, cpu_s - self._cpu_s))
        self._wall_s, self._cpu_s = wall_s, cpu_s


def _cpu_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def log_of(num_chats: int, seed: int) -> Iterator[dict[str, Any]]:
    """Requests of a made-up log in the order of their sessions."""
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 4))) for _ in range(NUM_WORDS)]
    weights = list(itertools.accumulate(1 / (rank + 3) for rank in range(NUM_WORDS)))

    def text(least: int, most: int) -> str:
        return " ".join(rng.choices(words, cum_weights=weights, k=rng.randint(least, most)))

    systems = [{"role": "system", "content": text(*SYSTEM_WORDS)} for _ in range(NUM_SYSTEM_PROMPTS)]
    num_made, start_s = 0, 0.0
    while num_made < num_chats:
        start_s += rng.expovariate(SESSIONS_PER_S)
        at_s = start_s
        messages = [rng.choice(systems)] if rng.random() < SHARE_UNDER_SYSTEM_PROMPT else []
        for _ in range(min(rng.randint(1, MAX_TURNS), num_chats - num_made)):
            messages = [*messages, {"role": "user", "content": text(*WORDS)}]
            said = {"role": "assistant", "content": text(*WORDS)}
            yield {"timestamp": at_s, "messages": messages, "response": {"choices": [{"message": said}]}}
            messages = [*messages, said]
            at_s += 10 + rng.expovariate(1 / THINK_S)
            num_made += 1


def measure(log: Path, model: Path, memories: Sequence[MemorySize], num_processes: int) -> list[Stage]:
    """Plan as the command does, printed to stdout; the stages."""
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["plan", str(log), "--model", str(model)])
    clock = Clock()
    inputs = read_inputs(args)
    clock.ends("read")
    memories_bytes, _, unbounded = resolve(memories, inputs)
    plan = make_plan(inputs, memories_bytes, unbounded, num_processes)
    clock.ends("replay")
    console_for_tables().print(render(plan, has_table=True))
    clock.ends("print")
    return clock.stages


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print and write; exit status 2 for bad input."""
    parser = argparse.ArgumentParser(description="From a log of chats to the five lines of a plan.")
    parser.add_argument(
        "--chats", type=positive, default=NUM_CHATS, metavar="N", help=f"requests of the log (default: {NUM_CHATS:,})"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the log (default: 0)")
    parser.add_argument("--memory", default="0.1x", metavar="LIST", help="default: 0.1x of an unbounded cache")
    parser.add_argument("--jobs", type=positive, metavar="N", help="processes (default: one a core)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the seconds there")
    args = parser.parse_args(argv)
    num_processes = args.jobs or num_usable_cores()
    try:
        memories = parse_memories(args.memory)
        with tempfile.TemporaryDirectory(prefix="marconi-plan-") as folder:
            log, model = Path(folder) / "log.jsonl", Path(folder) / "model"
            with log.open("w", encoding="utf-8") as stream:
                stream.writelines(f"{json.dumps(line)}\n" for line in log_of(args.chats, args.seed))
            # In a process of its own, so that nothing that a plan must load is loaded yet.
            write_model = [sys.executable, "-m", "marconi", "tiny-model", "--family", "gdn", "--out", str(model)]
            subprocess.run(write_model, check=True, stdout=subprocess.DEVNULL)  # noqa: S603 - this command
            stages = measure(log, model, memories, num_processes)
        if args.json is not None:
            document = {
                "benchmark": "plan",
                "num_requests": args.chats,
                "num_processes": num_processes,
                "goal_s": GOAL_S,
                "stages": [asdict(stage) for stage in stages],
            }
            args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"plan.py: error: {error}", file=sys.stderr)
        return 2
    total = Stage("in all", sum(stage.wall_s for stage in stages), sum(stage.cpu_s for stage in stages))
    title = f"a log of {args.chats:,} chats, {num_processes} processes; goal for 10,000: under {GOAL_S} s"
    table = Table("stage", box=SIMPLE, title=title)
    table.add_column("seconds", justify="right")
    table.add_column("of processors", justify="right")
    for stage in (*stages, total):
        table.add_row(stage.name, f"{stage.wall_s:.1f}", f"{stage.cpu_s:.1f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
