"""What one eviction costs as the tree grows: the choice of a victim, its removal, and telling the rule what changed.

For each rule and size: conversations under shared system prompts fill a cache until its tree has so many nodes; from
then on the budget is what is held, so about every request evicts once. Timed is the cache's own way of shrinking, in
processor time, with the garbage collector off (as `timeit` does). Before and after, every victim is held against the
rule's definition, which looks at each evictable node (`test/policy/brute_order.py`); where one differs, no figure is
printed.

Read the ratios: `of first` is the median over that of the smallest size, `of log n` the same divided by the growth of
log n; 1 or less is a cost that grows no faster than log n. `scan` is what the definition takes for one victim.

    python benchmark/victim.py [--sizes N,N,...] [--rules NAME,NAME,...] [--num-victims N] [--json FILE]
"""

import argparse
import gc
import importlib.util
import json
import math
import platform
import random
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from marconi.policy.admission.plan import Judicious
from marconi.policy.base import Costs, Eviction, Need, NodeView
from marconi.policy.eviction.lru import SeparateLru
from marconi.policy.eviction.utility import UtilityEviction
from marconi.policy.request import Request, pack
from marconi.tree import RadixTree
from marconi_lab.eviction.joint_lru import JointLru
from marconi_lab.eviction.seglen import SegmentLengthEviction
from rig.budget_cache import BudgetCache, JointBudget, SplitBudget

RESULTS = Path(__file__).parent / "results"
SIZES = (1_000, 10_000, 100_000, 1_000_000)
SEED = 1
UNIT_TOKENS = 64
MAX_SCANNED_NODES = 3_000_000
"""Of each rule at each size: how many nodes the definition may look at in all, three victims at least."""


