"""SGLang's own `bench_serving` against stock SGLang and against this project, beside each other.

Three of its workloads: `random-ids` (nothing is shared: the price of the cache), `generated-shared-prefix` (input
prefixes) and `mooncake` (a trace's blocks, from a file: its first 8 blocks a request, one request every half second,
so that a small model can serve it). One server after the other on
the same model, the cache flushed before each workload; figures of one run on one machine, to be read as ratios.

With `--rounds` both servers start at once and take turns, and the medians of the rounds count. With `--large` the model
has the layers of one of some four billion parameters (`LARGE`), whose weights SGLang draws: for a card, whose times a
small model does not show. There one server follows the other and is asked everything once more, uncounted, before its
rounds: two that start at once take each other's memory, and SGLang compiles as it serves. Each workload's figures are
printed as it ends, for a run that does not.

    python benchmark/serving.py [--model-path DIR_OR_NAME | --large] [--mooncake FILE] [--num-prompts N] [--rate N]
        [--rounds N] [-- SERVER_ARGS]
"""

import argparse
import gzip
import importlib.metadata
import json
import platform
import random
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from marconi.cli import interrupt_when_terminated
from marconi_cpu import tiny_model
from marconi_cpu.demo.comparison import MARCONI, STOCK
from marconi_cpu.demo.run import device_name
from marconi_cpu.demo.server_process import ServerFailed, ServerProcess, environment, scratch_folder

