"""Every figure, in the order of the page."""

from collections.abc import Sequence
from typing import Final

from marconi.replay.figures.base import Figure
from marconi.replay.figures.by_length import HitRateByLength, LatencyByPercentile
from marconi.replay.figures.checkpoints import BlockReuse, StateMemory
from marconi.replay.figures.efficiency import FlopEfficiency, LayerTable
from marconi.replay.figures.microbenchmarks import (
    Contention,
    LayerComposition,
    ResponseTime,
    SessionRate,
    StateDimension,
)
from marconi.replay.figures.sweep import GainOverLru, HitRates, TailLatency
from marconi.replay.figures.tail import OverLru, OverThreshold, Violations
from marconi.replay.figures.tail_variants import Variants

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
