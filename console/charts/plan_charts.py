"""Charts of a plan's curves: one line per layout, told apart by colour and point shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from console.charts.charts import Chart, Spec
from console.charts.palette import GREY, SERIES

_HEIGHT_PX = 280  # plus a legend line for each layout
_LEGEND_PX = 20
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right")
_TITLES = {"attainment": "requests in time", "goodput": "goodput, requests/s"}

Figure = Literal["attainment", "goodput"]


def curve_rows(name: str, curve: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Points of one line."""
    pairs = zip(curve["rate_per_s"], curve["attainment"], strict=True)
    return [{"layout": name, "rate": rate, "attainment": share, "goodput": rate * share} for rate, share in pairs]


def over_rate(rows: Sequence[Mapping[str, Any]], figure: Figure, goal: float, rate_per_s: float | None) -> Chart:
    """Chart over the rate of the whole layout; the goal and the requested rate are dashed."""
    names = list(dict.fromkeys(row["layout"] for row in rows))
    encoding = {
        "x": {"field": "rate", "type": "quantitative", "title": "requests/s", "scale": {"domainMin": 0}},
        "y": {
            "field": figure,
            "type": "quantitative",
            "title": _TITLES[figure],
            "scale": {"domainMin": 0, **({"domainMax": 1} if figure == "attainment" else {})},
            "axis": {"tickCount": 5, **({"format": "%"} if figure == "attainment" else {})},
        },
        "color": _series(names, list(SERIES)),
        "shape": _series(names, list(_SHAPES)),
        "tooltip": [
            {"field": "layout", "type": "nominal"},
            {"field": "rate", "type": "quantitative", "format": ".3~g", "title": "requests/s"},
            {"field": "attainment", "type": "quantitative", "format": ".1%", "title": "in time"},
            {"field": "goodput", "type": "quantitative", "format": ".3~g"},
        ],
    }
    lines = {"mark": {"type": "line", "strokeWidth": 2, "point": {"size": 45, "filled": True}}, "encoding": encoding}
    limits = [_limit("y", goal)] if figure == "attainment" else []
    limits += [] if rate_per_s is None else [_limit("x", rate_per_s)]
    spec: Spec = {
        "layer": [lines, *limits],
        "height": _HEIGHT_PX + _LEGEND_PX * len(names),
        "config": {"view": {"strokeWidth": 0}},
    }
    return Chart(rows, spec)


def _series(names: Sequence[str], values: Sequence[str]) -> Spec:
    """Encoding shared by colour and shape, so that they have one legend."""
    legend = {"title": None, "orient": "bottom", "columns": 1, "labelLimit": 420}
    scale = {"domain": list(names), "range": [values[at % len(values)] for at in range(len(names))]}
    return {"field": "layout", "type": "nominal", "sort": list(names), "scale": scale, "legend": legend}


def _limit(axis: Literal["x", "y"], value: float) -> Spec:
    mark = {"type": "rule", "strokeDash": [6, 4], "color": GREY, "strokeWidth": 1.5}
    encoding = {axis: {"field": "limit", "type": "quantitative"}}
    return {"data": {"values": [{"limit": value}]}, "mark": mark, "encoding": encoding}