def _definitions() -> ModuleType:
    path = Path(__file__).parents[1] / "test" / "policy" / "brute_order.py"
    spec = importlib.util.spec_from_file_location("brute_order", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _flops(num_tokens: int) -> float:
    """The paper's 7B hybrid: 4 attention, 24 SSM and 28 MLP layers, width 4096, state 128."""
    width, state = 4096, 128
    linear = 4 * 8 * width**2 + 28 * 16 * width**2 + 24 * (12 * width**2 + 16 * width * state + 10)
    return num_tokens * (linear + 4 * 4 * width * num_tokens)


COSTS = Costs(kv_bytes_per_token=4 * 4 * 4096, state_bytes=24 * 2 * 4096 * 128, flops=_flops)
ALPHA = 1.0
TWO_POOLS = frozenset({Need.KV, Need.STATE})
DEFINITIONS = _definitions()


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule, its definition, and whether KV and states have a pool each."""

    eviction: Callable[[], Eviction]
    order: Callable[[], Any]
    two_pools: bool = False


RULES = {
    "lru": Rule(lambda: SeparateLru(TWO_POOLS), DEFINITIONS.SeparateLruOrder, two_pools=True),
    "lru-joint": Rule(JointLru, DEFINITIONS.JointLruOrder),
    "marconi": Rule(lambda: UtilityEviction(COSTS, ALPHA), lambda: DEFINITIONS.UtilityOrder(COSTS, ALPHA)),
    "seglen": Rule(SegmentLengthEviction, lambda: DEFINITIONS.SegmentLengthOrder(1.0)),
}


class VictimDiffers(Exception):
    """A rule named another victim than its definition does."""


class Checked:
    """A rule, each of whose victims is held against the definition; all else is the rule's own."""

    def __init__(self, rule: Eviction, order: Any, tree: RadixTree) -> None:
        for name in vars(Eviction):
            if not name.startswith("_"):
                setattr(self, name, getattr(rule, name))
        self.rule, self.order, self.tree = rule, order, tree
        self.scans_us: list[float] = []
        self.victim = self._victim

    def _victim(self, need: Need, now_s: float) -> NodeView | None:
        """The rule's victim; raises `VictimDiffers` if it is not the definition's."""
        most = 0 if need is Need.KV else self.rule.scope.value
        start = time.process_time()
        nodes = [node for node in self.tree.nodes() if node.has_state and not node.num_locks]
        expected = self.order.least(need, now_s, [node for node in nodes if node.num_children <= most])
        self.scans_us.append((time.process_time() - start) * 1e6)
        found = self.rule.victim(need, now_s)
        if found is not expected:
            raise VictimDiffers(f"{found} for {need.value}, but by definition {expected}")
        return found


class TimedCache(BudgetCache):
    """A cache that writes down what each of its evictions took."""

    evictions_us: list[float]

    def _shrink(self, now_s: float) -> bool:
        num_before = sum(self.counters.num_evictions.values())
        start = time.process_time()
        fits = super()._shrink(now_s)
        elapsed_us = (time.process_time() - start) * 1e6
        if num_evicted := sum(self.counters.num_evictions.values()) - num_before:
            self.evictions_us += [elapsed_us / num_evicted] * num_evicted
        return fits


def conversations(num_sessions: int, seed: int) -> Iterator[Request]:
    """Without end, one a second: a random session's next turn, after 16 of them a new session's first."""
    rng = random.Random(seed)  # noqa: S311 - a workload, not a secret
    num_prompts = 64
    prompts = [pack(range(8 * index, 8 * index + rng.randint(2, 8))) for index in range(num_prompts)]
    next_id = 8 * num_prompts
    sessions: dict[int, tuple[bytes, int]] = {}
    now_s = 0.0
    while True:
        now_s += 1.0
        session = rng.randrange(num_sessions)
        path, turn = sessions.get(session, (rng.choice(prompts), 0))
        num_units = rng.randint(2, 8)
        path += pack(range(next_id, next_id + num_units))
        next_id += num_units
        num_tokens = len(path) // 4 * UNIT_TOKENS
        yield Request(path, num_tokens - UNIT_TOKENS, UNIT_TOKENS, num_tokens, now_s, session, turn)
        sessions[session] = (path, turn + 1)
        if turn == 15:
            del sessions[session]


@dataclass(frozen=True, slots=True)
class Figures:
    """One rule at one size: times in microseconds a victim."""

    num_nodes: int
    num_timed: int
    median_us: float
    p99_us: float
    num_checked: int
    scan_us: float
    peak_memory_mb: int
    """Of the process, up to here."""


def measure(rule: Rule, num_nodes: int, num_victims: int, seed: int = SEED) -> Figures:
    """Fill, check, time, check; raises `VictimDiffers`."""
    gc.disable()
    try:
        tree = RadixTree(UNIT_TOKENS, max_ghosts=num_nodes // 4)
        eviction = rule.eviction()
        endless = 1 << 62
        budget = SplitBudget(endless, endless) if rule.two_pools else JointBudget(endless)
        cache = TimedCache(tree, Judicious(UNIT_TOKENS), eviction, COSTS, budget)
        cache.evictions_us = []
        requests = conversations(max(1, num_nodes // 8), seed)
        while tree.num_nodes < num_nodes:
            cache.serve(next(requests))
        kv_bytes, state_bytes = tree.num_tokens * COSTS.kv_bytes_per_token, tree.num_states * COSTS.state_bytes
        cache.budget = SplitBudget(kv_bytes, state_bytes) if rule.two_pools else JointBudget(cache.num_bytes)

        checked = Checked(eviction, rule.order(), tree)
        num_checked = min(200, max(3, MAX_SCANNED_NODES // num_nodes))

        def check(num: int) -> None:
            cache.eviction = cast(Eviction, checked)
            until = len(checked.scans_us) + num
            while len(checked.scans_us) < until:
                cache.serve(next(requests))
            cache.eviction = eviction

        check(num_checked - num_checked // 2)
        cache.evictions_us = []
        while len(cache.evictions_us) < num_victims:
            cache.serve(next(requests))
        times_us = sorted(cache.evictions_us)
        check(num_checked // 2)
        return Figures(
            num_nodes=tree.num_nodes,
            num_timed=len(times_us),
            median_us=statistics.median(times_us),
            p99_us=times_us[math.ceil(0.99 * len(times_us)) - 1],
            num_checked=len(checked.scans_us),
            scan_us=statistics.median(checked.scans_us),
            peak_memory_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        )
    finally:
        gc.enable()
        gc.collect()


def table_of(results: dict[str, dict[int, Figures]]) -> Table:
    """A row a rule and size."""
    caption = "times in us a victim, scans in ms; every checked victim is the definition's"
    table = Table(title="one eviction", caption=caption, box=SIMPLE, pad_edge=False)
    table.add_column("rule", no_wrap=True)
    for column in ("nodes", "median", "p99", "of first", "of log n", "checked", "scan ms"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, by_size in results.items():
        first_size, first = next(iter(by_size.items()))
        for size, figures in by_size.items():
            ratio = figures.median_us / first.median_us
            table.add_row(
                name if size == first_size else "",
                f"{size:,}",
                f"{figures.median_us:.1f}",
                f"{figures.p99_us:.1f}",
                f"{ratio:.2f}",
                f"{ratio / (math.log(size) / math.log(first_size)):.2f}",
                str(figures.num_checked),
                f"{figures.scan_us / 1e3:,.1f}",
            )
        table.add_section()
    return table


def to_json(args: argparse.Namespace, results: dict[str, dict[int, Figures]]) -> dict[str, Any]:
    """The result file."""
    return {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "seed": SEED,
        "num_victims": args.num_victims,
        "rules": {
            name: {str(size): asdict(figures) for size, figures in by_size.items()} for name, by_size in results.items()
        },
    }


def sizes(text: str) -> list[int]:
    """Rising numbers of nodes, 10 or more each; `ValueError` otherwise."""
    found = [int(part) for part in text.split(",")]
    if min(found) < 10:
        raise ValueError
    return sorted(set(found))


def rules(text: str) -> list[str]:
    """Names of rules; `ValueError` for an unknown one."""
    names = text.split(",")
    if unknown := set(names) - RULES.keys():
        raise argparse.ArgumentTypeError(f"rules must be of {', '.join(RULES)}, got {', '.join(sorted(unknown))}")
    return names


def main(argv: list[str] | None = None) -> int:
    """Run, print and write; exit status 1 if a victim differs from the definition's, 2 for bad input."""
    parser = argparse.ArgumentParser(description="The cost of one eviction by the size of the tree.")
    parser.add_argument("--sizes", type=sizes, default=list(SIZES), metavar="N,N,...", help="nodes, 10 or more each")
    parser.add_argument("--rules", type=rules, default=list(RULES), metavar="NAME,...", help=", ".join(RULES))
    parser.add_argument("--num-victims", type=int, default=5000, metavar="N", help="timed at each size (default: 5000)")
    parser.add_argument("--json", type=Path, default=RESULTS / "victim.json", metavar="FILE")
    args = parser.parse_args(argv)
    if args.num_victims < 1:
        parser.error(f"--num-victims {args.num_victims}: give 1 or more")
    console = Console()
    results: dict[str, dict[int, Figures]] = {name: {} for name in args.rules}
    # The smallest first, so that the peak of the memory is that of the size at hand.
    for size in args.sizes:
        for name in args.rules:
            with console.status(f"{name}, {size:,} nodes"):
                try:
                    results[name][size] = measure(RULES[name], size, args.num_victims)
                except VictimDiffers as error:
                    print(f"victim.py: error: {name} at {size} nodes: {error}", file=sys.stderr)
                    return 1
    console.print(table_of(results))
    peak_mb = max(figures.peak_memory_mb for by_size in results.values() for figures in by_size.values())
    console.print(f"peak memory {peak_mb} MB", highlight=False)
    try:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(to_json(args, results), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"victim.py: error: {error}", file=sys.stderr)
        return 2
    console.print(f"written to {args.json}", highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
