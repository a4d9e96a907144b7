"""Charts of the last minutes as SVG: lines with targets, and stacked columns. Pure functions of their data.

Vega needs half a second of the browser's processor to load and 0.12 s for each chart, again at each refresh. The
overview has six charts of this one kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from console.charts.palette import GREY
from console.charts.svg import Anchor, drawing, text, tip
from console.plain_text import shortened
from console.quantities import count

_WIDTH, _HEIGHT = 460, 200
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 34, 24
_SIZE = 11.5  # font size of text
_CHAR = 6.2  # approximate width of one character
_NAME_CHARS = 24  # limit on characters of a target's name
_ON_TOP = "paint-order:stroke;stroke:var(--st-background-color);stroke-width:3"  # text stays readable on lines
_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)

Values = Sequence[float | None]


class _Frame(NamedTuple):
    minutes: int
    most: float  # upper end of the axis
    step: float  # distance between grid lines

    def x(self, age_s: float) -> float:
        return _WIDTH - _RIGHT - (_WIDTH - _LEFT - _RIGHT) * min(age_s / (60 * self.minutes), 1.0)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (_HEIGHT - _TOP - _BOTTOM) * value / self.most


def over_time(
    ages_s: Sequence[float],
    lines: Mapping[str, Values],
    colours: Mapping[str, str],
    unit: str,
    minutes: int,
    limits: Mapping[str, float] | None = None,
) -> str:
    """Lines over time, with gaps where there is no data; `limits`, such as targets, are dashed."""
    known = [value for values in lines.values() for value in values if value is not None]
    frame = _frame(minutes, [*known, *(limits or {}).values()])
    curves = [_curve(frame, ages_s, values, colours[name]) for name, values in lines.items()]
    dashed = _limits(frame, limits or {})
    body = [_axes(frame, unit), _legend(lines, colours, unit), *curves, *dashed, _tips(frame, ages_s, lines, unit)]
    return drawing("".join(body), _WIDTH, _HEIGHT, ", ".join(lines))


def stacked(
    ages_s: Sequence[float],
    bands: Mapping[str, Sequence[float]],
    colours: Mapping[str, str],
    unit: str,
    minutes: int,
    bucket_s: float,
    nothing: str = "",
) -> str:
    """Stacked columns, one per moment; shows the text `nothing` if there are none."""
    sums = [sum(parts) for parts in zip(*bands.values(), strict=True)]
    frame = _frame(minutes, sums)
    below = [0.0] * len(ages_s)
    width = max(1.5, 0.85 * (frame.x(0) - frame.x(bucket_s)))
    columns = []
    for name, values in bands.items():
        for at, (age_s, value) in enumerate(zip(ages_s, values, strict=True)):
            if value:
                top, height = frame.y(below[at] + value), frame.y(below[at]) - frame.y(below[at] + value)
                place = f'x="{frame.x(age_s) - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}"'
                columns.append(f'<rect {place} fill="{colours.get(name, GREY)}"/>')
                below[at] += value
    caption = "" if columns else text((_LEFT + _WIDTH) / 2, _HEIGHT / 2, nothing, 13, opacity=0.65, anchor="middle")
    body = [_axes(frame, unit), _legend(bands, colours, unit), *columns, caption, _tips(frame, ages_s, bands, unit)]
    return drawing("".join(body), _WIDTH, _HEIGHT, ", ".join(bands))


def grid_step(most: float) -> float:
    """Grid step of 1, 2, 2.5 or 5 times a power of ten, so that four or five steps cover `most`."""
    if most <= 0:
        return 0.25
    scale = 10.0 ** math.floor(math.log10(most / 4))
    return next(scale * step for step in _STEPS if 4.0001 * scale * step >= most)


def _frame(minutes: int, values: Sequence[float]) -> _Frame:
    step = grid_step(max(values, default=0.0))
    return _Frame(minutes, 4 * step, step)


def _axes(frame: _Frame, unit: str) -> str:
    """Grid lines with their numbers, and the minutes."""
    parts = []
    for number in range(5):
        y = frame.y(number * frame.step)
        line = f'<path d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}" stroke="currentColor" stroke-opacity="0.12"/>'
        parts += [line, text(_LEFT - 6, y + 4, _number(number * frame.step), _SIZE, opacity=0.65, anchor="end")]
    every = frame.minutes // 5
    for minute in range(0, frame.minutes + 1, every):
        anchor: Anchor = "end" if minute == 0 else "middle" if minute < frame.minutes else "start"
        label = f"−{minute} min" if minute else "now"
        parts.append(text(frame.x(60 * minute), _HEIGHT - 6, label, _SIZE, opacity=0.65, anchor=anchor))
    return "".join([*parts, text(_WIDTH - _RIGHT, 14, unit, _SIZE, opacity=0.65, anchor="end")])


def _legend(names: Mapping[str, object], colours: Mapping[str, str], unit: str) -> str:
    """Legend in one line. Names that do not fit appear only in tooltips."""
    parts, x, end = [], float(_LEFT), _WIDTH - _RIGHT - _CHAR * (len(unit) + 2)
    for name in names:
        width = 24 + _CHAR * len(name)
        if x + width > end:
            break
        parts.append(f'<circle cx="{x + 5:.1f}" cy="10" r="4.5" fill="{colours.get(name, GREY)}"/>')
        parts.append(text(x + 14, 14, name, _SIZE))
        x += width
    return "".join(parts)


def _curve(frame: _Frame, ages_s: Sequence[float], values: Values, colour: str) -> str:
    """Lines between neighbouring values; a value without neighbours is a point."""
    points = [
        None if value is None else f"{frame.x(age_s):.1f} {frame.y(value):.1f}"
        for age_s, value in zip(ages_s, values, strict=True)
    ]
    pairs = zip([None, *points], points, strict=False)
    path = "".join("" if point is None else f"{'M' if before is None else 'L'}{point}" for before, point in pairs)
    alone = [
        f'<circle cx="{point.split()[0]}" cy="{point.split()[1]}" r="2.2" fill="{colour}"/>'
        for before, point, after in zip([None, *points], points, [*points[1:], None], strict=False)
        if point is not None and before is None and after is None
    ]
    line = f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"/>' if path else ""
    return f"<g>{line}{''.join(alone)}</g>"


def _limits(frame: _Frame, limits: Mapping[str, float]) -> list[str]:
    """Dashed lines whose names stand one after another, since lines may be at nearly the same height.

    Names that do not fit appear only in tooltips.
    """
    lines, x = [], _LEFT + 4.0
    for name, value in limits.items():
        y, label = frame.y(value), f"{shortened(name, _NAME_CHARS)} target"
        path = f"M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"
        line = f'<path d="{path}" stroke="{GREY}" stroke-width="1.5" stroke-dasharray="6 4"/>'
        width = _CHAR * len(label)
        named = text(x, y - 4, label, _SIZE, opacity=0.65) if x + width <= _WIDTH - _RIGHT else ""
        tooltip = "" if named and len(name) <= _NAME_CHARS else tip(f"{name} target")
        lines.append(f'<g>{tooltip}{line}<g style="{_ON_TOP}">{named}</g></g>')
        x += width + 2 * _CHAR
    return lines


def _tips(frame: _Frame, ages_s: Sequence[float], lines: Mapping[str, Values], unit: str) -> str:
    """Tooltips with a moment's values, where there are any."""
    width = (_WIDTH - _LEFT - _RIGHT) / max(len(ages_s), 1)
    columns = []
    for at, age_s in enumerate(ages_s):
        values = {name: value for name, of in lines.items() if (value := of[at])}
        if values:
            message = ", ".join(f"{name} {_number(value)}" for name, value in values.items())
            frame_of = f'x="{frame.x(age_s) - width / 2:.1f}" y="{_TOP}" width="{width:.1f}" height="{_HEIGHT - _TOP}"'
            columns.append(
                f'<rect {frame_of} fill="transparent">{tip(f"{age_s / 60:.1f} min ago: {message} {unit}")}</rect>'
            )
    return f"<g>{''.join(columns)}</g>"


def _number(value: float) -> str:
    return count(value) if value >= 10_000 else f"{value:.3g}" if value < 100 else f"{value:.0f}"
