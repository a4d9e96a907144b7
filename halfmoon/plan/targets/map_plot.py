"""Draws a map: one square for each pair of targets, coloured by the layout that wins and by how much."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from typing import Any

_SQUARE_PX = 56
_MOST = 1.0  # of the colour scale: twice the goodput
_COLOURS = ("#0072B2", "#f4f4f4", "#D55E00")  # by Okabe and Ito: colocated, even, separate
_NONE = "#dcdcdc"
_SURE = {"sure": "", "by the times": "~", "open": "?"}

HOW_TO_READ = (
    "goodput for each GPU: orange, separate prefill and decode workers win; blue, colocated ones. "
    "~ if the times are right, ? not for every seed"
)


def map_spec(summary: Mapping[str, Any], square_px: int = _SQUARE_PX, *, has_legend: bool = True) -> dict[str, Any]:
    """A Vega-Lite specification of a map's summary."""
    rows = [_row(cell) for cell in summary["cells"]]
    x = {
        "field": "tpot",
        "type": "ordinal",
        "title": "TPOT target, ms",
        "sort": None,
        "axis": {"labelAngle": 0, "orient": "bottom"},
    }
    y = {"field": "ttft", "type": "ordinal", "title": "TTFT target, ms", "sort": "descending"}
    scale = {"domain": [-_MOST, 0, _MOST], "range": list(_COLOURS), "clamp": True}
    tooltip = [
        {"field": name, "type": "nominal"} for name in ("ttft", "tpot", "winner", "gain", "range", "confidence")
    ] + [{"field": name, "type": "nominal"} for name in ("separate", "colocated")]
    subtitle = [summary["sentence"], HOW_TO_READ] if has_legend else []
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "title": {
            "text": f"{summary['model']}, {summary['workload']}, {summary['gpu']}",
            "subtitle": _wrapped(subtitle, len(summary["tpots_s"]) * square_px // 6),
            "anchor": "start",
        },
        "usermeta": {"how_to_read": HOW_TO_READ},
        "data": {"values": rows},
        "width": square_px * len(summary["tpots_s"]),
        "height": square_px * len(summary["ttfts_s"]) * 0.7,
        "encoding": {"x": x, "y": y, "tooltip": tooltip},
        "layer": [
            {
                "mark": {"type": "rect", "stroke": "white"},
                "encoding": {
                    "color": {
                        "condition": {"test": "datum.winner == 'none'", "value": _NONE},
                        "field": "doublings",
                        "type": "quantitative",
                        "scale": scale,
                        "legend": None,
                    }
                },
            },
            {
                "mark": {"type": "text", "fontSize": max(square_px // 5, 8)},
                "encoding": {
                    "text": {"field": "label", "type": "nominal"},
                    "color": {"condition": {"test": "abs(datum.doublings) > 0.6", "value": "white"}, "value": "#222"},
                },
            },
        ],
        "config": {"view": {"strokeWidth": 0}, "background": "white", "axis": {"domain": False, "ticks": False}},
        "padding": 12,
    }


def lead_text(cell: Mapping[str, Any]) -> str:
    """The winner's lead in a few characters: `+23%`, `only` where the other one has no goodput, `=` or `-`."""
    if cell["winner"] == "none":
        return "-"
    sure = _SURE[cell["confidence"]]
    if cell["winner"] == "even":
        return f"={sure}"
    if cell["gain"] is None:
        return f"only{sure}"
    lead = max(cell["gain"], 1 / cell["gain"])
    return f"+{lead - 1:.0%}{sure}" if lead < 2 else f"{lead:.1f}x{sure}"


def _row(cell: Mapping[str, Any]) -> dict[str, Any]:
    sign = {"disaggregated": 1.0, "colocated": -1.0}.get(cell["winner"], 0.0)
    doublings = sign * _MOST if cell["gain"] is None else math.log2(cell["gain"])
    low, high = (_times(cell[name]) for name in ("gain_low", "gain_high"))
    return {
        "ttft": round(1e3 * cell["ttft_s"], 3),
        "tpot": round(1e3 * cell["tpot_s"], 3),
        "winner": cell["winner"],
        "doublings": doublings,
        "label": lead_text(cell),
        "gain": _times(cell["gain"]),
        "range": f"{low} to {high}",
        "confidence": cell["confidence"],
        "separate": _best(cell["disaggregated"]),
        "colocated": _best(cell["colocated"]),
    }


def _times(gain: float | None) -> str:
    return "no rival" if gain is None else f"{gain:.2f}"


def _best(best: Mapping[str, Any] | None) -> str:
    if best is None:
        return "meets neither"
    return f"{best['layout']}: {best['goodput_per_s_per_gpu']:.3g} requests/s a GPU"


def _wrapped(texts: list[str], width: int) -> list[str]:
    return [line for text in texts for line in textwrap.wrap(text, max(width, 40))]
