"""Figures 7, 8 and 9: systems over many settings, from the same replays.

A setting is a workload, a rate of sessions, a response time and an amount of memory; each is replayed with each system.
Figure 7 compares token hit rates, figure 8 those of Marconi and SGLang+ alone, figure 9 the tail of the time to first
token.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from marconi.replay.trace import preset

from .base import Claim, Figure, Numbers, Scale
from .canvas import BOX_PERCENTS, Canvas
from .cells import Cell, Sample, percentile
from .setups import (
    LABELS,
    MEMORY_GB,
    RESPONSE_TIMES_S,
    SESSION_RATES,
    STANDS_FOR,
    STATIC,
    hybrid_host,
    policies_of,
    session_scene,
)

SYSTEMS: Final = ("vllm+", "lru-joint", "marconi", "marconi-tuned", "best")
_OVER_LRU: Final = ("lru-joint", "marconi", "marconi-tuned", "static", "best")
_GROUPS: Final = tuple(f"{name}\n{paper}".replace(", ", "\n") for name, paper in STANDS_FOR.items())
_SETTINGS: Final = (
    "36 settings a workload: 0.5, 1 and 2 sessions a second, 5, 7.5 and 10 s of response time, four amounts of memory"
)


def _cells(scale: Scale, workload: str, policy: str) -> list[Cell]:
    """One a setting, in a fixed order."""
    host = hybrid_host()
    return [
        Cell(
            session_scene(workload, rate, response_s, scale.num_sessions, scale.seed),
            host,
            policy,
            scale.memory_bytes(gigabytes),
        )
        for rate in SESSION_RATES
        for response_s in RESPONSE_TIMES_S
        for gigabytes in MEMORY_GB[workload]
    ]


def _box(values: Sequence[float], digits: int) -> list[float]:
    return [round(float(value), digits) for value in np.percentile(values, BOX_PERCENTS)]


def _gain_percent(rate: float, lru: float) -> float:
    """Gain over `lru`; a rate below a hundredth of a percent counts as that, and of equal rates there is none."""
    return 0.0 if rate == lru else 100 * (rate / max(lru, 1e-4) - 1)


class Sweep(Figure):
    """A figure over all settings."""

    def cells(self, scale: Scale) -> Sequence[Cell]:
        """Every system in every setting."""
        return [cell for workload in STANDS_FOR for policy in SYSTEMS for cell in _cells(scale, workload, policy)]


class HitRates(Sweep):
    """Figure 7."""

    id = "7"
    title = "Marconi, figure 7: token hit rate"
    shows = (
        f"Token hit rate over {_SETTINGS} (boxes: quartiles and median, whiskers: P5 and P95). The paper's figure has "
        "vLLM+ and Marconi."
    )

    def numbers(self, scale: Scale, samples: Mapping[Cell, Sample]) -> Numbers:
        """Boxes, every hit rate, and the mean ratio to vLLM+."""
        workloads: dict[str, Any] = {}
        for workload in STANDS_FOR:
            rates = {
                LABELS[policy]: [samples[cell].token_hit_rate for cell in _cells(scale, workload, policy)]
                for policy in SYSTEMS
            }
            ratio = [ours / max(vllm, 1e-4) for ours, vllm in zip(rates["Marconi"], rates["vLLM+"], strict=True)]
            workloads[workload] = {
                "percentiles": {system: _box(values, 4) for system, values in rates.items()},
                "mean": {system: round(float(np.mean(values)), 4) for system, values in rates.items()},
                "mean_ratio_to_vllm": round(float(np.mean(ratio)), 2),
                "token_hit_rate": {system: [round(value, 4) for value in values] for system, values in rates.items()},
            }
        return {"percents": list(BOX_PERCENTS), "settings": _axes(), "workloads": workloads}

    def draw(self, numbers: Numbers, canvas: Canvas) -> None:
        """A box a system and workload."""
        _draw_boxes(numbers, canvas, "token hit rate, %")

    def claims(self, numbers: Numbers) -> Sequence[Claim]:
        """The ratio to vLLM+."""
        found = numbers["workloads"]
        ratios = {name: each["mean_ratio_to_vllm"] for name, each in found.items()}
        here = ", ".join(f"{ratio:.3g}x on {name}" for name, ratio in ratios.items())
        chats = max(ratios["chat-short"], ratios["chat-long"])
        agents = max(ratios["agent-append"], ratios["agent-drop"])
        return (
            Claim(
                "Marconi hits more tokens than vLLM+ on every workload, in the mean",
                "4.5x on LMSys, 7.3x on ShareGPT, 34.4x on SWE-Bench",
                here,
                min(ratios.values()) > 1.2,
            ),
            Claim(
                "the ratio is highest for agents",
                "34.4x against at most 7.3x for chats",
                f"{agents:.3g}x against {chats:.3g}x",
                agents > chats,
                "vLLM+'s mean hit rate is the divisor: "
                + ", ".join(f"{100 * each['mean']['vLLM+']:.1f} % on {name}" for name, each in found.items()),
            ),
        )


class GainOverLru(Sweep):
    """Figure 8."""

    id = "8"
    title = "Marconi, figure 8: gain over SGLang+"
    shows = (
        f"Token hit rate of Marconi over that of SGLang+, less one, at percentiles of {_SETTINGS}. SGLang+ has the "
        "same admission and evicts by LRU. The paper's text gives its P95s and not the form of its plot: boxes are "
        "drawn, as in figure 7."
    )

    def cells(self, scale: Scale) -> Sequence[Cell]:
        """The systems with judicious admission, fixed alphas too."""
        policies = (*SYSTEMS[1:], *STATIC)
        return [cell for name in STANDS_FOR for policy in policies for cell in _cells(scale, name, policy)]

    def numbers(self, scale: Scale, samples: Mapping[Cell, Sample]) -> Numbers:
        """Relative gains in percent."""
        gains = {}
        for workload in STANDS_FOR:
            rates = {
                system: [
                    max(samples[cell].token_hit_rate for cell in cells)
                    for cells in zip(*(_cells(scale, workload, each) for each in policies_of(system)), strict=True)
                ]
                for system in _OVER_LRU
            }
            gains[workload] = {
                LABELS[system]: _box(
                    [_gain_percent(rate, lru) for rate, lru in zip(rates[system], rates["lru-joint"], strict=True)],
                    2,
                )
                for system in _OVER_LRU[1:]
            }
        return {"percents": list(BOX_PERCENTS), "settings": _axes(), "gain_percent": gains}

    def draw(self, numbers: Numbers, canvas: Canvas) -> None:
        """A box a workload."""
        panel = canvas.panels[0]
        gains = numbers["gain_percent"]
        panel.boxes(_GROUPS, {name: [gains[each][name] for each in gains] for name in next(iter(gains.values()))})
        panel.name("", "token hit rate over SGLang+'s, %")

    def claims(self, numbers: Numbers) -> Sequence[Claim]:
        """The upper tail, by workload."""
        boxes, fixed = (
            {name: each[system] for name, each in numbers["gain_percent"].items()}
            for system in (LABELS["marconi"], LABELS["static"])
        )
        tops, fixed_tops = (
            ", ".join(f"{box[-1]:.1f} % on {name}" for name, box in each.items()) for each in (boxes, fixed)
        )
        worst = min(boxes, key=lambda name: boxes[name][0])
        lows = boxes[worst][0]
        agents, fixed_agents = (max(each["agent-append"][-1], each["agent-drop"][-1]) for each in (boxes, fixed))
        return (
            Claim(
                "Marconi hits more than SGLang+",
                "at P95 of the settings by 45.6 % on LMSys, 19.0 % on ShareGPT, 219.7 % on SWE-Bench",
                f"at P95 {tops}, and at worst {lows:.1f} % at P5; the best fixed alpha at P95 {fixed_tops}",
                min(box[-1] for box in boxes.values()) > 0 and lows > -2,
                f"the worst is {worst}, where the best fixed alpha is {fixed[worst][0]:+.1f} % at P5",
            ),
            Claim(
                "the gain is by far the largest for agents",
                "219.7 %",
                f"at most {agents:.1f} %",
                agents > max(boxes["chat-short"][-1], boxes["chat-long"][-1]),
                f"the best fixed alpha gains {fixed_agents:.1f} % on agents in hindsight"
                if fixed_agents > 1.5 * agents
                else f"no fixed alpha gains it either, at most {fixed_agents:.1f} % on agents",
            ),
        )


class TailLatency(Sweep):
    """Figure 9."""

    id = "9"
    title = "Marconi, figure 9: P95 time to first token"
    shows = (
        "P95 of the time to first token relative to no prefix caching, Jamba-1.5-Mini on four A100-40GB by this "
        f"project's cost model, over {_SETTINGS}."
    )

    def numbers(self, scale: Scale, samples: Mapping[Cell, Sample]) -> Numbers:
        """Relative P95 as boxes, and the largest reduction in percent and ms."""
        workloads: dict[str, Any] = {}
        for workload in STANDS_FOR:
            relative: dict[str, list[float]] = {}
            best: dict[str, Any] = {}
            for policy in SYSTEMS:
                found = [samples[cell] for cell in _cells(scale, workload, policy)]
                cold = [percentile(sample.cold_ttft_s, 95) for sample in found]
                warm = [sample.ttft_percentile(95) for sample in found]
                relative[LABELS[policy]] = [w / c for w, c in zip(warm, cold, strict=True)]
                saved_ms = max(1e3 * (c - w) for w, c in zip(warm, cold, strict=True))
                share = 100 * (1 - min(relative[LABELS[policy]]))
                best[LABELS[policy]] = {"percent": round(share, 1), "ms": round(saved_ms, 1)}
            workloads[workload] = {
                "percentiles": {system: _box(values, 4) for system, values in relative.items()},
                "largest_reduction": best,
            }
        return {"percents": list(BOX_PERCENTS), "settings": _axes(), "workloads": workloads}

    def draw(self, numbers: Numbers, canvas: Canvas) -> None:
        """A box a system and workload."""
        _draw_boxes(numbers, canvas, "P95 TTFT, % of that without a cache")

    def claims(self, numbers: Numbers) -> Sequence[Claim]:
        """Order of the systems, and the size of the reduction."""
        found = numbers["workloads"]
        medians = [
            [each["percentiles"][name][2] for name in ("Marconi", "SGLang+", "vLLM+")] for each in found.values()
        ]
        largest = {name: each["largest_reduction"]["Marconi"]["percent"] for name, each in found.items()}
        least = min(largest, key=largest.__getitem__)
        most = max(each["percent"] for each in found[least]["largest_reduction"].values())
        kept = 5 * preset("agent-drop").next_prompt.mean
        return (
            Claim(
                "Marconi's P95 is below SGLang+'s, and that below vLLM+'s",
                "",
                "so in the median of the settings of "
                f"{sum(_rise(each) for each in medians)} of {len(medians)} workloads",
                all(_rise(each) for each in medians),
            ),
            Claim(
                "Marconi cuts it by a quarter and more on every workload, in its best setting",
                "36.9 % on LMSys, 73.2 % on ShareGPT, 46.8 % on SWE-Bench",
                "" + ", ".join(f"{percent:.1f} % on {name}" for name, percent in largest.items()),
                min(largest.values()) >= 25,
                f"on {least} no system does, at most {most:.1f} %: a turn drops the sixth newest observation, and the "
                f"{kept:,.0f} tokens of the newest five behind it are computed again",
            ),
        )


def _rise(values: Sequence[float]) -> bool:
    """Whether they do, 1 % being none."""
    return all(before <= 1.01 * after for before, after in pairwise(values))


def _axes() -> dict[str, Any]:
    """The settings in the order of every list over them."""
    return {
        "session_rates": list(SESSION_RATES),
        "response_times_s": list(RESPONSE_TIMES_S),
        "memory_gb": {name: list(amounts) for name, amounts in MEMORY_GB.items()},
    }


def _draw_boxes(numbers: Numbers, canvas: Canvas, quantity: str) -> None:
    panel = canvas.panels[0]
    found = numbers["workloads"].values()
    systems = next(iter(found))["percentiles"]
    panel.boxes(
        _GROUPS,
        {name: [[100 * each for each in workload["percentiles"][name]] for workload in found] for name in systems},
    )
    panel.name("", quantity)
