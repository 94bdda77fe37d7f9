"""The advice of a plan for one amount of memory, in sentences.

The best is the one that recomputes fewest tokens; among those within `TIE` of its hit rate the first in the order of
the candidates (`plan.py`), so that nothing is changed for nothing. Checkpoints in int8 are never the best, since
answers that resume from one may differ: a line of its own says what they would win, if that is `LEAST_GAIN` or more.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from marconi.model.serving import SERVED, Serving
from marconi.policy.catalog import PolicySpec
from marconi.replay.memory import format_bytes
from marconi.replay.result import Percentiles, PolicyResult
from marconi.replay.scheduling import NUM_TRACKING_SLOTS
from marconi.replay.task import Task

STOCK: Final = PolicySpec("lru")
DEFAULT: Final = PolicySpec("best")
NUM_SLOTS: Final = 1 + NUM_TRACKING_SLOTS + 1
"""Slots of a request: its working slots, and the state that it resumes from."""
ONE_POOL: Final = "--enable-unified-memory"
INT8: Final = "--enable-int8-mamba-checkpoint"
TIE: Final = 0.002
"""Token hit rate below which a difference is none."""
LEAST_GAIN: Final = 0.01
"""The least share of tokens that counts as a difference."""


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
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Advice:
    """The configuration for one amount of memory, and its gain over stock SGLang with its defaults."""

    default: PolicyResult
    """Stock SGLang at its default ratio."""
    stock: PolicyResult
    """Stock SGLang at the best ratio."""
    split: PolicyResult | None
    """The best with two pools; None for a model without states, which has no two."""
    best: PolicyResult | None
    """The best of all; None where every request is too large for every candidate."""
    request_bytes: tuple[int, int]
    """Bytes that the smallest and the largest request take to be served, in one pool."""
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
        request_bytes: tuple[int, int],
        alone: Task | None = None,
        serving: Serving = SERVED,
    ) -> "Advice":
        """From the runs of one amount of memory, in the order of the candidates; `alone` is one of them."""
        runs = [run for run in tried if not run.task.int8_checkpoints]
        in_int8 = [run for run in tried if run.task.int8_checkpoints]
        stock = [run for run in runs if run.task.policy == STOCK]
        split = [run for run in runs if run.task.mamba_ratio is not None]
        ours = [run for run in runs if run.task.policy == DEFAULT]
        fits = any(run.num_states_written for run in runs) or not any(run.num_too_large for run in runs)
        return cls(
            default=stock[0],
            stock=_first_best(stock),
            split=_first_best(split) if split else None,
            best=_first_best(runs) if fits else None,
            request_bytes=request_bytes,
            alone=next((run for run in runs if run.task == alone), None),
            ours=_first_best(ours) if ours else None,
            int8=_first_best(in_int8) if in_int8 else None,
            serving=serving,
        )

    @property
    def sentences(self) -> tuple[str, ...]:
        """Say it in words, with the flags of SGLang."""
        memory, best, split = format_bytes(self.default.task.memory_bytes), self.best, self.split
        if self.serving.why_not is not None:
            return (f"{memory}: nothing is advised: {self.serving.why_not}.",)
        if best is None:
            smallest, largest = map(format_bytes, self.request_bytes)
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
            lines.append(f"Best: policy {best.task.policy}{self._flags(best)}: {_gain(best, self.default)}.")
        if split is not None and split is not best and split is not self.stock:
            lines.append(
                f"With two pools: policy {split.task.policy}{self._flags(split)}: {_gain(split, self.default)}."
            )
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
            "memory_bytes": self.default.task.memory_bytes,
            "policy": None if best is None else str(best.task.policy),
            "mamba_full_memory_ratio": None if best is None else best.task.mamba_ratio,
            "sglang_flags": self._sglang_flags(),
            "token_hit_rate": (best or self.default).token_hit_rate,
            "stock_token_hit_rate": self.default.token_hit_rate,
            "layouts": [layout.to_json() for layout in self.layouts],
            "sentences": list(self.sentences),
        }

    def _flags(self, run: PolicyResult) -> str:
        if self.split is None:
            return ""
        pool = " in one pool" if run.task.mamba_ratio is None else ""
        return f"{pool} with {self._all_flags(run)}"

    def _sglang_flags(self) -> str | None:
        if self.best is None or self.split is None or self.serving.why_not is not None:
            return None
        return self._all_flags(self.best)

    def _all_flags(self, run: PolicyResult) -> str:
        demanded = "" if run.task.policy == STOCK else self.serving.flags
        return " ".join(filter(None, (flags(run), demanded)))


def flags(run: PolicyResult) -> str:
    """SGLang's flags for the memory of a run, of a model with states."""
    ratio = run.task.mamba_ratio
    return ONE_POOL if ratio is None else f"--mamba-full-memory-ratio {ratio:g}"


def _first_best(runs: Sequence[PolicyResult]) -> PolicyResult:
    best = max(run.token_hit_rate for run in runs)
    return next(run for run in runs if run.token_hit_rate >= best - TIE)


def _rates(run: PolicyResult | Contender) -> str:
    return f"{100 * run.token_hit_rate:.1f} % of the prompt tokens (P95 TTFT {run.ttft_s.p95:.3g} s)"


def _gain(run: PolicyResult, default: PolicyResult) -> str:
    return f"{_rates(run)}, {100 * fewer(run, default):.1f} % fewer tokens recomputed"


def fewer(run: PolicyResult, than: PolicyResult) -> float:
    """Share of the tokens that `than` computes which `run` need not."""
    before = than.num_prompt_tokens - than.num_hit_tokens
    return 1 - (run.num_prompt_tokens - run.num_hit_tokens) / before if before else 0.0
