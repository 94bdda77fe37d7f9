"""A plan: how to divide memory between KV and states, and by which rule to evict, for one kind of traffic.

Candidates, each replayed on the trace as a server would serve it (`server.py`: the slots that a request works on, steps
and speculative states included), for each amount of memory:

    stock SGLang       `lru`, its two pools at ratios of bytes for states over bytes for KV, 0.9 being its default
    this project       its default rule in one pool, to see what a division costs, and in two at the same ratios
    with int8          that in two pools at fewer ratios, with checkpoints in int8, where a server offers them

A model without states has no two pools, and its cache stays SGLang's own. A host tier has two pools on the host, at the
device's ratio or, below one pool, at 0.9.

The best is the one that recomputes fewest tokens; among those within `TIE` of its hit rate the first in the order
above, so that nothing is changed for nothing. Checkpoints in int8 are never the best, since answers that resume from
one may differ: a line of its own says what they would win, if that is `LEAST_GAIN` or more. A verdict in five lines
follows (`verdict.py`).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from rich.console import Group, RenderableType

from marconi.model.serving import SERVED, Serving
from marconi.plan.verdict import (
    DEFAULT,
    LEAST_GAIN,
    Beside,
    Cards,
    Point,
    Verdict,
    alone,
    fewer,
    halves,
    sizes,
)
from marconi.policy.catalog import SGLANG_MAMBA_RATIO, PolicySpec
from marconi.replay.grid import Cell, num_replays, report_of, run_grids
from marconi.replay.memory import format_bytes
from marconi.replay.progress import metered
from marconi.replay.report import tables
from marconi.replay.result import Percentiles, PolicyResult, Report
from marconi.replay.scheduling import NUM_TRACKING_SLOTS
from marconi.replay.store import Storage
from marconi.replay.task import ReplayInputs, Task

STOCK: Final = PolicySpec("lru")
RATIOS: Final = (SGLANG_MAMBA_RATIO, 0.05, 0.1, 0.2, 0.4, 1.8, 3.6)
"""SGLang's default first."""
INT8_RATIOS: Final = (SGLANG_MAMBA_RATIO, 0.1, 0.2, 0.4)
"""With checkpoints in int8, whose states take a half or less of the bytes."""
NUM_SLOTS: Final = 1 + NUM_TRACKING_SLOTS + 1
"""Slots of a request: its working slots, and the state that it resumes from."""
ONE_POOL: Final = "--enable-unified-memory"
INT8: Final = "--enable-int8-mamba-checkpoint"
TIE: Final = 0.002
"""Token hit rate below which a difference is none."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that one request of the trace takes to be served, in one pool: its KV and `NUM_SLOTS` states."""

    smallest_bytes: int
    largest_bytes: int

    @classmethod
    def of(cls, inputs: ReplayInputs) -> "Needs":
        """Over the requests that could leave a state; 0 bytes if none could."""
        unit, costs = inputs.trace.unit_tokens, inputs.costs
        sizes = [
            -(-request.num_processed_tokens // unit) * unit * costs.kv_bytes_per_token + NUM_SLOTS * costs.state_bytes
            for request in inputs.trace.requests
            if request.last_known_depth(unit)
        ]
        return cls(min(sizes, default=0), max(sizes, default=0))


@dataclass(frozen=True, slots=True)
class Contender:
    """Servers that share the cards of several ranks, and what they serve by the clock."""

    num_servers: int
    memory_bytes: int
    """Memory of one rank for its cache."""
    token_hit_rate: float
    ttft_s: Percentiles

    def to_json(self) -> dict[str, Any]:
        """Convert to the result file's JSON."""
        return {
            "num_servers": self.num_servers,
            "memory_bytes": self.memory_bytes,
            "token_hit_rate": self.token_hit_rate,
            "ttft_s": self.ttft_s.to_json(),
        }


@dataclass(frozen=True, slots=True)
class Advice:
    """The configuration for one amount of memory, and its gain over stock SGLang with its defaults."""

    memory_bytes: int
    default: PolicyResult
    """Stock SGLang at its default ratio."""
    stock: PolicyResult
    """Stock SGLang at the best ratio."""
    split: PolicyResult | None
    """The best with two pools; None for a model without states, which has no two."""
    best: PolicyResult | None
    """The best of all; None where every request is too large for every candidate."""
    needs: Needs
    alone: PolicyResult | None = None
    """This project's default without a flag that divides memory; None if it is no candidate."""
    ours: PolicyResult | None = None
    """This project's default, best divided."""
    layouts: tuple[Contender, ...] = ()
    """With several ranks: one server, and as many servers as ranks if the model fits on one card."""
    int8: PolicyResult | None = None
    """The best with checkpoints in int8; None where none was tried."""
    serving: Serving = SERVED

    @classmethod
    def of(
        cls,
        tried: Sequence[PolicyResult],
        needs: Needs,
        alone: Task | None = None,
        serving: Serving = SERVED,
    ) -> "Advice":
        """From the runs of one amount of memory, in the order of the candidates; `alone` is one of them."""
        runs = [run for run in tried if not run.int8_checkpoints]
        in_int8 = [run for run in tried if run.int8_checkpoints]
        stock = [run for run in runs if run.policy == str(STOCK)]
        split = [run for run in runs if run.mamba_full_memory_ratio is not None]
        ours = [run for run in runs if run.policy == str(DEFAULT)]
        fits = any(run.num_states_written for run in runs) or not any(run.num_too_large for run in runs)
        return cls(
            memory_bytes=runs[0].memory_bytes,
            default=stock[0],
            stock=_first_best(stock),
            split=_first_best(split) if split else None,
            best=_first_best(runs) if fits else None,
            needs=needs,
            alone=next((run for run in runs if alone is not None and _is_of(run, alone)), None),
            ours=_first_best(ours) if ours else None,
            int8=_first_best(in_int8) if in_int8 else None,
            serving=serving,
        )

    @property
    def sentences(self) -> tuple[str, ...]:
        """Say it in words, with the flags of SGLang."""
        memory, best, split = format_bytes(self.memory_bytes), self.best, self.split
        if self.serving.why_not is not None:
            return (f"{memory}: nothing is advised: {self.serving.why_not}.",)
        if best is None:
            smallest, largest = map(format_bytes, (self.needs.smallest_bytes, self.needs.largest_bytes))
            return (
                f"{memory}: nothing fits, whatever the policy: every request is too large.",
                f"In one pool the smallest request needs {smallest} (its KV and {NUM_SLOTS} states), "
                f"the largest {largest}.",
            )
        lines = [f"{memory}: stock SGLang as it comes hits {_rates(self.default)}."]
        if split is None:
            lines.append("The model keeps no states: there is no split to choose.")
        if self.stock is not self.default:
            lines.append(f"Stock SGLang is best{self._flags(self.stock)}: {_gain(self.stock, self.default)}.")
        if best is self.default:
            lines.append("Nothing that was tried is better: keep it.")
        elif best is not self.stock:
            lines.append(f"Best: policy {best.policy}{self._flags(best)}: {_gain(best, self.default)}.")
        if split is not None and split is not best and split is not self.stock:
            lines.append(f"With two pools: policy {split.policy}{self._flags(split)}: {_gain(split, self.default)}.")
        if self.int8 is not None and fewer(self.int8, best) >= LEAST_GAIN:
            lines.append(
                f"With {INT8} at {self._all_flags(self.int8)} it would hit {_rates(self.int8)}, "
                f"{100 * fewer(self.int8, best):.1f} % fewer tokens recomputed than the best that is exact (answers "
                "that resume from a rounded state may differ)."
            )
        return (*lines, *self.of_layouts())

    def of_layouts(self) -> Iterator[str]:
        """Compare the layouts in a sentence, where there are some."""
        if not self.layouts:
            return
        together, *others = self.layouts
        if not others:
            yield "One card does not hold all weights and a request: one server is the only layout."
            return
        (apart,) = others
        several = f"{apart.num_servers} servers"
        sooner = several if apart.ttft_s.p95 < together.ttft_s.p95 else "One server"
        yield (
            f"By the clock, one server hits {_rates(together)}; {several} of one rank behind a router, "
            f"{format_bytes(apart.memory_bytes)} each, hit {_rates(apart)}. {sooner} would answer sooner."
        )

    def to_json(self) -> dict[str, Any]:
        """Convert to the result file's JSON."""
        best = self.best
        return {
            "memory_bytes": self.memory_bytes,
            "policy": None if best is None else best.policy,
            "mamba_full_memory_ratio": None if best is None else best.mamba_full_memory_ratio,
            "sglang_flags": self._sglang_flags(),
            "token_hit_rate": (best or self.default).token_hit_rate,
            "stock_token_hit_rate": self.default.token_hit_rate,
            "layouts": [layout.to_json() for layout in self.layouts],
            "sentences": list(self.sentences),
        }

    @property
    def point(self) -> Point | None:
        """The runs that the verdict compares; None where nothing fits."""
        if self.alone is None or self.best is None:
            return None
        return Point(self.default, self.alone, self.ours or self.alone, flags(self.ours or self.alone))

    def _flags(self, run: PolicyResult) -> str:
        if self.split is None:
            return ""
        pool = " in one pool" if run.mamba_full_memory_ratio is None else ""
        return f"{pool} with {self._all_flags(run)}"

    def _sglang_flags(self) -> str | None:
        if self.best is None or self.split is None or self.serving.why_not is not None:
            return None
        return self._all_flags(self.best)

    def _all_flags(self, run: PolicyResult) -> str:
        demanded = "" if run.policy == str(STOCK) else self.serving.flags
        return " ".join(filter(None, (flags(run), demanded)))


@dataclass(frozen=True, slots=True)
class Plan:
    """Every candidate's run, and the advice for each amount of memory."""

    report: Report
    advice: tuple[Advice, ...]
    beside: Beside
    host_bytes: int = 0
    """Memory of the host tier; 0 without one."""

    @property
    def verdict(self) -> Verdict:
        """The answer in five lines, or six with storage."""
        points = (advice.point for advice in self.advice)
        layouts = tuple(line for advice in self.advice for line in advice.of_layouts())
        return Verdict(self.beside, tuple(point for point in points if point is not None), layouts)

    def to_json(self) -> dict[str, Any]:
        """Convert to the result file's JSON: a report's fields, the advice, the runs with storage and the verdict."""
        advice = [each.to_json() for each in self.advice]
        stored = [run.to_json(timings=False) for run in self.beside.stored]
        with_storage = {"with_storage": stored} if stored else {}
        return {**self.report.to_json(), "advice": advice, **with_storage, "verdict": list(self.verdict.lines)}


def make_plan(
    inputs: ReplayInputs,
    memories_bytes: Sequence[int],
    unbounded_bytes: int | None,
    num_processes: int,
    host_bytes: int = 0,
    storage: Storage | None = None,
) -> Plan:
    """Replay every candidate at every amount of memory, with a host tier of `host_bytes` below it unless that is 0.

    With `storage` the default alone is also replayed with that behind the host.
    """
    serving = inputs.model.serving
    planned = serving.has_planned_states
    grids = [
        [
            Cell.of(replace(task, host_bytes=host_bytes))
            for task in candidates(
                num_bytes,
                inputs.has_states,
                has_one_pool=planned,
                has_int8=planned and not host_bytes and inputs.has_int8_checkpoints,
            )
        ]
        for num_bytes in memories_bytes
    ]
    grid = [cell for cells in grids for cell in cells]
    num_ranks = inputs.model.tensor_parallel
    amounts = sizes(memories_bytes, host_bytes, has_planned_states=planned) if inputs.has_states else ()
    with_storage = [
        replace(alone(num_bytes, host_bytes, has_planned_states=planned), storage=storage)
        for num_bytes in memories_bytes
        if storage is not None
    ]
    others = [Cell.of(task) for task in (*amounts, *with_storage)]
    parts = halves(inputs) if inputs.has_states else ()
    half_bytes = min(memories_bytes) // 2, host_bytes // 2
    pair = [Cell.of(task) for task in _of_half(*half_bytes, has_planned_states=planned)]
    num_requests = len(inputs.trace.requests)
    with metered("plan", (num_replays([*grid, *others]) + 2 * bool(parts)) * num_requests) as meter:
        cells_of = [(inputs, [*grid, *others]), *((part, pair) for part in parts)]
        runs, *of_halves = run_grids(cells_of, num_processes, meter.advance)
    num_grid, num_sizes = len(grid), len(grid) + len(amounts)
    runs, of_sizes, stored = runs[:num_grid], runs[num_grid:num_sizes], runs[num_sizes:]
    report = report_of(inputs, unbounded_bytes, runs, num_processes)
    size, needs = len(grids[0]), Needs.of(inputs)
    cards = Cards.of(inputs, needs.smallest_bytes)
    if cards is None and inputs.device.memory_bytes and serving.why_not is None:
        serving = replace(serving, why_not=f"its weights (16 bits) do not fit 64 cards ({inputs.device.name})")
    advice = tuple(
        Advice.of(
            runs[index * size : (index + 1) * size],
            needs,
            alone(num_bytes, host_bytes, has_planned_states=planned),
            serving,
        )
        for index, num_bytes in enumerate(memories_bytes)
    )
    pairs = tuple((stock, ours) for stock, ours in of_halves)
    is_hybrid = inputs.model.state_bytes > 0
    beside = Beside(inputs.trace, is_hybrid, num_ranks, of_sizes, pairs, serving, cards, inputs.remarks, stored)
    return Plan(report, advice, beside, host_bytes)


def _of_half(memory_bytes: int, host_bytes: int, *, has_planned_states: bool) -> tuple[Task, Task]:
    """Stock SGLang and this project's default, in half the memory."""
    ours = alone(memory_bytes, host_bytes, has_planned_states=has_planned_states)
    return Task(STOCK, memory_bytes, RATIOS[0], host_bytes), ours


def _is_of(run: PolicyResult, task: Task) -> bool:
    return run.policy == str(task.policy) and run.mamba_full_memory_ratio == task.mamba_ratio


def candidates(
    memory_bytes: int,
    has_states: bool = True,
    *,
    has_one_pool: bool = True,
    has_int8: bool = False,
) -> tuple[Task, ...]:
    """List the candidates that a server supports, in order of preference among equals."""
    if not has_states:
        return (Task(STOCK, memory_bytes),)
    stock = [Task(STOCK, memory_bytes, ratio) for ratio in RATIOS]
    ratios = (None, *RATIOS) if has_one_pool else RATIOS
    ours = [Task(DEFAULT, memory_bytes, ratio) for ratio in ratios]
    of_int8 = INT8_RATIOS if has_int8 else ()
    return (*stock, *ours, *(Task(DEFAULT, memory_bytes, ratio, int8_checkpoints=True) for ratio in of_int8))


def flags(run: PolicyResult) -> str:
    """SGLang's flags for the memory of a run, of a model with states."""
    ratio = run.mamba_full_memory_ratio
    return ONE_POOL if ratio is None else f"--mamba-full-memory-ratio {ratio:g}"


def render(plan: Plan) -> RenderableType:
    """The tables, and the advice below them."""
    advice = (line for advice in plan.advice for line in (*advice.sentences, ""))
    return Group(tables(plan.report), *advice, *plan.verdict.lines)


def _first_best(runs: Sequence[PolicyResult]) -> PolicyResult:
    best = max(run.token_hit_rate for run in runs)
    return next(run for run in runs if run.token_hit_rate >= best - TIE)


def _rates(run: PolicyResult | Contender) -> str:
    return f"{100 * run.token_hit_rate:.1f} % of the prompt tokens (P95 TTFT {run.ttft_s.p95:.3g} s)"


def _gain(run: PolicyResult, default: PolicyResult) -> str:
    return f"{_rates(run)}, {100 * fewer(run, default):.1f} % fewer tokens recomputed"
