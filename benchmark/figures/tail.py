"""Tables 1 to 3 of the T-LRU paper: what it wins over LRU and over Threshold-LRU, by capacity and latency budget.

Capacities are the paper's, in tokens of KV; a budget of so many ms is turned into the uncached tokens that this
project's cost model computes in that time. All rules cut conversations block by block, as attention-only models allow.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, Final

from marconi.replay.trace import preset

from .base import Claim, Figure, Numbers, Scale
from .canvas import Canvas
from .cells import Cell, Sample
from .setups import CHAT_BLOCK_TOKENS, chat_budget_tokens, chat_host, chat_scene

CAPACITIES: Final = (1000, 2000, 4000, 6000, 8000, 10000)
BUDGETS_MS: Final = (50, 100, 150, 200, 500)
SLO_MS: Final = 200
BLOCKWISE: Final = f"@every-block:{CHAT_BLOCK_TOKENS}"
LRU: Final = f"lru-joint{BLOCKWISE}"
THRESHOLD_LRU: Final = f"threshold-lru:1024{BLOCKWISE}"
_SET_UP: Final = (
    "workload `wildchat` cut to Vicuna-7B's context of 4,096 tokens, a conversation every 10 s, 60 s between turns, "
    "one A100, times by this project's cost model"
)


def tail_policy(name: str, budget_ms: int) -> str:
    """A rule of the T-LRU family with a budget."""
    return f"{name}:{chat_budget_tokens(budget_ms)}{BLOCKWISE}"


def tail_cell(scale: Scale, policy: str, capacity_tokens: int) -> Cell:
    """A rule with so many tokens of KV."""
    host = chat_host()
    return Cell(chat_scene(scale), host, policy, capacity_tokens * host.model.kv_bytes_per_token)


def _tlru(budget_ms: int) -> str:
    return tail_policy("tlru", budget_ms)


def win_percent(base: float, ours: float) -> float:
    """By how many percent ours is lower; 0 where there is nothing to lower."""
    return round(100 * (1 - ours / base), 1) if base else 0.0


class TailTable(Figure):
    """A table by capacity and budget."""

    def cells(self, scale: Scale) -> Sequence[Cell]:
        """Both baselines, and T-LRU with every budget."""
        policies = (LRU, THRESHOLD_LRU, *map(_tlru, BUDGETS_MS))
        return [tail_cell(scale, policy, capacity) for capacity in CAPACITIES for policy in policies]

    def draw(self, numbers: Numbers, canvas: Canvas) -> None:
        """The table, wins green and losses red."""
        rows = [
            [f"{capacity:,}", *(f"{value:+.1f}" for value in wins)]
            for capacity, wins in zip(numbers["capacity_tokens"], numbers["win_percent"], strict=True)
        ]
        shades = [[None, *(value / 30 for value in wins)] for wins in numbers["win_percent"]]
        canvas.panels[0].table(["tokens", *numbers["columns"]], rows, shades)

    @staticmethod
    def _column(numbers: Numbers, ending: str) -> list[float]:
        """All values of the columns whose names end so."""
        indices = [index for index, name in enumerate(numbers["columns"]) if name.endswith(ending)]
        return [wins[index] for wins in numbers["win_percent"] for index in indices]


class LatencyTable(TailTable):
    """Relative percentiles."""

    baseline: ClassVar[str]

    def numbers(self, scale: Scale, samples: Mapping[Cell, Sample]) -> Numbers:
        """Percent by which T-LRU's percentile is lower than the baseline's."""
        columns = [(budget, percent) for budget in BUDGETS_MS for percent in (90, 95)] + [(BUDGETS_MS[-1], 99)]
        wins = []
        for capacity in CAPACITIES:
            base = samples[tail_cell(scale, self.baseline, capacity)]
            wins.append(
                [
                    win_percent(
                        base.ttft_percentile(percent),
                        samples[tail_cell(scale, _tlru(budget), capacity)].ttft_percentile(percent),
                    )
                    for budget, percent in columns
                ]
            )
        return {
            "capacity_tokens": list(CAPACITIES),
            "columns": [f"{budget} ms\nP{percent}" for budget, percent in columns],
            "win_percent": wins,
            "baseline_ttft_ms": {
                f"P{percent}": [
                    round(1e3 * samples[tail_cell(scale, self.baseline, capacity)].ttft_percentile(percent), 1)
                    for capacity in CAPACITIES
                ]
                for percent in (50, 90, 95, 99)
            },
            "longest_prefill_ms": round(
                1e3 * float(samples[tail_cell(scale, LRU, CAPACITIES[0])].cold_ttft_s.max()), 1
            ),
            "xi_tokens": {f"{budget} ms": chat_budget_tokens(budget) for budget in BUDGETS_MS},
        }


class OverLru(LatencyTable):
    """Table 1."""

    id = "tlru-table-1"
    title = "T-LRU, table 1: percentiles of the time to first token, over LRU"
    shows = f"Percent by which T-LRU's percentile is below LRU's, by capacity and budget: {_SET_UP}."
    baseline = LRU

    def claims(self, numbers: Numbers) -> Sequence[Claim]:
        """The largest wins, and the budget above the tail."""
        p90, p95 = max(self._column(numbers, "P90")), max(self._column(numbers, "P95"))
        p90_ms = numbers["baseline_ttft_ms"]["P90"]
        late = [wins[numbers["columns"].index("500 ms\nP90")] for wins in numbers["win_percent"]]
        tight = [wins[numbers["columns"].index("200 ms\nP90")] for wins in numbers["win_percent"]]
        return (
            Claim(
                "it lowers P90 and P95 by a fifth and more where the budget suits",
                "up to 27.5 % and 23.9 %",
                f"up to {p90:.1f} % and {p95:.1f} %",
                min(p90, p95) >= 20,
            ),
            Claim(
                "a budget of 200 ms lowers P90 at every capacity",
                "by 6.9 % to 14.3 %",
                f"by {min(tight):.1f} % to {max(tight):.1f} %",
                min(tight) > 0,
                f"LRU's P90 is {max(p90_ms):.0f} ms at the least and {min(p90_ms):.0f} ms at the most capacity, and "
                "where a percentile lies below the budget T-LRU lets it rise",
            ),
            Claim(
                "a budget of 500 ms raises P90",
                "by up to 13.7 %",
                f"by up to {max(0.0, -min(late)):.1f} %",
                min(late) < 0,
                f"no prompt here takes more than {numbers['longest_prefill_ms']:.0f} ms, so all is free alike",
            ),
        )


class OverThreshold(LatencyTable):
    """Table 2."""

    id = "tlru-table-2"
    title = "T-LRU, table 2: percentiles of the time to first token, over Threshold-LRU"
    shows = (
        "Percent by which T-LRU's percentile is below that of an LRU that keeps conversations of more than 1,024 "
        f"tokens, by capacity and budget: {_SET_UP}."
    )
    baseline = THRESHOLD_LRU

    def claims(self, numbers: Numbers) -> Sequence[Claim]:
        """The largest wins."""
        p90, p95 = max(self._column(numbers, "P90")), max(self._column(numbers, "P95"))
        return (
            Claim(
                "it lowers P90 and P95 nearly as much as over LRU",
                "up to 26.6 % and 22.8 %",
                f"up to {p90:.1f} % and {p95:.1f} %",
                min(p90, p95) >= 15,
            ),
        )


class Violations(TailTable):
    """Table 3."""

    id = "tlru-table-3"
    title = "T-LRU, table 3: requests over 200 ms"
    shows = (
        "Percent by which fewer requests wait more than 200 ms under T-LRU than under LRU and under Threshold-LRU, by "
        f"capacity and budget: {_SET_UP}."
    )

    def numbers(self, scale: Scale, samples: Mapping[Cell, Sample]) -> Numbers:
        """Relative and absolute counts."""
        late = {
            policy: [samples[tail_cell(scale, policy, capacity)].num_late(SLO_MS / 1e3) for capacity in CAPACITIES]
            for policy in (LRU, THRESHOLD_LRU, *map(_tlru, BUDGETS_MS))
        }
        columns = [
            (budget, base, name) for budget in BUDGETS_MS for base, name in ((LRU, "LRU"), (THRESHOLD_LRU, "Thr."))
        ]
        return {
            "capacity_tokens": list(CAPACITIES),
            "columns": [f"{budget} ms\n{name}" for budget, _, name in columns],
            "win_percent": [
                [win_percent(late[base][row], late[_tlru(budget)][row]) for budget, base, _ in columns]
                for row in range(len(CAPACITIES))
            ],
            "num_late": {policy.removesuffix(BLOCKWISE): counts for policy, counts in late.items()},
            "num_requests": len(samples[tail_cell(scale, LRU, CAPACITIES[0])].ttft_s),
        }

    def claims(self, numbers: Numbers) -> Sequence[Claim]:
        """Budgets at and below the objective."""
        by_column = {
            name: [wins[index] for wins in numbers["win_percent"]] for index, name in enumerate(numbers["columns"])
        }
        best = max(max(self._column(numbers, "LRU")), 0.0)
        below, at = by_column["100 ms\nLRU"], by_column["200 ms\nLRU"]
        return (
            Claim(
                "T-LRU cuts violations by more than a quarter where the budget suits",
                "up to 40.7 %, over Threshold-LRU 38.9 %",
                f"up to {best:.1f} %, over Threshold-LRU {max(self._column(numbers, 'Thr.')):.1f} %",
                best >= 25,
            ),
            Claim(
                "a budget of half the objective, 100 ms, cuts them as well",
                "up to 25.9 %",
                f"up to {max(below):.1f} %",
                max(below) > 15,
            ),
            Claim(
                "a budget of the objective itself cuts them the most",
                "by 8.8 % to 40.7 %",
                f"by {min(at):.1f} % to {max(at):.1f} %",
                max(at) >= max(below),
                "T-LRU keeps what a next prompt of mean length needs to be in time, and lengths vary "
                f"here by {preset('wildchat').next_prompt.sigma:g} in the logarithm: a longer one is late, which a "
                "budget below the objective makes up for",
            ),
        )
