"""The picture of a tree as it grows: a snapshot's and its JSON's time, and the page's first draw and refresh.

For each size: random conversations fill a tree, some of which is evicted again and stays as ghosts. A snapshot is timed
without hashes of an earlier one, those of a server that hashes a part of the tree's prefixes (`first`) and those of a
replay, which hashes all of them (`whole`), and with the hashes (`later`), in milliseconds of processor time, with the
garbage collector on. All rank the states in the order of `best`; `unranked` is a later one that does not. `longest` is
the longest call of a server's scheduler: of a later snapshot in slices, the last three of which rank the states, make
the columns and write the JSON.

Then a page of three frames is opened in headless Chromium, which says itself (`performance.now`) when it had drawn the
first, counted from the start of its loading, what a step of the slider took, and when it was on the screen (`painted`,
which waits for two frames of the screen, 33 ms). Medians of `--repeats` runs. Without Chromium or playwright the page
is not measured.

    python benchmark/view.py [--sizes N,N,...] [--repeats N] [--json FILE]
"""

import argparse
import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from marconi.policy.base import Costs
from marconi.policy.eviction.best import BestEviction
from marconi.policy.eviction.order import Order
from marconi.policy.forecast.forecast import Forecast
from marconi.tree import Node, RadixTree
from marconi.view.document import document
from marconi.view.frame import Frame, PoolFrame
from marconi.view.snapshot import MAX_HASHED_BYTES, PrefixHashes, Walk, snapshot
from marconi.view.standing import Standing

CHROMIUM = Path("/usr/bin/chromium")
ARGUMENTS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
NUM_FRAMES = 3
NOW_S = 7200.0
SLICE_NODES = 1_500
MEASURES = "performance.getEntriesByType('measure').map((each) => [each.name, each.duration])"
STEP = """async (step) => {
    const start = performance.now(), time = document.getElementById("time");
    time.value = step;
    time.dispatchEvent(new Event("input"));
    for (let each = 0; each < 2; each++) await new Promise(requestAnimationFrame);
    return performance.now() - start;
}"""


