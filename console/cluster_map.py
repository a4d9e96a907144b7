"""The cluster as a drawing: gateway, workers by role, the links between them. Cards while they are few, then cells.

One SVG, so that 256 workers are one element of the page. Its text takes the page's colour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from console.palette import GREEN, GREY, ORANGE, RED, ROLES
from console.plain_text import shortened
from console.quantities import seconds

_MAX_CARDS = 6  # of one role; more are cells
_WIDTH = 1000
_CARD_W, _CARD_H, _CARD_GAP = 310, 72, 14
_CELL, _CELL_GAP, _CELLS_A_ROW = 24, 5, 11
_COLUMNS = {"prefill": 245, "decode": 685, "both": 245}
_GATEWAY_W, _GATEWAY_H = 170, 78
_CARD_CHARS, _GATEWAY_CHARS = 27, 22  # that fit into them
_TOP = 34

Worker = Mapping[str, Any]


class Standing(NamedTuple):
    """What is said of a worker: a word, a colour, and how much of its KV memory is in use."""

    word: str
    colour: str
    used: float


class _Place(NamedTuple):
    x: float
    y: float
    width: float
    height: float


def standing(worker: Worker, heartbeat_s: float = 1.0) -> Standing:
    """Of a member, or of one that left."""
    if "left_s_ago" in worker:
        return Standing("gone", RED, 0.0)
    load = worker.get("load") or {}
    total = float(worker.get("total_blocks") or 0)
    used = 1 - float(load.get("free_blocks", total)) / total if total else 0.0
    if load.get("draining"):
        return Standing("draining", GREY, used)
    if worker.get("age_s", 0.0) > 1.8 * heartbeat_s:
        return Standing("silent", ORANGE, used)
    return Standing("serving", GREEN, used)


def all_workers(cluster: Mapping[str, Any]) -> list[Worker]:
    """The members, and those that left a moment ago."""
    return [*cluster["workers"], *cluster.get("departed", ())]


def draw(cluster: Mapping[str, Any]) -> str:
    """HTML: one SVG element. All that others have named is escaped."""
    workers = sorted(all_workers(cluster), key=lambda one: _natural(one["worker_id"]))
    by_role = {role: [one for one in workers if one["role"] == role] for role in ("prefill", "both", "decode")}
    places: dict[str, _Place] = {}
    shapes: list[str] = []
    bottoms = dict.fromkeys(_COLUMNS.values(), float(_TOP))
    for role, members in by_role.items():
        if members:
            x = _COLUMNS[role]
            title_y = bottoms[x] - 12
            drawn, bottoms[x] = _group(members, x, bottoms[x], cluster.get("heartbeat_interval_s", 1.0), places)
            title = f"{role} · {len(members)}" if role != "both" else f"prefill and decode · {len(members)}"
            shapes.append(_text(x, title_y, title, 13, ROLES[role], weight=600))
            shapes += drawn
            bottoms[x] += 40
    height = max(*bottoms.values(), _TOP + _GATEWAY_H + 70) - 26
    middle = (_TOP + height) / 2 - _GATEWAY_H / 2
    gateway = _Place(10, middle, _GATEWAY_W, _GATEWAY_H)
    links = [*_spokes(gateway, by_role, places), *_links(workers, places)]
    body = "".join([*links, *_gateway(cluster, gateway), *shapes])
    return (
        f'<div><svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height:.0f}" width="100%" role="img" '
        f'aria-label="The cluster" style="font-family:inherit;color:inherit;max-height:{max(height, 260):.0f}px">'
        f"{body}</svg></div>"
    )


def _group(
    members: Sequence[Worker], x: float, y: float, heartbeat_s: float, places: dict[str, _Place]
) -> tuple[list[str], float]:
    """The shapes of one role from (x, y) down, and where they end."""
    shapes = []
    if len(members) <= _MAX_CARDS:
        for number, worker in enumerate(members):
            place = _Place(x, y + number * (_CARD_H + _CARD_GAP), _CARD_W, _CARD_H)
            places[worker["worker_id"]] = place
            shapes.append(_card(worker, standing(worker, heartbeat_s), place))
        return shapes, y + len(members) * (_CARD_H + _CARD_GAP) - _CARD_GAP
    step = _CELL + _CELL_GAP
    for number, worker in enumerate(members):
        row, column = divmod(number, _CELLS_A_ROW)
        place = _Place(x + column * step, y + row * step, _CELL, _CELL)
        shapes.append(_cell(worker, standing(worker, heartbeat_s), place))
    return shapes, y + -(-len(members) // _CELLS_A_ROW) * step - _CELL_GAP


def _card(worker: Worker, is_: Standing, place: _Place) -> str:
    x, y, width, height = place
    colour = RED if is_.word == "gone" else ROLES[worker["role"]]
    dash = ' stroke-dasharray="5 4"' if is_.word in ("gone", "draining") else ""
    fill = f'fill="{RED}" fill-opacity="0.10"' if is_.word == "gone" else 'fill="currentColor" fill-opacity="0.03"'
    bar_w = width - 28
    frame = f'x="{x + 16}" y="{y + height - 16}" height="6" rx="3"'
    bar = (
        f'<rect {frame} width="{bar_w}" fill="currentColor" fill-opacity="0.12"/>'
        f'<rect {frame} width="{bar_w * is_.used:.1f}" fill="{colour}"/>'
    )
    return (
        f'<g data-worker="{_escaped(worker["worker_id"])}" data-standing="{is_.word}">'
        f"<title>{_said(worker, is_)}</title>"
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="8" {fill} stroke="{colour}" '
        f'stroke-opacity="0.55"{dash}/><rect x="{x}" y="{y}" width="5" height="{height}" rx="2.5" fill="{colour}"/>'
        + _text(x + 16, y + 22, shortened(worker["worker_id"], _CARD_CHARS), 14, weight=600)
        + f'<circle cx="{x + width - 16}" cy="{y + 17}" r="4.5" fill="{is_.colour}"/>'
        + _text(x + width - 26, y + 22, _mark(is_.word), 12, is_.colour, anchor="end")
        + _text(x + 16, y + 43, _figures(worker), 12.5, opacity=0.75)
        + (bar if "left_s_ago" not in worker else "")
        + "</g>"
    )


def _cell(worker: Worker, is_: Standing, place: _Place) -> str:
    x, y, size, _ = place
    colour = ROLES[worker["role"]]
    tip = f"<title>{_said(worker, is_)}</title>"
    frame = f'x="{x}" y="{y}" width="{size}" height="{size}" rx="4"'
    name = f'data-worker="{_escaped(worker["worker_id"])}" data-standing="{is_.word}"'
    if is_.word == "gone":
        cross = f"M{x + 7} {y + 7} l{size - 14} {size - 14} M{x + size - 7} {y + 7} l-{size - 14} {size - 14}"
        return f'<g {name}>{tip}<rect {frame} fill="{RED}"/><path d="{cross}" stroke="white" stroke-width="2.5"/></g>'
    stroke = colour if is_.word == "serving" else is_.colour
    dash = ' stroke-dasharray="3 2"' if is_.word == "draining" else ""
    shade = 0.06 + 0.9 * is_.used
    return (
        f'<g {name}>{tip}<rect {frame} fill="{colour}" fill-opacity="{shade:.2f}" stroke="{stroke}" '
        f'stroke-width="{1 if is_.word == "serving" else 2.5}" stroke-opacity="0.8"{dash}/></g>'
    )


def _gateway(cluster: Mapping[str, Any], place: _Place) -> list[str]:
    x, y, width, height = place
    missing = cluster.get("missing")
    colour, word = (RED, "refusing") if missing else (GREEN, "serving")
    return [
        f'<rect x="{x}" y="{y:.1f}" width="{width}" height="{height}" rx="8" fill="currentColor" fill-opacity="0.05" '
        f'stroke="currentColor" stroke-opacity="0.35"/>',
        _text(x + 16, y + 26, "gateway", 14, weight=600),
        f'<circle cx="{x + width - 16}" cy="{y + 21:.1f}" r="4.5" fill="{colour}"/>',
        _text(x + width - 26, y + 26, word, 12, colour, anchor="end"),
        _text(x + 16, y + 47, shortened(cluster.get("served_model") or "", _GATEWAY_CHARS), 12.5, opacity=0.75),
        _text(x + 16, y + 65, shortened(cluster.get("gateway_id") or "", _GATEWAY_CHARS), 11, opacity=0.5),
    ]


def _spokes(gateway: _Place, by_role: Mapping[str, Sequence[Worker]], places: Mapping[str, _Place]) -> list[str]:
    """From the gateway to whom it sends prompts: each card, or the field of cells."""
    x1, y1 = gateway.x + gateway.width, gateway.y + gateway.height / 2
    ends = [
        places[one["worker_id"]] for role in ("prefill", "both") for one in by_role[role] if one["worker_id"] in places
    ]
    if not ends:
        ends = [_Place(_COLUMNS["prefill"] - 6, y1 - 20, 1, 40)]
    return [_curve(x1, y1, end.x, end.y + end.height / 2, 1.2, 0.25) for end in ends]


def _links(workers: Sequence[Worker], places: Mapping[str, _Place]) -> list[str]:
    """From where KV goes to where it goes, where both ends are cards: thick where the link's speed was measured."""
    decodes = [one for one in workers if one["role"] == "decode" and one["worker_id"] in places]
    prefills = [one for one in workers if one["role"] == "prefill" and one["worker_id"] in places]
    return [_link(one, other, places) for one in prefills for other in decodes]