BACKEND_ARGS: dict[str, tuple[str, ...]] = {STOCK: (), MARCONI: ("--radix-cache-backend", "marconi")}
RESULTS = Path(__file__).parent / "results"
SEED = 1
# Of the tiny model's 32,768 positions; a block of the loader's own text is about 390 of its byte-level tokens.
MAX_BLOCKS = 8
MAX_OUTPUT_TOKENS = 32
BLOCK_TOKENS = 512
ARRIVAL_INTERVAL_MS = 500
WORKLOAD_TIMEOUT_S = 1800
LARGE: dict[str, int] = {
    "hidden_size": 2560,
    "intermediate_size": 9216,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
"""Of the family `gdn`, what `--large` has in its `config.json`: three of four layers are recurrent."""
LONGER = 8
"""How much longer prompts are with `--large`."""
RANDOM_WEIGHTS = ("--load-format", "dummy", "--dtype", "bfloat16")


@dataclass(frozen=True, slots=True)
class Workload:
    """A workload of `bench_serving`: its name there, how many requests it makes, and its arguments."""

    name: str
    num_requests: int
    args: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Figures:
    """What one workload gave against one server: counts in requests and tokens, times in milliseconds."""

    num_completed: int
    num_prompt_tokens: int
    num_cached_tokens: int
    requests_per_s: float
    ttft_ms: dict[str, float]

    @classmethod
    def of(cls, result: dict[str, Any]) -> "Figures":
        """From the JSON line that `bench_serving` wrote."""
        return cls(
            num_completed=result["completed"],
            num_prompt_tokens=result["cache_report"]["total_prompt_tokens"],
            num_cached_tokens=result["cache_report"]["total_cached_tokens"],
            requests_per_s=result["request_throughput"],
            ttft_ms={
                "p50": result["median_ttft_ms"],
                "mean": result["mean_ttft_ms"],
                **{each: result[f"{each}_ttft_ms"] for each in ("p95", "p99")},
            },
        )

    @classmethod
    def median(cls, rounds: "Sequence[Figures]") -> "Figures":
        """Of each figure, over rounds of the same workload."""
        return cls(
            num_completed=rounds[0].num_completed,
            num_prompt_tokens=rounds[0].num_prompt_tokens,
            num_cached_tokens=round(median(each.num_cached_tokens for each in rounds)),
            requests_per_s=median(each.requests_per_s for each in rounds),
            ttft_ms={name: median(each.ttft_ms[name] for each in rounds) for name in rounds[0].ttft_ms},
        )

    @property
    def cached(self) -> str:
        """Of the prompts' tokens."""
        return f"{self.num_cached_tokens / self.num_prompt_tokens:.1%}"

    def __str__(self) -> str:
        first = f"first token after {self.ttft_ms['p50']:.0f} ms (median) and {self.ttft_ms['p95']:.0f} (P95)"
        return f"{self.cached} cached, {first}, {self.requests_per_s:.2f} requests a second"

    def to_json(self) -> dict[str, Any]:
        """The figures as the result file holds them."""
        return {field: getattr(self, field) for field in self.__slots__}


def workloads(
    num_prompts: int, mooncake: Path, num_mooncake: int, times: int = 1, rate: float | None = None
) -> tuple[Workload, ...]:
    """The three workloads, each of about `num_prompts` requests; the trace `mooncake` holds `num_mooncake`.

    Prompts of the first two are `times` as long as the small model has them, and `rate` of them arrive a second, at
    random times; None sends all at once.
    """
    arrivals = () if rate is None else ("--request-rate", f"{rate:g}")
    groups = max(1, num_prompts // 8)
    return (
        Workload(
            "random-ids",
            num_prompts,
            (
                *("--num-prompts", str(num_prompts), "--random-input-len", str(512 * times)),
                *("--random-output-len", "16"),
                *("--random-range-ratio", "0.5", *arrivals),
            ),
        ),
        Workload(
            "generated-shared-prefix",
            8 * groups,
            (
                *("--gsp-num-groups", str(groups), "--gsp-prompts-per-group", "8"),
                *("--gsp-system-prompt-len", str(512 * times), "--gsp-question-len", str(64 * times)),
                *("--gsp-output-len", "16", *arrivals),
            ),
        ),
        Workload(
            "mooncake",
            num_mooncake,
            ("--num-prompts", str(num_prompts), "--dataset-path", str(mooncake), "--use-trace-timestamps"),
        ),
    )


def write_trace(source: Path | None, target: Path, num_prompts: int) -> int:
    """Write up to `num_prompts` lines in Mooncake's format to `target`, short enough for a small model.

    From the start of `source` (JSON lines, gzip or not), or, without one, made-up sessions that grow by a block a
    turn. Arrivals are `ARRIVAL_INTERVAL_MS` apart, whatever the source says. Raises ValueError naming a malformed line
    and OSError for a file that cannot be read. Returns the number of lines.
    """
    records = _made_up_sessions(num_prompts) if source is None else _head_of(source, num_prompts)
    with target.open("w", encoding="utf-8") as lines:
        for index, (output_length, hash_ids) in enumerate(records):
            record = {
                "timestamp": ARRIVAL_INTERVAL_MS * index,
                "input_length": BLOCK_TOKENS * len(hash_ids[:MAX_BLOCKS]),
                "output_length": min(output_length, MAX_OUTPUT_TOKENS),
                "hash_ids": hash_ids[:MAX_BLOCKS],
            }
            lines.write(json.dumps(record) + "\n")
    return len(records)


def _head_of(source: Path, num_prompts: int) -> list[tuple[int, list[int]]]:
    records: list[tuple[int, list[int]]] = []
    opener = gzip.open if source.suffix == ".gz" else open
    with opener(source, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if len(records) == num_prompts:
                break
            try:
                record = json.loads(line)
                records.append((int(record["output_length"]), [int(block) for block in record["hash_ids"]]))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{source}:{number}: not a line of a Mooncake trace ({error!r})") from None
    return records


def _made_up_sessions(num_prompts: int) -> list[tuple[int, list[int]]]:
    rng = random.Random(SEED)  # noqa: S311 - a workload, not a secret
    sessions: list[list[int]] = [[0] for _ in range(max(1, num_prompts // 4))]
    records = []
    for index in range(num_prompts):
        history = rng.choice(sessions)
        history.append(index + 1)
        records.append((16, list(history)))
    return records


def run_workload(workload: Workload, server: ServerProcess, scratch: Path) -> Figures:
    """Run one workload against `server`; raises `ServerFailed` if a request was not answered."""
    output = scratch / "result.jsonl"
    output.unlink(missing_ok=True)
    command = [
        *(sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang", "--base-url", server.url),
        *("--model", server.model_path, "--dataset-name", workload.name, *workload.args),
        *("--seed", str(SEED), "--flush-cache", "--cache-report", "--disable-tqdm", "--output-file", str(output)),
    ]
    log_path = scratch / f"{workload.name}.log"
    with log_path.open("wb") as log:
        done = subprocess.run(  # noqa: S603 - our own interpreter and arguments, no shell
            command, env=environment(), stdout=log, stderr=subprocess.STDOUT, timeout=WORKLOAD_TIMEOUT_S, check=False
        )
    if done.returncode != 0 or not output.is_file():
        raise ServerFailed(
            f"bench_serving ended with status {done.returncode} on {workload.name}; its log is {log_path}"
        )
    figures = Figures.of(json.loads(output.read_text(encoding="utf-8").splitlines()[-1]))
    if figures.num_completed != workload.num_requests:
        answered = f"{figures.num_completed} of {workload.num_requests} requests"
        raise ServerFailed(f"{answered} of {workload.name} were answered; its log is {log_path}")
    return figures


def table_of(results: dict[str, dict[str, Figures]], title: str) -> Table:
    """Both backends beside each other, a row a workload."""
    table = Table(title=title, caption="cached: share of prompt tokens; first: median time to first token", box=SIMPLE)
    table.add_column("workload", no_wrap=True)
    for figure in ("cached", "first, ms", "P95, ms"):
        for backend in BACKEND_ARGS:
            table.add_column(f"{figure}\n{backend}", justify="right", no_wrap=True)
    for ratio in ("first", "P95", "req/s"):
        table.add_column(f"ratio\n{ratio}", justify="right", no_wrap=True)
    for name, by_backend in results.items():
        stock, marconi = by_backend[STOCK], by_backend[MARCONI]
        table.add_row(
            f"{stock.num_completed} {name.removeprefix('generated-')}",
            *(figures.cached for figures in (stock, marconi)),
            *(f"{figures.ttft_ms[each]:.0f}" for each in ("p50", "p95") for figures in (stock, marconi)),
            *(f"{marconi.ttft_ms[each] / stock.ttft_ms[each]:.2f}" for each in ("p50", "p95")),
            f"{marconi.requests_per_s / stock.requests_per_s:.2f}",
        )
    return table


def write_model(path: Path, *, is_large: bool) -> None:
    """Write the small gdn model, or the shape of a large one with its tokenizer and without weights."""
    tiny_model.write(tiny_model.Family.GDN, path)
    if is_large:
        config = path / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | LARGE))
        (path / "model.safetensors").unlink()


def run(args: argparse.Namespace, console: Console) -> dict[str, dict[str, Figures]]:
    """Every workload against both backends: figures by workload and backend. Raises `ServerFailed`."""
    found: dict[str, dict[str, list[Figures]]] = {}
    with scratch_folder() as scratch:
        trace = scratch / "mooncake.jsonl"
        num_mooncake = write_trace(args.mooncake, trace, args.num_prompts)
        all_workloads = workloads(args.num_prompts, trace, num_mooncake, LONGER if args.large else 1, args.rate)
        model_path = args.model_path or str(scratch / ("large-gdn" if args.large else "tiny-gdn"))
        if args.model_path is None:
            write_model(Path(model_path), is_large=args.large)

        def start(running: ExitStack, *backends: str) -> dict[str, ServerProcess]:
            server_args = ["--enable-cache-report", *(RANDOM_WEIGHTS if args.large else ()), *args.server_args]
            servers: dict[str, ServerProcess] = {}
            for backend in backends:
                servers[backend] = ServerProcess(
                    model_path, [*server_args, *BACKEND_ARGS[backend]], log_path=scratch / f"{backend}.log"
                )
                running.callback(servers[backend].stop)
                servers[backend].start()
            with console.status(f"start {' and '.join(backends)}"):
                for server in servers.values():
                    server.wait_until_ready()
            return servers

        def ask(backend: str, server: ServerProcess, *, is_counted: bool = True) -> None:
            for workload in all_workloads:
                with console.status(f"{backend}: {workload.name}"):
                    figures = run_workload(workload, server, scratch)
                if is_counted:
                    found.setdefault(workload.name, {}).setdefault(backend, []).append(figures)
                counted = "" if is_counted else " (not counted)"
                console.print(f"{backend}: {workload.name}: {figures}{counted}", highlight=False, soft_wrap=True)

        if args.large or args.rounds is None:
            for backend in BACKEND_ARGS:
                with ExitStack() as running:
                    server = start(running, backend)[backend]
                    if args.large:
                        ask(backend, server, is_counted=False)
                    for _ in range(args.rounds or 1):
                        ask(backend, server)
        else:
            with ExitStack() as running:
                servers = start(running, *BACKEND_ARGS)
                for _ in range(args.rounds):
                    for backend, server in servers.items():
                        ask(backend, server)
    return {
        name: {backend: Figures.median(rounds) for backend, rounds in by_backend.items()}
        for name, by_backend in found.items()
    }


def to_json(args: argparse.Namespace, results: dict[str, dict[str, Figures]]) -> dict[str, Any]:
    """The result file: what was measured, on what, with which versions."""
    return {
        "model": args.model_path or ("large-gdn" if args.large else "tiny-gdn"),
        "rounds": args.rounds or 1,
        "requests_per_s": args.rate,
        "device": device_name(),
        "machine": platform.machine(),
        "mooncake": args.mooncake.name if args.mooncake else "made-up sessions",
        "seed": SEED,
        "workloads": {
            name: {backend: figures.to_json() for backend, figures in by_backend.items()}
            for name, by_backend in results.items()
        },
        "versions": {name: importlib.metadata.version(name) for name in ("sglang-marconi", "sglang", "torch")},
    }


def main() -> int:
    """Run, print and write; exit status 2 for bad input, 1 for a server that failed or requests that got no answer."""
    parser = argparse.ArgumentParser(description="SGLang's bench_serving against stock and marconi.")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model-path", help="default: the small gdn model")
    model.add_argument("--large", action="store_true", help="a large model's layers, with random weights")
    parser.add_argument("--mooncake", type=Path, metavar="FILE", help="a Mooncake trace; default: made-up sessions")
    parser.add_argument("--num-prompts", type=int, default=32, metavar="N", help="of each workload (default: 32)")
    parser.add_argument("--rate", type=float, metavar="N", help="arrivals a second (default: all at once)")
    parser.add_argument("--rounds", type=int, metavar="N", help="of each server, by turns (default: one, one server)")
    parser.add_argument("--json", type=Path, default=RESULTS / "serving.json", metavar="FILE")
    parser.add_argument("server_args", nargs="*", metavar="-- SERVER_ARGS", help="for both servers")
    args = parser.parse_args()
    if args.num_prompts < 1:
        parser.error(f"--num-prompts {args.num_prompts}: give 1 or more")
    if args.rate is not None and not 0 < args.rate < float("inf"):
        parser.error(f"--rate must be above 0, got {args.rate:g}")
    if args.rounds is not None and args.rounds < 1:
        parser.error(f"--rounds must be 1 or more, got {args.rounds}")
    interrupt_when_terminated()
    console = Console()
    try:
        results = run(args, console)
    except (ValueError, OSError, ServerFailed, subprocess.TimeoutExpired) as error:
        print(f"serving.py: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ValueError, OSError)) else 1
    document = to_json(args, results)
    console.print(table_of(results, f"bench_serving, {document['model']} on {document['device']}"))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    console.print(f"written to {args.json}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
