"""`marconi validate` for ordinary traffic: every shape of `benchmark/traffic` on a small server, and its replay.

    python benchmark/validate.py [--family gdn|mamba2] [--memory short|plentiful|all] [--shape NAME ...] [--small]
                                 [--concurrency N] [--json FILE]

Each shape is asked of one server, the cache flushed before it, and replayed with nothing but prompts, answers and the
scheduler's steps (`marconi.validate`). With `--concurrency N` the requests of the shape are then sent again, N at a
time in their order, to a flushed cache, and replayed as well.

    one by one             no request may have other cached tokens than its replay
    beside each other      0.5 points of the prompt tokens between both, in all

A shape is one by one if no two of its requests were in the server at the same time. Exit status 1 where a shape is
further apart, or a server fails.
"""

import argparse
import sys
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from marconi.cli import interrupt_when_terminated
from marconi.model import load
from marconi.process import NoAnswer
from marconi.replay.result import require_writable, write
from marconi.validate.comparison import Comparison, Row
from marconi.validate.prediction import Prediction, Sent, replay_of
from marconi.validate.server import Completion, ServedCache, ServerClient
from marconi_cpu import tiny_model
from marconi_cpu.demo.server_process import ServerFailed, ServerProcess, scratch_folder
from marconi_cpu.demo.stream import WrongAnswer
from traffic.client import ask
from traffic.oracle import Asked
from traffic.program import Scale
from traffic.servers import COMMON_ARGS, Memory
from traffic.servers import Server as Kind
from traffic.shapes import BY_NAME, SHAPES

PROGRAM = "benchmark/validate.py"
TOLERANCE_POINTS = 0.5
SMALL = Scale(number=0.5, turns=0.5, length=0.5)
MEMORIES = (Memory.SHORT, Memory.PLENTIFUL)


@dataclass(frozen=True, slots=True)
class Run:
    """A shape, as it was served with one amount of memory."""

    shape: str
    memory: str
    concurrency: int
    """Requests sent beside each other; 0 where its clients decide."""
    comparison: Comparison

    def to_json(self) -> dict[str, Any]:
        """By name."""
        return {
            "shape": self.shape,
            "memory": self.memory,
            "sent_beside_each_other": self.concurrency,
            **self.comparison.to_json(),
        }


def sent_of(asked: Sequence[Asked]) -> list[Sent]:
    """The requests of a shape, as a replay takes them; `WrongAnswer` where a server does not explain."""
    try:
        return [
            Sent(each.served.prompt, 0, Completion.of(each.served.output, each.num_cached_tokens, each.explained or {}))
            for each in asked
        ]
    except (KeyError, TypeError, ValueError) as wrong:
        raise WrongAnswer(f"an answer must be explained, got {wrong!r}") from None


def are_one_by_one(sent: Sequence[Sent]) -> bool:
    """Whether each request had ended before the next one came."""
    spans = sorted((min(_moments(each)), max(_moments(each))) for each in sent)
    return all(before[1] < after[0] for before, after in pairwise(spans))


def _moments(sent: Sent) -> list[float]:
    steps = sent.answer.steps
    return [each.number for each in (steps.queued, steps.began, steps.ended) if each is not None]


def compared(url: str, shape: str, cache: ServedCache, model: str, sent: Sequence[Sent]) -> Comparison:
    """Both sides of every request; no tolerance where requests came one by one."""
    predicted = Prediction(replay_of(cache, load(model).prefix_flops), sent).run()
    rows = tuple(
        Row(
            index,
            f"{shape}-{index}",
            len(each.prompt),
            each.answer.num_cached_tokens,
            each.answer.line,
            says.num_cached_tokens,
            says.line,
        )
        for index, (each, says) in enumerate(zip(sent, predicted, strict=True))
    )
    is_serial = are_one_by_one(sent)
    return Comparison(url, shape, 1 if is_serial else len(sent), None if is_serial else TOLERANCE_POINTS, 0, rows)


def again(server: ServerClient, sent: Sequence[Sent], concurrency: int) -> list[Sent]:
    """Send the same requests to a flushed cache, so many at a time."""
    server.flush()
    run = uuid.uuid4().hex[:8]

    def send(index: int) -> Sent:
        each = sent[index]
        answer = server.generate(f"{run}-{index}", each.prompt, len(each.answer.output))
        return Sent(each.prompt, each.namespace, answer)

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(send, range(len(sent))))


