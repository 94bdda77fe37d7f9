"""Figures 11 to 13b: one thing varied at a time.

All are on the workload `agent-append`, the mean of some traces; a system's value at a point is its token hit rate over
all requests of those traces.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

from marconi.replay.figures.base import Claim, Figure, Numbers, Scale
from marconi.replay.figures.canvas import Canvas
from marconi.replay.figures.cells import Cell, Sample
from marconi.replay.figures.setups import LABELS, hybrid_host, session_scene

_TIE_PERCENT: Final = 0.5
"""Gains that differ by less are equal."""

_TRACES: Final = "workload `agent-append`, the mean of three traces"


class Varied(Figure):
    """Hit rates of systems over the values of one parameter."""

    values: ClassVar[tuple[Any, ...]]
    axis: ClassVar[str]
    systems: ClassVar[tuple[str, ...]] = ("vllm+", "lru-joint", "marconi")

    @abstractmethod
    def cell(self, scale: Scale, value: Any, policy: str, seed: int) -> Cell:
        """The replay of a system at a value."""

    def cells(self, scale: Scale) -> Sequence[Cell]:
        """Every system at every value on every trace."""
        return [cell for value in self.values for policy in self.systems for cell in self._cells(scale, value, policy)]

    def numbers(self, scale: Scale, samples: Mapping[Cell, Sample]) -> Numbers:
        """Token hit rates by system."""
        rates = {
            LABELS[policy]: [
                _rate([samples[cell] for cell in self._cells(scale, value, policy)]) for value in self.values
            ]
            for policy in self.systems
        }
        return {"values": [str(value) for value in self.values], "token_hit_rate": rates}

    def draw(self, numbers: Numbers, canvas: Canvas) -> None:
        """Bars by value."""
        panel = canvas.panels[0]
        rates = {name: [100 * rate for rate in each] for name, each in numbers["token_hit_rate"].items()}
        panel.bars(numbers["values"], rates)
        panel.name(self.axis, "token hit rate, %")

    def _cells(self, scale: Scale, value: Any, policy: str) -> list[Cell]:
        return [self.cell(scale, value, policy, seed) for seed in scale.seeds]


def _rate(samples: Sequence[Sample]) -> float:
    hits = sum(int(sample.hit_tokens.sum()) for sample in samples)
    return round(hits / sum(int(sample.prompt_tokens.sum()) for sample in samples), 4)


def _gains(numbers: Numbers, over: str, of: str = "Marconi") -> list[float]:
    """Percent by which one system's hit rate is above another's, at each value."""
    rates = numbers["token_hit_rate"]
    return [100 * (ours / max(base, 1e-4) - 1) for ours, base in zip(rates[of], rates[over], strict=True)]


def _listed(values: Sequence[float]) -> str:
    return ", ".join(f"{value:+.1f} %" for value in values)


class Contention(Varied):
    """Figure 11."""

    id = "11"
    title = "Marconi, figure 11: contention"
    shows = f"Token hit rate by cache size: {_TRACES}, 1 session a second, 5 s of response time."
    axis = "cache, GB"
    values = (5, 10, 20, 40, 80)
    systems = ("lru-joint", "marconi", "best", "belady")

    def cell(self, scale: Scale, value: Any, policy: str, seed: int) -> Cell:
        """Memory varies."""
        scene = session_scene("agent-append", 1.0, 5.0, scale.num_sessions, seed)
        return Cell(scene, hybrid_host(), policy, scale.memory_bytes(value))

    def claims(self, numbers: Numbers) -> Sequence[Claim]:
        """A peak in the middle."""
        gains = _gains(numbers, "SGLang+")
        peak = max(range(len(gains)), key=gains.__getitem__)
        return (
            Claim(
                "Marconi's gain over SGLang+ is largest at moderate contention",
                "+24.3 %, +51.5 %, +68.3 %, +30.0 %, +10.0 % from 60 to 140 GB",
                f"{_listed(gains)} from 5 to 80 GB",
                0 < peak < len(gains) - 1,
            ),
            Claim("the gain reaches tens of percent", "68.3 %", f"{max(gains):.1f} %", max(gains) >= 10),
        )


_COMPOSITIONS: Final = {"1:2": (12, 24, 28), "1:4": (6, 24, 28), "1:8": (3, 24, 28), "Transformer": (32, 0, 32)}
_TRANSFORMER: Final = {"lru-joint": "lru-joint@every-block:32", "marconi": "marconi-static:0@every-block:32"}
"""A Transformer's KV can be cut anywhere, so all systems keep every block; alpha 0 is LRU, as the paper has it."""


