"""Bar charts as SVG, without a library: text in, text out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, RIGHT = 820, 170
#: Width of a character of a label.
CHARACTER = 6.6
BAR, GAP, GROUP_GAP, TOP, BOTTOM = 15, 3, 12, 62, 34
#: The colours of series, readable on white and by colour-blind readers.
COLOURS = ("#1f77b4", "#ff9f4a", "#7f7f7f", "#2ca02c")
_STYLE = "text{font:12px sans-serif;fill:#222}.title{font-size:14px;font-weight:bold}.axis{fill:#666;font-size:11px}"


@dataclass(frozen=True)
class Bar:
    """A bar: its series, its value, the text behind it, and the value that it should reach or stay below; None if there is none."""

    series: str
    value: float
    text: str
    goal: float | None = None


@dataclass(frozen=True)
class Chart:
    """Groups of bars, each with a label. On a logarithmic scale, all values must be positive."""

    title: str
    unit: str
    groups: Sequence[tuple[str, Sequence[Bar]]]
    logarithmic: bool = False

    @property
    def series(self) -> list[str]:
        """Return the names of the series in the order in which they appear."""
        return list(dict.fromkeys(bar.series for _, bars in self.groups for bar in bars))


class Scale:
    """Turns values into lengths."""

    def __init__(self, values: Sequence[float], length: float, logarithmic: bool) -> None:
        """The greatest of the values gets all of ``length``. A logarithmic scale begins at the power of ten below the least one."""
        self._length, self._logarithmic = length, logarithmic
        self.greatest = max(values)
        self.least = 10.0 ** math.floor(math.log10(min(values))) if logarithmic else 0.0

    def length_of(self, value: float) -> float:
        """Return the length of a bar."""
        if self._logarithmic:
            return self._length * math.log(value / self.least) / max(math.log(self.greatest / self.least), 1e-9)
        return self._length * value / max(self.greatest, 1e-9)

    def ticks(self) -> list[float]:
        """Return the values that the axis names."""
        if self._logarithmic:
            return [10.0**power for power in range(round(math.log10(self.least)), math.floor(math.log10(self.greatest)) + 1)]
        step = 10.0 ** math.floor(math.log10(self.greatest))
        step = next(each for each in (step / 5, step / 2, step, 2 * step) if self.greatest / each <= 6)
        return [step * number for number in range(int(self.greatest / step + 1e-9) + 1)]


def drawn(chart: Chart) -> str:
    """Return the SVG of a chart."""
    bars = [bar for _, group in chart.groups for bar in group]
    left = round(20 + CHARACTER * max(len(label) for label, _ in chart.groups))
    scale = Scale([each for bar in bars for each in (bar.value, bar.goal) if each], WIDTH - left - RIGHT, chart.logarithmic)
    colours = dict(zip(chart.series, COLOURS, strict=False))
    body: list[str] = []
    y = float(TOP)
    for label, group in chart.groups:
        middle = y + (len(group) * (BAR + GAP) - GAP) / 2 + 4
        body.append(_text(left - 8, middle, label, 'text-anchor="end"'))
        for bar in group:
            length = scale.length_of(bar.value) if bar.value else 0.0
            body.append(f'<rect x="{left}" y="{y:.1f}" width="{length:.1f}" height="{BAR}" fill="{colours[bar.series]}"/>')
            if bar.goal is not None:
                at = left + scale.length_of(bar.goal)
                body.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{y - 1:.1f}" y2="{y + BAR + 1:.1f}" stroke="#c00" stroke-width="2"/>')
            beyond = max(length, scale.length_of(bar.goal) + 2 if bar.goal is not None else 0.0)
            body.append(_text(left + beyond + 5, y + BAR - 3, bar.text))
            y += BAR + GAP
        y += GROUP_GAP
    height = y + BOTTOM
    body += [
        _text(left + scale.length_of(each), y + 12, f"{each:g}", 'class="axis" text-anchor="middle"') for each in scale.ticks() if each
    ]
    unit = chart.unit + (", logarithmic scale" if chart.logarithmic else "")
    body.append(_text(left, y + 28, unit, 'class="axis"'))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}" role="img">'
    lines = [head, f"<title>{escape(chart.title)}</title>", f"<style>{_STYLE}</style>", '<rect width="100%" height="100%" fill="#fff"/>']
    lines += [_text(10, 20, chart.title, 'class="title"'), *_legend(chart, colours), *body, "</svg>"]
    return "\n".join(lines) + "\n"


def _legend(chart: Chart, colours: dict[str, str]) -> list[str]:
    lines, x = [], 10.0
    for name in chart.series:
        lines += [f'<rect x="{x:.0f}" y="32" width="12" height="12" fill="{colours[name]}"/>', _text(x + 17, 42, name)]
        x += 34 + 6.6 * len(name)
    if any(bar.goal is not None for _, bars in chart.groups for bar in bars):
        lines += [f'<line x1="{x + 4:.0f}" x2="{x + 4:.0f}" y1="31" y2="45" stroke="#c00" stroke-width="2"/>', _text(x + 12, 42, "goal")]
    return lines


def _text(x: float, y: float, said: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{" " if more else ""}{more}>{escape(said)}</text>'
