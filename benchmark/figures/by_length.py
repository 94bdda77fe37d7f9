"""Figures 10a and 10b: which requests gain from FLOP-aware eviction, in one setting.

Beside Marconi stands the paper's own form, with a high alpha, which shows what the FLOP term does where it does not
age, and with the one that the paper's tuning adopts.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from .base import Claim, Figure, Numbers, Scale
from .canvas import Canvas
from .cells import Cell, Sample
from .setups import hybrid_host, session_scene

_ALPHA: Final = "marconi-static:50"
_POLICIES: Final = {
    "lru-joint": "SGLang+",
    "marconi": "Marconi",
    _ALPHA: "Marconi, alpha 50",
    "marconi-tuned": "Marconi, tuned",
}
_SETTING: Final = "`agent-append` at 0.5 sessions a second, 5 s of response time, 20 GB"
_BIN_TOKENS: Final = 4000
_PERCENTS: Final = (1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99)
_LITTLE_CHANGED: Final = "a benefit that ages trades less of the short for the long than one that does not"
_LONG_TOKENS: Final = 7000
"""Where the paper's gains begin."""


class ByLength(Figure):
    """A figure of the one setting, the mean of some traces."""

    def cells(self, scale: Scale) -> Sequence[Cell]:
        """Each policy on each trace."""
        return [cell for policy in _POLICIES for cell in _cells(scale, policy)]


def _cells(scale: Scale, policy: str) -> list[Cell]:
    host = hybrid_host()
    scenes = [session_scene("agent-append", 0.5, 5.0, scale.num_sessions, seed) for seed in scale.seeds]
    return [Cell(scene, host, policy, scale.memory_bytes(20)) for scene in scenes]


def _joined(samples: Sequence[Sample], name: str) -> Any:
    return np.concatenate([getattr(sample, name) for sample in samples])


class HitRateByLength(ByLength):
    """Figure 10a."""

    id = "10a"
    title = "Marconi, figure 10a: who gains hit rate"
    shows = (
        "Mean hit rate of requests under Marconi less that under SGLang+, by length of the prompt: "
        f"{_SETTING}, three traces. The second series has a fixed alpha of 50, the third tunes it."
    )

    def numbers(self, scale: Scale, samples: Mapping[Cell, Sample]) -> Numbers:
        """Differences in points, by bin, and overall hit rates."""
        found = {label: [samples[cell] for cell in _cells(scale, policy)] for policy, label in _POLICIES.items()}
        lengths = _joined(found["SGLang+"], "prompt_tokens")
        shares = {label: _joined(each, "hit_tokens") / lengths for label, each in found.items()}
        bins = lengths // _BIN_TOKENS
        used = sorted(set(bins.tolist()))
        gains = {label: shares[label] - shares["SGLang+"] for label in list(shares)[1:]}
        return {
            "prompt_from_tokens": [int(each) * _BIN_TOKENS for each in used],
            "num_requests": [int((bins == each).sum()) for each in used],
            "gain_points": {
                label: [round(100 * float(gain[bins == each].mean()), 2) for each in used]
                for label, gain in gains.items()
            },
            "gain_points_below_7k": {label: _mean(gain[lengths < _LONG_TOKENS]) for label, gain in gains.items()},
            "gain_points_from_7k": {label: _mean(gain[lengths >= _LONG_TOKENS]) for label, gain in gains.items()},
            "token_hit_rate": {
                label: round(float(_joined(each, "hit_tokens").sum() / lengths.sum()), 4)
                for label, each in found.items()
            },
        }

    def draw(self, numbers: Numbers, canvas: Canvas) -> None:
        """Bars by bin."""
        panel = canvas.panels[0]
        groups = [f"{start // 1000}K" for start in numbers["prompt_from_tokens"]]
        panel.bars(groups, numbers["gain_points"])
        panel.name(f"prompt, tokens, from ... on ({_BIN_TOKENS // 1000}K a bin)", "hit rate less SGLang+'s, points")

    def claims(self, numbers: Numbers) -> Sequence[Claim]:
        """The exchange of short for long, and the size of the gain."""
        label = "Marconi, alpha 50"
        short, long = (numbers[f"gain_points_{side}_7k"][label] for side in ("below", "from"))
        rates = numbers["token_hit_rate"]
        return (
            Claim(
                "FLOP-aware eviction gives up hits of short prompts for hits of long ones",
                "below 7,000 tokens down to -3.0 points, above up to +25.5",
                f"with alpha 50 {short:+.1f} points below 7,000 tokens and {long:+.1f} above",
                short < 0 < long,
            ),
            Claim(
                "Marconi doubles SGLang+'s hit rate",
                "16.4 % to 32.7 %",
                f"{100 * rates['SGLang+']:.1f} %, {100 * rates[label]:.1f} % with alpha 50",
                rates["Marconi"] > 1.5 * rates["SGLang+"],
                _cause(rates["SGLang+"], rates["Marconi"], rates[label]),
            ),
        )


