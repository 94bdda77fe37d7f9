"""A picture of the figures: for each shape two bars, the better of stock's servers and ours; a panel for each memory.

SVG written by hand, so that it needs nothing and equal figures give equal bytes.
"""

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from .figures import Row

STOCK_COLOUR, OUR_COLOUR = "#e69f00", "#0072b2"
_NAMES, _PANEL, _GAP, _LINE, _BAR = 175, 300, 45, 30, 11
_TOP, _BOTTOM = 54, 24


def save(path: Path, rows: Sequence[Row]) -> None:
    """Write the picture; raises OSError where it cannot be written."""
    path.write_text("\n".join(["<!-- written by benchmark/traffic -->", *_picture(rows), ""]), encoding="utf-8")


def _picture(rows: Sequence[Row]) -> Iterator[str]:
    # Where nothing could be, there is nothing to show.
    shown = [row for row in rows if any(count.num_could_be_tokens for count in row.counts.values())]
    shapes = list(dict.fromkeys(row.shape for row in shown))
    memories = list(dict.fromkeys(row.memory for row in shown))
    width, height = _NAMES + len(memories) * (_PANEL + _GAP), _TOP + len(shapes) * _LINE + _BOTTOM
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">'
    )
    yield f'<rect width="{width}" height="{height}" fill="white"/>'
    legend = ((STOCK_COLOUR, "stock SGLang, its better strategy"), (OUR_COLOUR, "marconi"))
    for index, (colour, label) in enumerate(legend):
        yield f'<rect x="{_NAMES + 230 * index}" y="8" width="11" height="11" fill="{colour}"/>'
        yield f'<text x="{_NAMES + 230 * index + 17}" y="18">{label}</text>'
    for line, shape in enumerate(shapes):
        middle = _TOP + line * _LINE + _LINE / 2
        yield f'<text x="{_NAMES - 8}" y="{middle + 4:g}" text-anchor="end">{escape(shape)}</text>'
    for index, memory in enumerate(memories):
        left = _NAMES + index * (_PANEL + _GAP)
        yield from _axes(left, height, f"{memory} memory: cached, % of what could be")
        for row in shown:
            if row.memory == memory:
                yield from _bars(left, _TOP + shapes.index(row.shape) * _LINE, row)
    yield "</svg>"


def _axes(left: int, height: int, title: str) -> Iterator[str]:
    yield f'<text x="{left}" y="42" font-weight="bold">{escape(title)}</text>'
    for percent in range(0, 101, 25):
        x = left + _PANEL * percent / 100
        yield f'<line x1="{x:g}" x2="{x:g}" y1="{_TOP}" y2="{height - _BOTTOM}" stroke="#ddd"/>'
        yield f'<text x="{x:g}" y="{height - 8}" font-size="10" text-anchor="middle">{percent}</text>'


def _bars(left: int, top: int, row: Row) -> Iterator[str]:
    shares = (row.best(is_ours=False), row.best(is_ours=True))
    for index, (share, colour) in enumerate(zip(shares, (STOCK_COLOUR, OUR_COLOUR), strict=True)):
        if share is None:
            continue
        y, length = top + (_LINE - 2 * _BAR) / 2 + index * _BAR, _PANEL * share
        yield f'<rect x="{left}" y="{y:g}" width="{length:.1f}" height="{_BAR - 1}" fill="{colour}"/>'
        yield f'<text x="{left + length + 4:.1f}" y="{y + 9:g}" font-size="9">{100 * share:.1f}</text>'
