"""Every figure, in the order of the page."""

from collections.abc import Sequence
from typing import Final

from .base import Figure
from .by_length import HitRateByLength, LatencyByPercentile
from .checkpoints import BlockReuse, StateMemory
from .efficiency import FlopEfficiency, LayerTable
from .microbenchmarks import (
    Contention,
    LayerComposition,
    ResponseTime,
    SessionRate,
    StateDimension,
)
from .sweep import GainOverLru, HitRates, TailLatency
from .tail import OverLru, OverThreshold, Violations
from .tail_variants import Variants

FIGURES: Final[tuple[Figure, ...]] = (
    LayerTable(),
    BlockReuse(),
    StateMemory(),
    FlopEfficiency(),
    HitRates(),
    GainOverLru(),
    TailLatency(),
    HitRateByLength(),
    LatencyByPercentile(),
    Contention(),
    LayerComposition(),
    StateDimension(),
    SessionRate(),
    ResponseTime(),
    OverLru(),
    OverThreshold(),
    Violations(),
    Variants(),
)


def chosen(only: str | None) -> Sequence[Figure]:
    """The figures of a list of ids separated by commas, in the order of the page, or all; `ValueError` for others."""
    if only is None:
        return FIGURES
    wanted = [part.strip() for part in only.split(",")]
    known = {figure.id for figure in FIGURES}
    for part in wanted:
        if part not in known:
            raise ValueError(f"--only {only!r}: {part!r} is no figure: give some of {', '.join(f.id for f in FIGURES)}")
    return [figure for figure in FIGURES if figure.id in wanted]