class LatencyByPercentile(ByLength):
    """Figure 10b."""

    id = "10b"
    title = "Marconi, figure 10b: time to first token"
    shows = (
        f"Time to first token at percentiles of the requests, by this project's cost model: {_SETTING}, three traces."
    )

    def numbers(self, scale: Scale, samples: Mapping[Cell, Sample]) -> Numbers:
        """Milliseconds by percentile."""
        ttft_ms = {}
        for policy, label in _POLICIES.items():
            values = np.sort(1e3 * _joined([samples[cell] for cell in _cells(scale, policy)], "ttft_s"))
            ttft_ms[label] = [round(float(np.percentile(values, percent)), 1) for percent in _PERCENTS]
        return {"percents": list(_PERCENTS), "ttft_ms": ttft_ms}

    def draw(self, numbers: Numbers, canvas: Canvas) -> None:
        """A line a system."""
        panel = canvas.panels[0]
        panel.lines(numbers["percents"], numbers["ttft_ms"])
        panel.name("percentile of the requests", "time to first token, ms")

    def claims(self, numbers: Numbers) -> Sequence[Claim]:
        """Low percentiles against high ones."""
        at = dict(zip(numbers["percents"], zip(*numbers["ttft_ms"].values(), strict=True), strict=True))
        change = {percent: 100 * (at[percent][1] / at[percent][0] - 1) for percent in (5, 50, 95)}
        fixed = {percent: 100 * (at[percent][2] / at[percent][0] - 1) for percent in change}
        here, there = (
            ", ".join(f"P{percent} {each[percent]:+.1f} %" for percent in (50, 95)) for each in (change, fixed)
        )
        return (
            Claim(
                "Marconi's P50 and P95 are lower",
                "P50 -13.4 %, P95 -22.0 %",
                f"{here}; with alpha 50 {there}",
                change[50] < 0 and change[95] < 0,
                _LITTLE_CHANGED,
            ),
            Claim(
                "its P5 is slightly higher",
                "P5 +6.3 %",
                f"P5 {change[5]:+.1f} %, with alpha 50 {fixed[5]:+.1f} %",
                change[5] > 0,
                _LITTLE_CHANGED if fixed[5] > 0 else "a high alpha does not raise it either",
            ),
        )


def _cause(lru: float, ageing: float, fixed: float) -> str:
    """Why Marconi does not double SGLang+'s hit rate."""
    if fixed <= 1.05 * ageing:
        return "a high alpha gains no more here"
    beside = f"{fixed / max(ageing, 1e-4):.2f}x of it, and {fixed / max(lru, 1e-4):.2f}x SGLang+'s"
    return f"a high alpha that does not age has {beside}"


def _mean(values: Any) -> float:
    return round(100 * float(values.mean()), 2) if len(values) else 0.0