def _link(prefill: Worker, decode: Worker, places: Mapping[str, _Place]) -> str:
    start, end = places[prefill["worker_id"]], places[decode["worker_id"]]
    ends = (start.x + start.width, start.y + start.height / 2, end.x, end.y + end.height / 2)
    links = (one for one in prefill.get("links", ()) if one["address"] == decode.get("address") and one["bytes_per_s"])
    measured = next(links, None)
    if measured is None:
        return _curve(*ends, 1.0, 0.13)
    speed_gb = measured["bytes_per_s"] / 1e9
    pair = f"{prefill['worker_id']} → {decode['worker_id']}"
    tip = f"{pair}: {speed_gb:.2f} GB/s, {seconds(measured['latency_s'])} latency"
    return _curve(*ends, 1.5 + min(speed_gb, 3.0), 0.35, _escaped(tip))


def _curve(x1: float, y1: float, x2: float, y2: float, width: float, opacity: float, tip: str = "") -> str:
    middle = (x1 + x2) / 2
    return (
        f'<path d="M{x1:.1f} {y1:.1f} C{middle:.1f} {y1:.1f} {middle:.1f} {y2:.1f} {x2:.1f} {y2:.1f}" fill="none" '
        f'stroke="currentColor" stroke-opacity="{opacity}" stroke-width="{width:.1f}">'
        f"{f'<title>{tip}</title>' if tip else ''}</path>"
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


def _said(worker: Worker, is_: Standing) -> str:
    used = "" if is_.word == "gone" else f", {100 * is_.used:.0f} % of KV in use"
    return _escaped(f"{worker['worker_id']} ({worker['role']}): {is_.word}, {_figures(worker)}{used}")


def _mark(word: str) -> str:
    return "✕ gone" if word == "gone" else word


def _text(
    x: float, y: float, text: str, size: float, colour: str = "currentColor",
    *, weight: int = 400, opacity: float = 1.0, anchor: str = "start",
) -> str:  # fmt: skip
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{colour}" '
        f'fill-opacity="{opacity}" text-anchor="{anchor}">{_escaped(text)}</text>'
    )


def _escaped(text: str) -> str:
    """For HTML within Markdown, where an empty line would end it."""
    return escape(" ".join(text.split()))


def _natural(name: str) -> list[tuple[int, str]]:
    """worker-2 before worker-10."""
    parts = "".join(one if one.isdigit() else f" {one} " for one in name).split()
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