def grown(num_nodes: int, seed: int = 0) -> RadixTree:
    """A tree of `num_nodes` or a few more nodes: conversations that go on or branch, a fifth of them evicted."""
    random = np.random.default_rng(seed)
    tree = RadixTree(max_ghosts=num_nodes)
    paths: list[bytes] = []
    states: list[Node] = []

    def drawn(low: int, high: int) -> bytes:
        return random.integers(0, 1 << 17, int(random.integers(low, high)), dtype="<u4").tobytes()

    while tree.num_nodes + len(tree.ghosts) < num_nodes:
        if paths and random.random() < 0.85:
            before = paths[int(random.integers(max(0, len(paths) - 3000), len(paths)))]
            share = 1.0 if random.random() < 0.5 else random.random()
            path = before[: int(len(before) // 4 * share) * 4] + drawn(20, 400)
        else:
            path = drawn(100, 2000)
        num_seen = tree.match(path, len(path) // 4 - 1).num_seen_tokens
        states += tree.insert(path, sorted({num_seen, len(path) // 4} - {0}))
        paths.append(path)
        if random.random() < 0.2:
            node = states[int(random.integers(len(states)))]
            if node.has_state:
                tree.evict(node)
        tree.take_changed()
    return tree


def ordered(tree: RadixTree, seed: int = 0) -> Order:
    """The states of `tree` in the order of `best`, last used at random in the hour before `NOW_S`."""
    random = np.random.default_rng(seed)
    order = Order(BestEviction(Costs(24576, 77266944, float), Forecast()))
    for node in tree.nodes():
        if node.has_state:
            node.last_hit_s = node.last_pass_s = float(random.uniform(NOW_S - 3600, NOW_S))
            order.update(node)
    return order


def frame_of(tree: RadixTree, order: Order, time_s: float) -> Frame:
    """A frame with the nodes of `tree`, and numbers that are of no matter."""
    pool = PoolFrame("memory", "bytes", 1 << 40, 1 << 39, {"KV": 1 << 38, "states": 1 << 38})
    return Frame(
        time_s, 1, 24576, 77266944, [pool], snapshot(tree, standing=Standing(order, NOW_S)), 60, {"missed": 40}, 0, []
    )


def longest_call_ms(tree: RadixTree, order: Order, hashes: PrefixHashes) -> float:
    """Milliseconds of the longest of the calls in which a scheduler makes a frame."""
    walk, columns, longest_s, is_encoded = Walk(tree, hashes, standing=Standing(order, NOW_S)), None, 0.0, False
    while not is_encoded:
        start_s = time.process_time()
        if columns is not None:
            is_encoded = bool(msgspec.json.encode(columns))
        elif walk.advance(SLICE_NODES):
            columns = walk.columns()
        longest_s = max(longest_s, time.process_time() - start_s)
    return 1000 * longest_s


def snapshots_ms(tree: RadixTree, order: Order, repeats: int) -> dict[str, float]:
    """Milliseconds of a server's first, of a whole, of a later and of an unranked snapshot, of calls, and of JSON."""
    first, whole, later, unranked, longest, encode, payload = [], [], [], [], [], [], b""
    for _ in range(repeats):
        hashes = PrefixHashes(tree)
        for times, known, max_hashed_bytes, is_ranked in (
            (first, PrefixHashes(tree), MAX_HASHED_BYTES, True),
            (whole, hashes, math.inf, True),
            (unranked, hashes, math.inf, False),
            (later, hashes, math.inf, True),
        ):
            start_s = time.process_time()
            columns = snapshot(tree, known, max_hashed_bytes, Standing(order, NOW_S) if is_ranked else None)
            times.append(1000 * (time.process_time() - start_s))
        longest.append(longest_call_ms(tree, order, hashes))
        start_s = time.process_time()
        payload = msgspec.json.encode(columns)
        encode.append(1000 * (time.process_time() - start_s))
    return {
        "first_snapshot_ms": statistics.median(first),
        "whole_snapshot_ms": statistics.median(whole),
        "later_snapshot_ms": statistics.median(later),
        "unranked_snapshot_ms": statistics.median(unranked),
        "longest_call_ms": statistics.median(longest),
        "json_ms": statistics.median(encode),
        "json_bytes": len(payload),
    }


def page_ms(tree: RadixTree, order: Order, repeats: int) -> dict[str, float]:
    """Milliseconds until the page had drawn its last frame, and of a step to another; empty without a browser."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        return {}
    if not CHROMIUM.exists():
        return {}
    draws, refreshes, painted = [], [], []
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "page.html"
        path.write_text(document("benchmark", [frame_of(tree, order, float(each)) for each in range(NUM_FRAMES)]))
        for repeat in range(repeats):
            context = playwright.chromium.launch_persistent_context(
                str(Path(folder) / f"user-{repeat}"),
                executable_path=str(CHROMIUM),
                args=ARGUMENTS,
                viewport={"width": 1400, "height": 900},
            )
            page = context.new_page()
            page.goto(path.as_uri())
            painted += [page.evaluate(STEP, step) for step in (0, 1, 2, 1)]
            measured = page.evaluate(MEASURES)
            draws += [each for name, each in measured if name == "marconi-first-draw"]
            # The first one is part of the first draw.
            refreshes += [each for name, each in measured if name == "marconi-refresh"][1:]
            context.close()
    return {
        "first_draw_ms": statistics.median(draws),
        "refresh_ms": statistics.median(refreshes),
        "painted_ms": statistics.median(painted),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description="What the picture of a tree costs.")
    parser.add_argument("--sizes", default="1000,10000,100000", metavar="N,N,...", help="nodes")
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    args = parser.parse_args(argv)
    figures: dict[str, dict[str, float]] = {}
    for size in sorted(map(int, args.sizes.split(","))):
        tree = grown(size)
        order = ordered(tree)
        figures[str(size)] = {**snapshots_ms(tree, order, args.repeats), **page_ms(tree, order, args.repeats)}
    names = [*next(iter(figures.values()))]
    table = Table("nodes", *(name.replace("_", " ") for name in names))
    for size_text, each in figures.items():
        table.add_row(f"{int(size_text):,}", *(f"{each[name]:,.1f}" for name in names))
    Console().print(table)
    if not any("first_draw_ms" in each for each in figures.values()):
        print("view: no page was drawn, which needs playwright and /usr/bin/chromium", file=sys.stderr)
    if args.json is not None:
        report: dict[str, Any] = {"python": sys.version.split()[0], "sizes": figures}
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
