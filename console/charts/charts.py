"""Charts shared by several pages, as Vega-Lite: rows and a specification. Pure functions of their data.

Specifications are plain dictionaries: Altair takes 100 ms of a core to build one, and a page with six builds them every
two seconds. The rows are passed separately from the specification, which stays the same between refreshes; the browser
then updates the drawing instead of rebuilding it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import streamlit as st

from console.charts.palette import GREY

Row = Mapping[str, Any]
Spec = dict[str, Any]


class Chart(NamedTuple):
    """Rows and their Vega-Lite specification."""

    rows: Sequence[Row]
    spec: Spec


def show(chart: Chart, key: str) -> None:
    """Puts a chart on the page."""
    st.vega_lite_chart([dict(row) for row in chart.rows], chart.spec, key=key, width="stretch")


def parts(rows: Sequence[Row], colours: Mapping[str, str], unit: str) -> Chart:
    """Stacked bars: one per `label`, in the order of the rows, made of coloured `part`s of some `value`."""
    order = list(dict.fromkeys(row["label"] for row in rows))
    ranks = {name: rank for rank, name in enumerate(colours)}
    encoding = {
        "x": {**_quantity("value", unit, axis={"tickCount": 6, "grid": True}), "stack": True},
        "y": _labels("label", order),
        "color": _colour("part", [name for name in colours if any(row["part"] == name for row in rows)], colours),
        "order": {"field": "order", "type": "ordinal"},
        "tooltip": [_tip("label"), _tip("part"), _tip("value", ".4~g", unit)],
    }
    mark = {"type": "bar", "size": 16, "cornerRadius": 2}
    ranked = [{**row, "order": ranks[row["part"]]} for row in rows]
    return Chart(ranked, _sized({"mark": mark, "encoding": encoding}, 110 + 36 * max(len(order), 1)))


def spans(rows: Sequence[Row], colours: Mapping[str, str]) -> Chart:
    """A timeline of `service`, `name`, `start_ms`, `end_ms`, `predicted_ms` and `amount`."""
    order = list(dict.fromkeys(row["service"] for row in rows))
    encoding = {
        "x": _quantity("start_ms", "ms since arrival", axis={"tickCount": 8, "grid": True}),
        "x2": {"field": "end_ms"},
        "y": _labels("service", order),
        "color": _colour("name", [name for name in colours if any(row["name"] == name for row in rows)], colours),
        "tooltip": [
            _tip("service"),
            _tip("name"),
            _tip("took_ms", ".4~g", "ms"),
            _tip("predicted_ms", ".4~g"),
            _tip("amount"),
        ],
    }
    timed = [{**row, "took_ms": row["end_ms"] - row["start_ms"]} for row in rows]
    mark = {"type": "bar", "size": 18, "cornerRadius": 2}
    return Chart(timed, _sized({"mark": mark, "encoding": encoding}, 95 + 30 * len(order)))


def against(rows: Sequence[Mapping[str, float]], colour: str) -> Chart:
    """Predicted against measured seconds on logarithmic axes; on the diagonal they are equal."""
    values = [row[side] for row in rows for side in ("predicted", "measured")]
    domain = [10 ** (_exponent(min(values, default=0.001)) - 1), 10 ** _exponent(max(values, default=1.0))]
    scale = {"type": "log", "domain": domain, "nice": False}
    axis = {"tickCount": 4, "format": "~g", "titleFontWeight": "normal"}
    encoding = {
        side: {"field": field, "type": "quantitative", "title": f"{field} s", "scale": scale, "axis": axis}
        for side, field in (("x", "predicted"), ("y", "measured"))
    }
    tips = [_tip("predicted", ".4~g"), _tip("measured", ".4~g")]
    points = {
        "mark": {"type": "circle", "size": 38, "opacity": 0.55, "color": colour},
        "encoding": {**encoding, "tooltip": tips},
    }
    diagonal = {
        "data": {"values": [{"predicted": end, "measured": end} for end in domain]},
        "mark": {"type": "line", "color": GREY, "strokeDash": [4, 4]},
        "encoding": encoding,
    }
    return Chart(rows, _sized({"layer": [diagonal, points]}, 260))


def _quantity(field: str, title: str, axis: Mapping[str, Any]) -> Spec:
    return {"field": field, "type": "quantitative", "title": title, "axis": dict(axis), "scale": {"domainMin": 0}}


def _labels(field: str, order: Sequence[str]) -> Spec:
    return {"field": field, "type": "nominal", "title": None, "sort": list(order), "axis": {"labelLimit": 260}}


def _colour(field: str, names: Sequence[str], colours: Mapping[str, str]) -> Spec:
    scale = {"domain": list(names), "range": [colours.get(name, GREY) for name in names]}
    legend = {"title": None, "orient": "top", "symbolType": "circle", "symbolOpacity": 1, "offset": 6, "columns": 6}
    return {"field": field, "type": "nominal", "scale": scale, "legend": legend}


def _tip(field: str, number: str | None = None, title: str | None = None) -> Spec:
    kind = {"type": "nominal"} if number is None else {"type": "quantitative", "format": number}
    return {"field": field, "title": title or field.replace("_", " "), **kind}


def _sized(spec: Spec, height_px: int) -> Spec:
    """Sets the height of the whole chart, including axes and legend."""
    padding = dict.fromkeys(("top", "bottom", "left", "right"), 4)
    return {**spec, "height": height_px, "config": {"view": {"strokeWidth": 0}}, "padding": padding}


def _exponent(value: float) -> int:
    """Exponent of the next power of ten."""
    exponent = 0
    while 10**exponent < value:
        exponent += 1
    while 10 ** (exponent - 1) >= value:
        exponent -= 1
    return exponent
