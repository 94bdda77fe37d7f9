"""What figures draw on: a few kinds of panels in one style.

The only module here that imports matplotlib, and Pillow, which comes with it. Nothing of the user's matplotlib
settings and no time or version goes into a picture, so equal numbers give equal bytes with equal versions of both.
"""

import importlib
import importlib.util
import io
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

BOX_PERCENTS: Final = (5, 25, 50, 75, 95)
"""Whiskers, quartiles and median of a box."""

_DPI: Final = 100
_PANEL_INCHES: Final = (6.4, 3.6)
_SMALL_PANEL: Final = 0.5
"""Size of one of several, of a single one's."""
_NUM_COLOURS: Final = 96
_COLOURS: Final = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#000000", "#999999")
_SYSTEMS: Final = (
    *("vLLM+", "SGLang+", "Marconi", "best (this project)"),
    *("Belady (hindsight)", "Marconi, alpha 50"),
)
_COLOUR_OF: Final = MappingProxyType(
    dict(zip(_SYSTEMS, _COLOURS, strict=False))
    | {"Marconi, best fixed alpha": _COLOURS[5], "Marconi, tuned": _COLOURS[7]}
)
"""The same in every figure; no figure has both of a fixed alpha."""
_LEGEND_CHARACTERS: Final = 100
"""Of the labels that fit side by side above one panel."""
_MARKERS: Final = "os^Dv<>x"
_STYLE: Final = MappingProxyType(
    {
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "font.size": 9,
        "grid.alpha": 0.3,
        "legend.frameon": False,
        "legend.fontsize": 8,
        "lines.markersize": 4,
    }
)

Series = Mapping[str, Sequence[float | None]]
"""Values by label; None leaves a gap."""


