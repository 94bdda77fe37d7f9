"""`python benchmark/figures`: its options, and the order of work: replays, numbers, pictures, page.

python benchmark/figures --out DIR [--only LIST] [--json FILE] [--seed N] [--jobs N]
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from marconi.replay.parallel import num_usable_cores
from marconi.replay.progress import metered
from marconi.replay.result import require_writable, write

from .base import Scale
from .canvas import require_matplotlib
from .catalog import FIGURES, chosen
from .measure import measure
from .page import write_figure, write_page

PROGRAM = "benchmark/figures"


def main(argv: Sequence[str] | None = None) -> int:
    """Make the figures; exit status 2 for bad input."""
    figures = argparse.ArgumentParser(
        prog=PROGRAM,
        description="Make the figures of the Marconi and the T-LRU paper: a picture and its numbers each, and a page "
        "that compares. Needs matplotlib. Same seed, same bytes.",
    )
    figures.add_argument("--out", required=True, type=Path, metavar="DIR", help="a folder, made if it is not there")
    figures.add_argument("--only", metavar="LIST", help="ids separated by commas, as 7,8 (default: all)")
    figures.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there, too")
    figures.add_argument("--seed", type=int, default=0, metavar="N", help="of drawn workloads (default: 0)")
    figures.add_argument("--jobs", type=_positive, metavar="N", help="processes (default: one a core)")
    try:
        return _run(figures.parse_args(argv))
    except (ValueError, OSError) as error:
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 2


def _positive(text: str) -> int:
    number = int(text) if text.isascii() and text.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, 1 or more, got {text!r}")
    return number


def _run(args: argparse.Namespace) -> int:
    start_s = time.monotonic()
    figures, scale = chosen(args.only), Scale(seed=args.seed)
    if args.out.exists() and not args.out.is_dir():
        raise ValueError(f"--out {args.out} is a file: give a folder")
    require_writable(args.json)
    require_matplotlib()
    args.out.mkdir(parents=True, exist_ok=True)

    cells = dict.fromkeys(cell for figure in figures for cell in figure.cells(scale))
    with metered("replay", len(cells)) as meter:
        samples = measure(cells, args.jobs or num_usable_cores(), meter.advance)
    numbers = {}
    with metered("draw", len(figures)) as meter:
        for figure in figures:
            numbers[figure.id] = figure.numbers(scale, samples)
            write_figure(args.out, figure, scale, numbers[figure.id])
            meter.advance(1)
    write_page(args.out, FIGURES)
    if args.json is not None:
        write(args.json, {"seed": scale.seed, "figures": numbers})
    took_s = time.monotonic() - start_s
    drawn = f"{len(figures)} figure{'' if len(figures) == 1 else 's'}"
    print(f"{PROGRAM}: {drawn} in {args.out}, {len(cells)} replays, {took_s:.0f} s", file=sys.stderr)
    return 0
