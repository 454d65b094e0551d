"""Plots over time as SVG for a page: lines, a scale, and a mark for each fault."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Final, NamedTuple

WIDTH, HEIGHT = 920, 190
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 8, 24
TICKS: Final = 4
#: Classes of the page's style sheet, which has their colours for light and dark mode.
LINES: Final = ("line-1", "line-2", "line-3", "line-4")

#: One value per time; None leaves a gap.
Points = Sequence[tuple[float, float | None]]


class Mark(NamedTuple):
    """An event: its time, its class in the style sheet, its text."""

    at_s: float
    kind: str
    text: str


class Scale:
    """Maps values to heights; logarithmic if the values differ by orders of magnitude."""

    def __init__(self, values: Sequence[float], *, logarithmic: bool) -> None:
        self.logarithmic = logarithmic
        top = max(values, default=1.0)
        if logarithmic:
            lowest = min((value for value in values if value > 0), default=1.0)
            self.low = float(math.floor(math.log10(lowest)))
            self.high = max(float(math.ceil(math.log10(top or 1.0))), self.low + 1)
        else:
            self.low, self.high = 0.0, _round_up(top)

    def y(self, value: float) -> float:
        """Return the height of a value in the picture."""
        place = math.log10(max(value, 10.0**self.low)) if self.logarithmic else value
        return TOP + (HEIGHT - TOP - BOTTOM) * (1 - (place - self.low) / (self.high - self.low))

    def ticks(self) -> list[float]:
        """Return the values to write beside the picture."""
        if self.logarithmic:
            return [10.0**exponent for exponent in range(int(self.low), int(self.high) + 1)]
        return [self.high * step / TICKS for step in range(TICKS + 1)]


def _round_up(value: float) -> float:
    if value <= 0:
        return 1.0
    size = 10.0 ** math.floor(math.log10(value))
    return next(step * size for step in (1, 2, 4, 5, 8, 10) if step * size >= value)


def chart(series: Mapping[str, Points], length_s: float, marks: Sequence[Mark], *, logarithmic: bool = False) -> str:
    """Return a picture of some series; times are in s from its left end."""
    scale = Scale([value for points in series.values() for _, value in points if value is not None], logarithmic=logarithmic)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(", ".join(series))} over time">']
    for value in scale.ticks():
        y = scale.y(value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:,.10g}</text>')
    for step in range(TICKS + 1):
        at_s = length_s * step / TICKS
        parts.append(f'<text class="tick" x="{_x(at_s, length_s):.1f}" y="{HEIGHT - 6}" text-anchor="middle">{at_s:.0f} s</text>')
    for mark in marks:
        x = _x(mark.at_s, length_s)
        line = f'<line class="mark {mark.kind}" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}">'
        parts.append(f"{line}<title>{escape(mark.text)}</title></line>")
    for style, points in zip(LINES, series.values(), strict=False):
        parts += (f'<polyline class="{style}" points="{run}"/>' for run in _runs(points, length_s, scale))
    return "".join([*parts, "</svg>"])


def legend(names: Sequence[str]) -> str:
    """Return the legend."""
    return " ".join(f'<span class="{style}">{escape(name)}</span>' for style, name in zip(LINES, names, strict=False))


def _x(at_s: float, length_s: float) -> float:
    return LEFT + (WIDTH - LEFT - RIGHT) * min(max(at_s / length_s, 0.0), 1.0)


def _runs(points: Points, length_s: float, scale: Scale) -> list[str]:
    runs: list[list[str]] = [[]]
    for at_s, value in points:
        if value is None:
            runs.append([])
        else:
            runs[-1].append(f"{_x(at_s, length_s):.1f},{scale.y(value):.1f}")
    return [" ".join(run if len(run) > 1 else run * 2) for run in runs if run]