class LayerComposition(Varied):
    """Figure 12a."""

    id = "12a"
    title = "Marconi, figure 12a: layer composition"
    shows = (
        f"Token hit rate by the ratio of attention to SSM layers: {_TRACES}, 1 session a second, 5 s of response time, "
        "10 GB. The paper does not give the numbers of layers: here 24 SSM layers with 12, 6 or 3 of attention and 28 "
        "MLP, and 32 of attention with 32 MLP, where all three keep every block of 32 tokens."
    )
    axis = "attention : SSM layers"
    values = tuple(_COMPOSITIONS)

    def cell(self, scale: Scale, value: Any, policy: str, seed: int) -> Cell:
        """Layers vary."""
        scene = session_scene("agent-append", 1.0, 5.0, scale.num_sessions, seed)
        if value == "Transformer":
            policy = _TRANSFORMER.get(policy, policy)
        return Cell(scene, hybrid_host(*_COMPOSITIONS[value]), policy, scale.memory_bytes(10))

    def claims(self, numbers: Numbers) -> Sequence[Claim]:
        """Gains over both baselines, and the Transformer."""
        vllm, lru = _gains(numbers, "vLLM+"), _gains(numbers, "SGLang+")
        same = [each[-1] for each in numbers["token_hit_rate"].values()]
        return (
            Claim(
                "the more SSM layers, the larger Marconi's gain over vLLM+",
                "+13.5 %, +66.6 %, +160 %",
                _listed(vllm[:3]),
                vllm[0] < vllm[1] < vllm[2],
            ),
            Claim(
                "the gain over SGLang+ grows likewise",
                "+5.8 %, +26.0 %, +59.7 %",
                _listed(lru[:3]),
                lru[0] < lru[1] < lru[2],
            ),
            Claim(
                "all three do the same on a Transformer",
                "",
                f"{', '.join(f'{100 * rate:.1f} %' for rate in same)}",
                max(same) - min(same) < 0.01,
            ),
        )


class StateDimension(Varied):
    """Figure 12b."""

    id = "12b"
    title = "Marconi, figure 12b: state width"
    shows = (
        f"Token hit rate by the width N of the SSM state: {_TRACES}, 1 session a second, 5 s of response time, 10 GB."
    )
    axis = "state width N"
    values = (16, 32, 64, 128)

    def cell(self, scale: Scale, value: Any, policy: str, seed: int) -> Cell:
        """States vary."""
        scene = session_scene("agent-append", 1.0, 5.0, scale.num_sessions, seed)
        return Cell(scene, hybrid_host(state_size=value), policy, scale.memory_bytes(10))

    def claims(self, numbers: Numbers) -> Sequence[Claim]:
        """Gain over vLLM+."""
        ratio = [1 + gain / 100 for gain in _gains(numbers, "vLLM+")]
        return (
            Claim(
                "the wider the state, the larger Marconi's gain over vLLM+",
                "5.7x at 16, 35.4x at 128",
                ", ".join(f"{each:.2f}x" for each in ratio),
                ratio[-1] > ratio[0],
            ),
            Claim("the gain is tens of times", "35.4x", f"{max(ratio):.1f}x", max(ratio) > 10),
        )


class SessionRate(Varied):
    """Figure 13a."""

    id = "13a"
    title = "Marconi, figure 13a: session arrival rate"
    shows = f"Token hit rate by sessions a second: {_TRACES}, 5 s of response time, 10 GB."
    axis = "sessions a second"
    values = (0.5, 1.0, 2.0)
    systems = ("lru-joint", "marconi")
    varied: ClassVar[str] = "rate of sessions"
    paper_rates: ClassVar[str] = "48.7 % to 43.0 % from 0.5 to 2 a second"

    def cell(self, scale: Scale, value: Any, policy: str, seed: int) -> Cell:
        """The rate varies."""
        scene = session_scene("agent-append", value, 5.0, scale.num_sessions, seed)
        return Cell(scene, hybrid_host(), policy, scale.memory_bytes(10))

    def claims(self, numbers: Numbers) -> Sequence[Claim]:
        """Lower hits, larger gains."""
        rates, gains = numbers["token_hit_rate"]["Marconi"], _gains(numbers, "SGLang+")
        return (
            Claim(
                f"Marconi's hit rate falls as the {self.varied} rises",
                self.paper_rates,
                " to ".join(f"{100 * rate:.1f} %" for rate in rates),
                rates[0] > rates[-1],
            ),
            Claim(
                "its gain over SGLang+ rises with it",
                "1.4x to 1.6x over figures 13a and 13b",
                _listed(gains),
                gains[-1] > gains[0] + _TIE_PERCENT,
            ),
        )


class ResponseTime(SessionRate):
    """Figure 13b."""

    id = "13b"
    title = "Marconi, figure 13b: response time"
    shows = (
        f"Token hit rate by the mean time between an answer and the next request: {_TRACES}, 0.5 sessions a second, "
        "10 GB."
    )
    axis = "response time, s"
    values = (5.0, 7.5, 10.0)
    varied = "response time"
    paper_rates = "25.9 % to 24.1 % from 5 s to 10 s"

    def cell(self, scale: Scale, value: Any, policy: str, seed: int) -> Cell:
        """The pause varies."""
        scene = session_scene("agent-append", 0.5, value, scale.num_sessions, seed)
        return Cell(scene, hybrid_host(), policy, scale.memory_bytes(10))
