"""Figure 6 of the T-LRU paper: the rule with more and more knowledge of the future, up to the hindsight optimum.

T-LRU guesses the next prompt's length; End-aware knows whether there is one, Length-aware its length too; the
tail-optimised Belady knows every arrival. `tail`, this project's rule, knows no more than T-LRU and takes the time of
a prefill from the cost model, where T-LRU counts uncached tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from .base import Claim, Figure, Numbers, Scale
from .canvas import Canvas
from .cells import Cell, Sample
from .tail import BLOCKWISE, CAPACITIES, LRU, THRESHOLD_LRU, tail_cell, tail_policy, win_percent

_BUDGETS_MS: Final = (100, 200, 300)
_PERCENTS: Final = (50, 90, 95, 99)
_TIE_PERCENT: Final = 0.5
_BY_TOKENS: Final = {
    "tlru": "T-LRU",
    "end-aware": "End-aware",
    "length-aware": "Length-aware",
    "tail-belady": "Tail-opt. Belady",
}


def _policies(budget_ms: int) -> dict[str, str]:
    """Labels and policies at a budget."""
    known = {label: tail_policy(name, budget_ms) for name, label in _BY_TOKENS.items()}
    tail = {"tail (this project)": f"tail:{budget_ms / 1e3:g}{BLOCKWISE}"}
    return {"LRU": LRU, "Threshold-LRU": THRESHOLD_LRU, **known, **tail}


class Variants(Figure):
    """Figure 6."""

    id = "tlru-variants"
    title = "T-LRU, figure 6: variants with future knowledge"
    shows = (
        "Median, P90, P95 and P99 of the time to first token by capacity, for budgets of 100, 200 and 300 ms from top "
        "to bottom, on the same replays as the tables."
    )
    num_rows = len(_BUDGETS_MS)
    num_columns = len(_PERCENTS)

    def cells(self, scale: Scale) -> Sequence[Cell]:
        """Every rule at every budget and capacity."""
        return [
            tail_cell(scale, policy, capacity)
            for budget in _BUDGETS_MS
            for policy in _policies(budget).values()
            for capacity in CAPACITIES
        ]

    def numbers(self, scale: Scale, samples: Mapping[Cell, Sample]) -> Numbers:
        """Milliseconds by budget, percentile, rule and capacity; mean excess over the budget."""
        ttft_ms = {
            f"{budget} ms": {
                f"P{percent}": {
                    label: [
                        round(1e3 * samples[tail_cell(scale, policy, capacity)].ttft_percentile(percent), 1)
                        for capacity in CAPACITIES
                    ]
                    for label, policy in _policies(budget).items()
                }
                for percent in _PERCENTS
            }
            for budget in _BUDGETS_MS
        }
        excess_ms = {
            f"{budget} ms": {
                label: [_excess_ms(samples[tail_cell(scale, policy, capacity)], budget) for capacity in CAPACITIES]
                for label, policy in _policies(budget).items()
            }
            for budget in _BUDGETS_MS
        }
        return {"capacity_tokens": list(CAPACITIES), "ttft_ms": ttft_ms, "mean_excess_ms": excess_ms}

    def draw(self, numbers: Numbers, canvas: Canvas) -> None:
        """A row a budget, a column a percentile."""
        panels = iter(canvas.panels)
        for budget, by_percent in numbers["ttft_ms"].items():
            for percent, series in by_percent.items():
                panel = next(panels)
                panel.lines(numbers["capacity_tokens"], series, legend=False)
                panel.name("", "ms" if percent == "P50" else "", f"{percent}, budget {budget}")
        for panel in canvas.panels[-self.num_columns :]:
            panel.name("capacity, tokens")
        canvas.share_legend()

    def claims(self, numbers: Numbers) -> Sequence[Claim]:
        """Tail excess latency, the objective of the family, at 100 ms; the cost in the median."""
        excess = {label: sum(values) for label, values in numbers["mean_excess_ms"]["100 ms"].items()}
        gain = {label: win_percent(excess["LRU"], value) for label, value in excess.items()}
        median = numbers["ttft_ms"]["100 ms"]["P50"]
        lru_ms, tlru_ms = (sum(median[label]) / len(median[label]) for label in ("LRU", "T-LRU"))
        return (
            Claim(
                "T-LRU is better than LRU at the tail and worse at the median",
                "a median of 40 ms for 10 ms",
                f"with 100 ms a mean excess over the budget {gain['T-LRU']:.1f} % lower, "
                f"a median of {tlru_ms:.0f} ms for {lru_ms:.0f} ms",
                gain["T-LRU"] > 0 and tlru_ms > lru_ms,
            ),
            Claim(
                "to know whether a conversation goes on wins much, and the next length little more",
                "",
                f"excess {gain['End-aware']:.1f} % and {gain['Length-aware']:.1f} % lower than LRU",
                gain["T-LRU"] < gain["End-aware"]
                and gain["Length-aware"] - gain["End-aware"] < gain["End-aware"] - gain["T-LRU"],
            ),
            Claim(
                "the tail-optimised Belady is the lower bound of that excess",
                "",
                f"excess {gain['Tail-opt. Belady']:.1f} % lower than LRU",
                gain["Tail-opt. Belady"] >= max(gain.values()) - _TIE_PERCENT,
            ),
        )


def _excess_ms(sample: Sample, budget_ms: int) -> float:
    """Tail excess latency: the mean over all requests of the time beyond the budget."""
    return round(float((1e3 * sample.ttft_s - budget_ms).clip(min=0).mean()), 3)
