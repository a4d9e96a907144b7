"""`halfmoon plan --plot`: attainment and goodput over the rate, one line per layout, as PNG or as a page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from halfmoon.errors import InvalidRequest

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")  # by Okabe and Ito
_SHAPES = ("circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right")
_WIDTH_PX, _HEIGHT_PX = 420, 300
_SCALE = 2.0  # PNG pixels for each of these
_KINDS = (".png", ".html")


def check_plot(path: Path) -> None:
    """Checks what can be checked before the search. Raises InvalidRequest, which says what to do."""
    if path.suffix.lower() not in _KINDS:
        raise InvalidRequest(f"a plot is a {' or '.join(_KINDS)} file, not {path.name}", param="plot")
    if not path.parent.is_dir():
        raise InvalidRequest(f"the plot cannot be written: {path.parent} is not a directory", param="plot")
    _converter()


def write_plot(path: Path, spec: Mapping[str, Any]) -> None:
    """Draws a Vega-Lite specification. Raises InvalidRequest as `check_plot` does."""
    check_plot(path)
    text = json.dumps(spec)
    try:
        if path.suffix.lower() == ".png":
            path.write_bytes(_converter().vegalite_to_png(text, scale=_SCALE))
        else:
            path.write_text(_converter().vegalite_to_html(text, bundle=True))
    except OSError as error:
        raise InvalidRequest(f"the plot cannot be written: {error}", param="plot") from error


def plot_spec(summary: Mapping[str, Any]) -> dict[str, Any]:
    """A Vega-Lite specification. Rates are those of the whole layout if a rate was requested, otherwise per GPU."""
    asked = summary["rate_asked_per_s"]
    names = [curve["layout"] for curve in summary["curves"]]
    rows = [
        {
            "layout": curve["layout"],
            "rate": rate if asked else rate / curve["num_gpus"],
            "attainment": share,
            "goodput": share * (rate if asked else rate / curve["num_gpus"]),
        }
        for curve in summary["curves"]
        for rate, share in zip(curve["rate_per_s"], curve["attainment"], strict=True)
    ]
    unit = "requests/s" if asked else "requests/s for each GPU"
    goal = rule("y", summary["attainment_asked"], f"goal {summary['attainment_asked']:.0%}")
    wanted = [] if asked is None else [rule("x", asked, "asked for")]
    panels = [
        panel("attainment", "share of requests in time", unit, names, [goal, *wanted], {"domain": [0, 1]}),
        panel("goodput", f"goodput, {unit}", unit, names, wanted, {"domainMin": 0}),
    ]
    targets = summary["targets"]
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "title": f"{summary['gpu']}: TTFT {targets['ttft_s']:g} s, TPOT {targets['tpot_s']:g} s",
        "data": {"values": rows},
        "hconcat": panels,
        "config": {"view": {"strokeWidth": 0}, "background": "white"},
        "padding": 12,
    }


def panel(
    field: str,
    title: str,
    unit: str,
    names: list[str],
    rules: list[dict[str, Any]],
    scale: dict[str, Any],
    series: str = "layout",
) -> dict[str, Any]:
    """`field` of the rows over their `rate`, one line for each name of `series`."""
    legend = {"title": None, "orient": "bottom", "columns": 2, "labelLimit": 400}
    lines_of = {"field": series, "type": "nominal", "sort": names, "legend": legend}
    encoding = {
        "x": {"field": "rate", "type": "quantitative", "title": unit, "scale": {"domainMin": 0}},
        "y": {"field": field, "type": "quantitative", "title": title, "scale": scale},
        "color": {**lines_of, "scale": {"domain": names, "range": _repeated(_COLOURS, len(names))}},
        "shape": {**lines_of, "scale": {"domain": names, "range": _repeated(_SHAPES, len(names))}},
        "tooltip": [
            {"field": series, "type": "nominal"},
            *({"field": one, "type": "quantitative", "format": ".3~g"} for one in dict.fromkeys(("rate", field))),
        ],
    }
    lines = {"mark": {"type": "line", "point": {"size": 45, "filled": True}}, "encoding": encoding}
    return {"width": _WIDTH_PX, "height": _HEIGHT_PX, "layer": [*rules, lines]}


def rule(axis: str, value: float, text: str) -> dict[str, Any]:
    """A dashed line across the panel, with its label."""
    along = {"field": axis, "type": "quantitative"}
    end = {"y": along, "x": {"value": _WIDTH_PX}} if axis == "y" else {"x": along, "y": {"value": _HEIGHT_PX}}
    place = {"align": "right", "dx": -4, "dy": -5} if axis == "y" else {"align": "left", "dx": 4, "dy": -8}
    return {
        "data": {"values": [{axis: value, "text": text}]},
        "layer": [
            {"mark": {"type": "rule", "strokeDash": [6, 4], "color": "#555555"}, "encoding": {axis: along}},
            {
                "mark": {"type": "text", "color": "#555555", **place},
                "encoding": {**end, "text": {"field": "text", "type": "nominal"}},
            },
        ],
    }


def _repeated(values: tuple[str, ...], num: int) -> list[str]:
    return [values[index % len(values)] for index in range(num)]


def _converter() -> Any:
    try:
        import vl_convert
    except ModuleNotFoundError as error:
        raise InvalidRequest(
            "a plot needs vl-convert, which is not installed: pip install 'halfmoon[plot]'", param="plot"
        ) from error
    return vl_convert
