"""The cluster as a drawing: gateway, workers by role, stores, links. Few workers are cards, many are cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from console.charts.palette import GREEN, GREY, ORANGE, RED, ROLES
from console.charts.store_cards import store_cards
from console.charts.svg import Place, bar, drawing, escaped, text, tip
from console.plain_text import shortened
from console.quantities import seconds

_MAX_CARDS = 6  # for one role; more are drawn as cells
MAX_LINKS = 100  # between cards; beyond it no links are drawn
_WIDTH = 1000
_CARD_W, _CARD_H, _CARD_GAP = 310, 72, 14
_CELL, _CELL_GAP, _CELLS_A_ROW = 24, 5, 11
_COLUMNS = {"prefill": 245, "decode": 685, "both": 245}
_GATEWAY_W, _GATEWAY_H = 170, 78
_CARD_CHARS, _GATEWAY_CHARS = 27, 22  # limits on characters
_TOP = 34

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


def all_workers(cluster: Mapping[str, Any]) -> list[Worker]:
    """The members, and workers that left a moment ago."""
    return [*cluster["workers"], *cluster.get("departed", ())]


def draw(cluster: Mapping[str, Any], stores: Sequence[Mapping[str, Any]]) -> str:
    """Draws the cluster as one SVG element."""
    workers = sorted(all_workers(cluster), key=lambda worker: _natural(worker["worker_id"]))
    by_role = {role: [worker for worker in workers if worker["role"] == role] for role in ("prefill", "both", "decode")}
    places: dict[str, Place] = {}
    shapes: list[str] = []
    bottoms = dict.fromkeys(_COLUMNS.values(), float(_TOP))
    for role, members in by_role.items():
        if members:
            x = _COLUMNS[role]
            title_y = bottoms[x] - 12
            drawn, bottoms[x] = _group(members, x, bottoms[x], cluster["silent_after_s"], places)
            title = f"{role} · {len(members)}" if role != "both" else f"prefill and decode · {len(members)}"
            shapes.append(text(x, title_y, title, 13, ROLES[role], weight=600))
            shapes += drawn
            bottoms[x] += 40
    height = max(*bottoms.values(), _TOP + _GATEWAY_H + 70) - 26
    gateway = Place(10, (_TOP + height) / 2 - _GATEWAY_H / 2, _GATEWAY_W, _GATEWAY_H)
    cards, bottom = store_cards(stores, height + 34)
    links = [
        *_spokes(gateway, by_role, places), *_links(workers, places), *_store_links(workers, cards.places, bottoms),
    ]  # fmt: skip
    body = "".join([*links, *_gateway(cluster, gateway), *shapes, *cards.shapes])
    return drawing(body, _WIDTH, bottom if stores else height, "The cluster")


def _group(
    members: Sequence[Worker], x: float, y: float, silent_after_s: float, places: dict[str, Place]
) -> tuple[list[str], float]:
    """Shapes of one role from (x, y) down, and where they end."""
    shapes = []
    if len(members) <= _MAX_CARDS:
        for number, worker in enumerate(members):
            place = Place(x, y + number * (_CARD_H + _CARD_GAP), _CARD_W, _CARD_H)
            places[worker["worker_id"]] = place
            shapes.append(_card(worker, standing(worker, silent_after_s), place))
        return shapes, y + len(members) * (_CARD_H + _CARD_GAP) - _CARD_GAP
    step = _CELL + _CELL_GAP
    for number, worker in enumerate(members):
        row, column = divmod(number, _CELLS_A_ROW)
        place = Place(x + column * step, y + row * step, _CELL, _CELL)
        shapes.append(_cell(worker, standing(worker, silent_after_s), place))
    return shapes, y + -(-len(members) // _CELLS_A_ROW) * step - _CELL_GAP


def _card(worker: Worker, is_: Standing, place: Place) -> str:
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
        + text(x + width - 26, y + 22, _mark(is_.word), 12, is_.colour, anchor="end")
        + text(x + 16, y + 43, _figures(worker), 12.5, opacity=0.75)
        + (used if "left_s_ago" not in worker else "")
        + "</g>"
    )


def _cell(worker: Worker, is_: Standing, place: Place) -> str:
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


def _gateway(cluster: Mapping[str, Any], place: Place) -> list[str]:
    x, y, width, height = place
    missing = cluster.get("missing")
    colour, word = (RED, "refusing") if missing else (GREEN, "serving")
    return [
        f'<rect x="{x}" y="{y:.1f}" width="{width}" height="{height}" rx="8" fill="currentColor" fill-opacity="0.05" '
        f'stroke="currentColor" stroke-opacity="0.35"/>',
        text(x + 16, y + 26, "gateway", 14, weight=600),
        f'<circle cx="{x + width - 16}" cy="{y + 21:.1f}" r="4.5" fill="{colour}"/>',
        text(x + width - 26, y + 26, word, 12, colour, anchor="end"),
        text(x + 16, y + 47, shortened(cluster.get("served_model") or "", _GATEWAY_CHARS), 12.5, opacity=0.75),
        text(x + 16, y + 65, shortened(cluster.get("gateway_id") or "", _GATEWAY_CHARS), 11, opacity=0.5),
    ]


def _spokes(gateway: Place, by_role: Mapping[str, Sequence[Worker]], places: Mapping[str, Place]) -> list[str]:
    """Curves from the gateway to the workers it sends prompts to: each card, or the field of cells."""
    x1, y1 = gateway.x + gateway.width, gateway.y + gateway.height / 2
    ends = [
        places[worker["worker_id"]]
        for role in ("prefill", "both")
        for worker in by_role[role]
        if worker["worker_id"] in places
    ]
    if not ends:
        ends = [Place(_COLUMNS["prefill"] - 6, y1 - 20, 1, 40)]
    return [_curve(x1, y1, end.x, end.y + end.height / 2, 1.2, 0.25) for end in ends]


def _links(workers: Sequence[Worker], places: Mapping[str, Place]) -> list[str]:
    """KV links between cards, from prefill to decode; links whose speed was measured are thick."""
    decodes = [worker for worker in workers if worker["role"] == "decode" and worker["worker_id"] in places]
    prefills = [worker for worker in workers if worker["role"] == "prefill" and worker["worker_id"] in places]
    return [_link(prefill, decode, places) for prefill in prefills for decode in decodes]


def _link(prefill: Worker, decode: Worker, places: Mapping[str, Place]) -> str:
    start, end = places[prefill["worker_id"]], places[decode["worker_id"]]
    ends = (start.x + start.width, start.y + start.height / 2, end.x, end.y + end.height / 2)
    links = (
        link for link in prefill.get("links", ()) if link["address"] == decode.get("address") and link["bytes_per_s"]
    )
    measured = next(links, None)
    if measured is None:
        return _curve(*ends, 1.0, 0.13)
    speed_gb = measured["bytes_per_s"] / 1e9
    pair = f"{prefill['worker_id']} → {decode['worker_id']}"
    tooltip = f"{pair}: {speed_gb:.2f} GB/s, {seconds(measured['latency_s'])} latency"
    return _curve(*ends, 1.5 + min(speed_gb, 3.0), 0.35, tooltip)


def _store_links(workers: Sequence[Worker], stores: Mapping[str, Place], bottoms: Mapping[int, float]) -> list[str]:
    """Curves from the workers of a column to the stores they use."""
    using = {(_COLUMNS[worker["role"]], worker["kv_store"]) for worker in workers if worker.get("kv_store") in stores}
    return [_drop(x + _CARD_W / 2, bottoms[x] - 40, stores[address]) for x, address in sorted(using)]


def _drop(x: float, y: float, end: Place) -> str:
    middle, x2 = (y + end.y) / 2, end.x + end.width / 2
    return (
        f'<path d="M{x:.1f} {y:.1f} C{x:.1f} {middle:.1f} {x2:.1f} {middle:.1f} {x2:.1f} {end.y:.1f}" fill="none" '
        f'stroke="currentColor" stroke-opacity="0.3" stroke-width="1.5"/>'
    )


def _curve(x1: float, y1: float, x2: float, y2: float, width: float, opacity: float, tooltip: str = "") -> str:
    middle = (x1 + x2) / 2
    return (
        f'<path d="M{x1:.1f} {y1:.1f} C{middle:.1f} {y1:.1f} {middle:.1f} {y2:.1f} {x2:.1f} {y2:.1f}" fill="none" '
        f'stroke="currentColor" stroke-opacity="{opacity}" stroke-width="{width:.1f}">'
        f"{tip(tooltip)}</path>"
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


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts worker-2 before worker-10."""
    parts = "".join(char if char.isdigit() else f" {char} " for char in name).split()
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
