"""One worker in the drawing of the cluster: a card, or a small cell where there are many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from console.charts.palette import GREEN, GREY, ORANGE, RED, ROLES
from console.charts.svg import Place, bar, escaped, text, tip
from console.plain_text import shortened
from console.quantities import seconds

CARD_W, CARD_H, CARD_GAP = 310, 72, 14
CELL, CELL_GAP = 24, 5
_CARD_CHARS = 27  # limit on characters

Worker = Mapping[str, Any]


class Standing(NamedTuple):
    """A worker's state: a word, a colour, and the share of its KV memory in use."""

    word: str
    colour: str
    used: float


def standing(worker: Worker, silent_after_s: float) -> Standing:
    """State of a member, or of a worker that left."""
    if "left_s_ago" in worker:
        return Standing("gone", RED, 0.0)
    load = worker.get("load") or {}
    total = float(worker.get("total_blocks") or 0)
    used = 1 - float(load.get("free_blocks", total)) / total if total else 0.0
    if load.get("draining"):
        return Standing("draining", GREY, used)
    if worker.get("age_s", 0.0) > silent_after_s:
        return Standing("silent", ORANGE, used)
    return Standing("serving", GREEN, used)


def card(worker: Worker, is_: Standing, place: Place) -> str:
    """A worker with its name and figures."""
    x, y, width, height = place
    colour = RED if is_.word == "gone" else ROLES[worker["role"]]
    dash = ' stroke-dasharray="5 4"' if is_.word in ("gone", "draining") else ""
    fill = f'fill="{RED}" fill-opacity="0.10"' if is_.word == "gone" else 'fill="currentColor" fill-opacity="0.03"'
    used = bar(Place(x + 16, y + height - 16, width - 28, 6), is_.used, colour)
    return (
        f'<g data-worker="{escaped(worker["worker_id"])}" data-standing="{is_.word}">'
        f"{tip(_description(worker, is_))}"
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" {fill} stroke="{colour}" '
        f'stroke-opacity="0.55"{dash}/><rect x="{x}" y="{y}" width="5" height="{height}" rx="2.5" fill="{colour}"/>'
        + text(x + 16, y + 22, shortened(worker["worker_id"], _CARD_CHARS), 14, weight=600)
        + f'<circle cx="{x + width - 16}" cy="{y + 17}" r="4.5" fill="{is_.colour}"/>'
        + text(x + width - 26, y + 22, _mark(is_.word), 12, anchor="end")
        + text(x + 16, y + 43, _figures(worker), 12.5, opacity=0.75)
        + (used if "left_s_ago" not in worker else "")
        + "</g>"
    )


def cell(worker: Worker, is_: Standing, place: Place) -> str:
    """A worker as a small square, shaded by its KV in use; the tooltip has its figures."""
    x, y, size, _ = place
    colour = ROLES[worker["role"]]
    tooltip = tip(_description(worker, is_))
    frame = f'x="{x}" y="{y}" width="{size}" height="{size}" rx="4"'
    name = f'data-worker="{escaped(worker["worker_id"])}" data-standing="{is_.word}"'
    if is_.word == "gone":
        cross = f"M{x + 7} {y + 7} l{size - 14} {size - 14} M{x + size - 7} {y + 7} l-{size - 14} {size - 14}"
        return (
            f'<g {name}>{tooltip}<rect {frame} fill="{RED}"/><path d="{cross}" stroke="white" stroke-width="2.5"/></g>'
        )
    stroke = colour if is_.word == "serving" else is_.colour
    dash = ' stroke-dasharray="3 2"' if is_.word == "draining" else ""
    shade = 0.06 + 0.9 * is_.used
    return (
        f'<g {name}>{tooltip}<rect {frame} fill="{colour}" fill-opacity="{shade:.2f}" stroke="{stroke}" '
        f'stroke-width="{1 if is_.word == "serving" else 2.5}" stroke-opacity="0.8"{dash}/></g>'
    )


def _figures(worker: Worker) -> str:
    if "left_s_ago" in worker:
        return f"left {worker['left_s_ago']:.0f} s ago"
    load = worker.get("load") or {}
    parts = [f"{load.get('num_running', 0)} running", f"{load.get('num_waiting', 0)} waiting"]
    measured, predicted = worker.get("measured_step_s"), worker.get("predicted_step_s")
    if measured is not None:
        parts.append(f"step {seconds(measured)}" + (f" (≈ {seconds(predicted)})" if predicted else ""))
    elif worker.get("prefill_free_in_s"):
        parts.append(f"free in {seconds(worker['prefill_free_in_s'])}")
    return " · ".join(parts)


def _description(worker: Worker, is_: Standing) -> str:
    used = "" if is_.word == "gone" else f", {100 * is_.used:.0f} % of KV in use"
    return f"{worker['worker_id']} ({worker['role']}): {is_.word}, {_figures(worker)}{used}"


def _mark(word: str) -> str:
    return "✕ gone" if word == "gone" else word