def measured(args: argparse.Namespace, console: Console) -> Iterator[Run]:
    """A run for each shape and memory, as they are made; raises what `ServerProcess` and `ask` raise."""
    scale = SMALL if args.small else Scale()
    with scratch_folder() as scratch:
        model = scratch / f"tiny-{args.family}"
        tiny_model.write(tiny_model.Family(args.family), model)
        for memory in args.memory:
            server_args = [*COMMON_ARGS, *memory.args(Kind.MARCONI), *Kind.MARCONI.args]
            with ServerProcess(model, server_args, log_path=scratch / f"{memory}.log") as running:
                server = ServerClient(running.url)
                cache = ServedCache.of(server.ranks(), server.info())
                for shape in args.shape:
                    with console.status(f"{memory} memory: {shape}"):
                        sent = sent_of(ask(running.url, BY_NAME[shape].program(scale), explains=True))
                    yield Run(shape, str(memory), 0, compared(running.url, shape, cache, str(model), sent))
                    if args.concurrency > 1:
                        sent = again(server, sent, args.concurrency)
                        comparison = compared(running.url, shape, cache, str(model), sent)
                        yield Run(shape, str(memory), args.concurrency, comparison)


def table_of(runs: Sequence[Run]) -> Table:
    """A line a run."""
    table = Table(title="cached tokens, and what a replay predicts", box=SIMPLE)
    table.add_column("shape", no_wrap=True)
    table.add_column("memory", no_wrap=True)
    for name in ("at a time", "requests", "prompt", "cached", "predicted", "points apart", "differ", ""):
        table.add_column(name, justify="right")
    for run in runs:
        both = run.comparison
        table.add_row(
            run.shape,
            run.memory,
            "1" if both.tolerance_points is None else str(run.concurrency or "some"),
            f"{len(both.rows):,}",
            f"{both.num_prompt_tokens:,}",
            f"{sum(row.num_cached_tokens for row in both.rows):,}",
            f"{sum(row.num_predicted_tokens for row in both.rows):,}",
            f"{both.points_apart:+.2f}",
            f"{len(both.differing):,}",
            "" if both.agrees else "apart",
        )
    return table


def main(argv: Sequence[str] | None = None) -> int:
    """Ask, replay, print and write; exit status 1 where both are apart or a server failed, 2 for bad input."""
    args = _arguments(argv)
    interrupt_when_terminated()
    console = Console(width=None if sys.stdout.isatty() else 140)
    runs: list[Run] = []
    try:
        for run in measured(args, console):
            runs.append(run)
            console.print(f"{run.shape}, {run.memory} memory: {run.comparison.sentence()}", highlight=False)
            for line in run.comparison.parted():
                console.print(f"  {line}", highlight=False)
    except (ServerFailed, WrongAnswer, httpx.HTTPError, ValueError, NoAnswer) as error:
        print(f"{PROGRAM}: error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    console.print(table_of(runs))
    if args.json is not None:
        write(args.json, {"on": f"tiny-{args.family}", "small": args.small, "runs": [run.to_json() for run in runs]})
    return int(not all(run.comparison.agrees for run in runs))


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Ordinary shapes of traffic, and their replay.")
    names = [shape.name for shape in SHAPES]
    parser.add_argument("--shape", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--memory", choices=[*map(str, MEMORIES), "all"], default="all", help="default: all")
    parser.add_argument("--family", choices=[*map(str, tiny_model.Family)], default="gdn", help="default: gdn")
    parser.add_argument("--concurrency", type=int, default=1, metavar="N", help="also send N at a time (default: 1)")
    parser.add_argument("--small", action="store_true", help="half as many, half as long")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write both sides of every request there")
    args = parser.parse_args(argv)
    args.memory = [*MEMORIES] if args.memory == "all" else [Memory(args.memory)]
    try:
        require_writable(args.json)
    except ValueError as wrong:
        parser.error(str(wrong))
    return args


if __name__ == "__main__":
    sys.exit(main())