def require_matplotlib() -> None:
    """`ValueError` where pictures cannot be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("pictures need matplotlib: make figures installs it")


class Canvas:
    """Panels in rows; a context, within which they are drawn on and saved."""

    def __init__(self, num_rows: int = 1, num_columns: int = 1) -> None:
        self._num_rows = num_rows
        self._num_columns = num_columns
        self._style = ExitStack()
        self._figure: Any = None
        self.panels: list[Panel] = []
        """Row by row."""

    def __enter__(self) -> "Canvas":
        matplotlib = importlib.import_module("matplotlib")
        self._style.enter_context(matplotlib.rc_context())
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_STYLE)
        share = 1.0 if self._num_rows * self._num_columns == 1 else _SMALL_PANEL
        width, height = (share * inches for inches in _PANEL_INCHES)
        size = (width * self._num_columns, height * self._num_rows)
        self._figure = importlib.import_module("matplotlib.figure").Figure(size, dpi=_DPI, layout="constrained")
        axes = self._figure.subplots(self._num_rows, self._num_columns, squeeze=False)
        self.panels = [Panel(each, matplotlib) for row in axes for each in row]
        return self

    def __exit__(self, *raised: object) -> None:
        self._style.close()

    def share_legend(self) -> None:
        """One legend above all panels, from the first."""
        handles, labels = self.panels[0].legend_entries()
        self._figure.legend(handles, labels, loc="outside upper center", ncols=len(labels))

    def save(self, path: Path) -> None:
        """Write a PNG of few colours, a third of the size of one of all."""
        image = importlib.import_module("PIL.Image")
        drawn = io.BytesIO()
        self._figure.savefig(drawn, format="png", metadata={"Software": None}, bbox_inches="tight")
        few = image.open(drawn).convert("RGB").quantize(_NUM_COLOURS, image.Quantize.MAXCOVERAGE)
        few.save(path, format="PNG", optimize=True)


class Panel:
    """One pair of axes."""

    def __init__(self, axes: Any, matplotlib: Any) -> None:
        self._axes = axes
        self._matplotlib = matplotlib

    def name(self, x: str = "", y: str = "", title: str = "") -> None:
        """What the axes are, with units; what is empty stays as it is."""
        given = {"xlabel": x, "ylabel": y, "title": title}
        self._axes.set(**{what: text for what, text in given.items() if text})

    def lines(self, x: Sequence[float], series: Series, scales: str = "", *, legend: bool = True) -> None:
        """A line for each of `series` over `x`; `scales` names the logarithmic axes: "", "x" or "xy"."""
        for index, (label, y) in enumerate(series.items()):
            values = [float("nan") if each is None else each for each in y]
            marker = _MARKERS[index % len(_MARKERS)] if len(x) <= 24 else None
            self._axes.plot(x, values, label=label, color=_colour(index, label), marker=marker)
        if "x" in scales:
            self._axes.set_xscale("log", base=2)
        if "y" in scales:
            self._axes.set_yscale("log")
        if legend:
            self._legend(series)

    def bars(self, groups: Sequence[str], series: Series) -> None:
        """Bars side by side, one for each of `series` in every group."""
        width = 0.8 / len(series)
        for index, (label, values) in enumerate(series.items()):
            left = [position + (index - (len(series) - 1) / 2) * width for position in range(len(groups))]
            heights = [float("nan") if each is None else each for each in values]
            bars = self._axes.bar(left, heights, width, label=label, color=_colour(index, label))
            self._axes.bar_label(bars, fmt="{:.3g}", fontsize=6.5)
        self._axes.axhline(0, color="black", linewidth=0.6)
        self._axes.set_xticks(range(len(groups)), groups)
        self._legend(series)

    def boxes(self, groups: Sequence[str], series: Mapping[str, Sequence[Sequence[float]]]) -> None:
        """Boxes of the percentiles `BOX_PERCENTS`, one for each of `series` in every group."""
        width = 0.8 / len(series)
        for index, (label, boxes) in enumerate(series.items()):
            centre = [position + (index - (len(series) - 1) / 2) * width for position in range(len(groups))]
            names = ("whislo", "q1", "med", "q3", "whishi")
            stats = [dict(zip(names, box, strict=True)) for box in boxes]
            style = {"facecolor": _colour(index, label), "alpha": 0.7}
            drawn = self._axes.bxp(
                stats,
                centre,
                widths=0.85 * width,
                showfliers=False,
                patch_artist=True,
                boxprops=style,
                medianprops={"color": "black"},
                manage_ticks=False,
            )
            drawn["boxes"][0].set_label(label)
        self._axes.set_xticks(range(len(groups)), groups)
        self._axes.set_xlim(-0.6, len(groups) - 0.4)
        self._legend(series)

    def table(self, header: Sequence[str], rows: Sequence[Sequence[str]], shades: Any = None) -> None:
        """A table; `shades`, a number from -1 (bad) to 1 (good) for each cell or None, colours it."""
        self._axes.axis("off")
        colours = None
        if shades is not None:
            colours = [[self._shade(value) for value in row] for row in shades]
        columns = zip(header, *rows, strict=True)
        widths = [2 + max(len(line) for cell in column for line in cell.split("\n")) for column in columns]
        table = self._axes.table(
            cellText=rows,
            colLabels=header,
            cellColours=colours,
            colWidths=[width / sum(widths) for width in widths],
            bbox=(0, 0, 1, 1),
            cellLoc="center",
        )
        table.auto_set_font_size(False)
        table.set_fontsize(8)

    def _shade(self, value: float | None) -> Any:
        return (
            "white" if value is None else self._matplotlib.colormaps["RdYlGn"](0.5 + 0.3 * max(-1.0, min(1.0, value)))
        )

    def legend_entries(self) -> Any:
        """What was drawn, and its labels."""
        return self._axes.get_legend_handles_labels()

    def _legend(self, series: Mapping[str, object]) -> None:
        if len(series) > 1:
            longest = max(map(len, series))
            num_columns = min(len(series), max(1, _LEGEND_CHARACTERS // (longest + 8)))
            self._axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=num_columns, borderaxespad=0.2)


def _colour(index: int, label: str) -> str:
    return _COLOUR_OF.get(label, _COLOURS[index % len(_COLOURS)])
