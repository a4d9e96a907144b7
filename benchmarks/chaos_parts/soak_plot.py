"""The soak's curves as PNG, drawn by vl-convert (`pip install 'halfmoon[plot]'`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos_parts.samples import Sample

_COLOURS = ("#0072B2", "#009E73", "#D55E00", "#000000", "#CC79A7", "#E69F00")  # by Okabe and Ito
_KILLED_COLOUR = "#BBBBBB"
_PANELS = (("rss", "RSS, MiB"), ("descriptors", "descriptors"), ("threads", "threads"))
_WIDTH_PX, _HEIGHT_PX = 330, 220


def write_soak_plot(path: Path, samples: Sequence[Sample], title: str) -> None:
    """Draws a panel for each quantity, a line for each service; places whose process was killed are grey.

    `path` ends in .png.
    """
    import vl_convert

    pids: dict[str, set[int]] = {}
    for one in samples:
        if one.quantity == "rss":
            pids.setdefault(one.service, set()).add(one.pid)
    names = sorted(pids, key=lambda name: (len(pids[name]) == 1, name))  # the grey ones lie under the others
    killed = {name for name in names if len(pids[name]) > 1}
    blocks = _panel("blocks", "used KV blocks of all workers", _sums(samples, "blocks"), ["workers"], set())
    panels = [_panel(quantity, label, _rows(samples, quantity), names, killed) for quantity, label in _PANELS]
    spec = {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "title": title,
        "vconcat": [{"hconcat": panels[:2]}, {"hconcat": [panels[2], blocks]}],
        "resolve": {"scale": {"color": "independent"}},
        "config": {"view": {"strokeWidth": 0}, "background": "white"},
        "padding": 12,
    }
    path.write_bytes(vl_convert.vegalite_to_png(json.dumps(spec), scale=2.0))


def _rows(samples: Sequence[Sample], quantity: str) -> list[dict[str, Any]]:
    return [
        {"minute": one.t_s / 60, "service": one.service, "value": one.value}
        for one in samples
        if one.quantity == quantity
    ]


def _sums(samples: Sequence[Sample], quantity: str) -> list[dict[str, Any]]:
    totals: dict[float, float] = {}
    for one in samples:
        if one.quantity == quantity:
            totals[one.t_s] = totals.get(one.t_s, 0.0) + one.value
    return [{"minute": t_s / 60, "service": "workers", "value": value} for t_s, value in totals.items()]


def _panel(name: str, label: str, rows: list[dict[str, Any]], services: list[str], killed: set[str]) -> dict[str, Any]:
    others = [service for service in services if service not in killed]
    colour_of = {service: _COLOURS[index % len(_COLOURS)] for index, service in enumerate(others)}
    colours = [colour_of.get(service, _KILLED_COLOUR) for service in services]
    return {
        "name": name,
        "width": _WIDTH_PX,
        "height": _HEIGHT_PX,
        "data": {"values": rows},
        "mark": {"type": "line", "strokeWidth": 1.2},
        "encoding": {
            "x": {"field": "minute", "type": "quantitative", "title": "minutes"},
            "y": {"field": "value", "type": "quantitative", "title": label, "scale": {"domainMin": 0}},
            "color": {
                "field": "service",
                "type": "nominal",
                "scale": {"domain": services, "range": colours},
                "legend": {"title": None, "orient": "bottom", "columns": 5},
            },
        },
    }
