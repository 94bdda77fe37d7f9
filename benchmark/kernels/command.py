"""The command line: run the kernels' tests, measure, print a table and write the result file."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from . import checks, cpu, cuda, machine, upstream
from .batch import LEAST_TOKENS, SEED
from .report import Memory, ReferenceRow, Row, missing_of, reference_table, table_of
from .shapes import LAYERS
from .timing import CudaClock, HostClock, copy_bytes_per_s

RESULTS = Path(__file__).parents[1] / "results"
MOST_CHECKPOINTS = 64
WIDTH = 170
PROGRAM = "benchmark/kernels"


def parser() -> argparse.ArgumentParser:
    """Make the parser of the command line."""
    made = argparse.ArgumentParser(PROGRAM, description="Exact checkpoints beside the prefill they are taken from.")
    made.add_argument("--models", type=models, default=list(LAYERS), metavar="NAME,...", help=", ".join(LAYERS))
    made.add_argument("--tokens", type=tokens, metavar="N,N,...", help=f"of a sequence, {LEAST_TOKENS} or more each")
    made.add_argument("--checkpoints", type=int, default=2, metavar="N", help="of each sequence (default: 2)")
    made.add_argument("--repetitions", type=int, metavar="N", help="of each time (default: 20, on a CPU 3)")
    made.add_argument("--skip-tests", action="store_true", help="of the kernels, where they have just been run")
    made.add_argument("--commit", metavar="NAME", help="what is measured, where it is not a git checkout")
    made.add_argument("--json", type=Path, default=RESULTS / "kernels.json", metavar="FILE")
    return made


def models(text: str) -> list[str]:
    """Parse names of models; an unknown one is an error."""
    names = list(dict.fromkeys(text.split(",")))
    if unknown := [name for name in names if name not in LAYERS]:
        raise argparse.ArgumentTypeError(f"models must be of {', '.join(LAYERS)}, got {', '.join(unknown)}")
    return names


def tokens(text: str) -> list[int]:
    """Parse lengths of sequences, in rising order; one that is too short is an error."""
    found = sorted({int(part) for part in text.split(",")})
    if found[0] < LEAST_TOKENS:
        raise argparse.ArgumentTypeError(f"{found[0]}: give {LEAST_TOKENS} or more, two chunks of any model")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; exit status 1 where a test is red or a row failed, 2 for bad input."""
    made = parser()
    args = made.parse_args(argv)
    if not 1 <= args.checkpoints <= MOST_CHECKPOINTS:
        made.error(f"--checkpoints {args.checkpoints}: give 1 to {MOST_CHECKPOINTS}")
    if args.repetitions is not None and args.repetitions < 1:
        made.error(f"--repetitions {args.repetitions}: give 1 or more")
    if os.environ.get("TRITON_INTERPRET") == "1":
        made.error("TRITON_INTERPRET=1: unset it, the interpreter's times say nothing")
    # A file has no width of its own, and a table that is cut says nothing.
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    described = machine.description(device, args.commit)
    document: dict[str, Any] = {"benchmark": "kernels", **described, "seed": SEED, "checkpoints": args.checkpoints}
    try:
        require_writable(args.json)
        console.print(machine.line_of(described), highlight=False)
        document["tests"] = None
        if not args.skip_tests:
            with console.status("the kernels' tests"):
                outcome = checks.run_tests()
            if outcome.red:
                print(f"{PROGRAM}: error: no figure while the kernels' tests are red: {outcome.red}", file=sys.stderr)
                return 1
            document["tests"] = {"passed": outcome.num_passed, "skipped": outcome.num_skipped}
            console.print(f"{outcome.num_passed} tests passed, {outcome.num_skipped} skipped", highlight=False)
        measure = on_cuda if device.type == "cuda" else on_cpu
        status = measure(args, device, document, console)
    except OSError as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2
    console.print(f"written to {args.json}", highlight=False)
    return status


def on_cuda(args: argparse.Namespace, device: torch.device, document: dict[str, Any], console: Console) -> int:
    """Measure all rows; the file is written after each, so that a run that is cut short leaves its rows."""
    clock = CudaClock(device)
    repetitions = args.repetitions or 20
    memory = Memory(copy_bytes_per_s(clock, device, repetitions), clock.l2_bytes)
    document["memory"] = asdict(memory)
    rows: list[Row] = []
    num_failed = 0
    for name in args.models:
        shape = LAYERS[name]
        layer_of = upstream.why_absent(shape.family) or upstream.layer_of
        for case in cuda.cases(args.tokens or cuda.TOKENS):
            with console.status(f"{name}, {case[1]} x {case[0]:,} tokens"):
                try:
                    row = cuda.measure(shape, case, args.checkpoints, clock, repetitions, device, layer_of)
                except Exception as error:  # The other rows are measured all the same.
                    num_failed += 1
                    row = Row(name, shape.family, *case, 0).without("any figure", upstream.first_line(error))
            rows.append(row)
            document["rows"] = [each.to_json(memory) for each in rows]
            write(args.json, document)
    console.print(table_of(rows, memory))
    for line in missing_of(rows):
        console.print(line, highlight=False, markup=False)
    return 1 if num_failed else 0


def on_cpu(args: argparse.Namespace, _: torch.device, document: dict[str, Any], console: Console) -> int:
    """Measure all references."""
    rows: list[ReferenceRow] = []
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in args.models:
            for length in args.tokens or cpu.TOKENS:
                with console.status(f"{name}, {length:,} tokens"):
                    rows += cpu.measure(LAYERS[name], length, args.checkpoints, HostClock(), args.repetitions or 3)
    finally:
        torch.set_num_threads(num_threads)
    document["load_average"] = os.getloadavg()[0]
    document["rows"] = [row.to_json() for row in rows]
    write(args.json, document)
    console.print(reference_table(rows))
    return 0


def require_writable(path: Path) -> None:
    """Raise OSError unless the result file can be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise OSError(f"{path} cannot be written: give a file in a folder of yours")


def write(path: Path, document: dict[str, Any]) -> None:
    """Write the result file."""
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
