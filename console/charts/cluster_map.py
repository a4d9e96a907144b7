"""The cluster as a drawing: gateway, workers by host and role, stores, links. Few workers are cards, many are cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from typing import Any

from console.charts.host_frames import FOOT_H, HEAD_H, MAX_FRAMES, host_frame, small_frames
from console.charts.palette import GREEN, RED
from console.charts.store_cards import store_cards
from console.charts.svg import Place, drawing, text, tip
from console.charts.worker_shapes import CARD_GAP, CARD_H, CARD_W, CELL, CELL_GAP, Worker, card, cell, standing
from console.plain_text import shortened
from console.quantities import seconds

_MAX_CARDS = 6  # for one role; more are drawn as cells
MAX_LINKS = 100  # between cards; beyond it no links are drawn
_WIDTH = 1000
_LEAST_PX = 720  # narrower pages scroll it sideways, since its text would be too small to read
_CELLS_A_ROW = 11
_COLUMNS = {"prefill": 245, "decode": 685, "both": 245}
_GATEWAY_W, _GATEWAY_H = 170, 78
_GATEWAY_CHARS = 22  # limit on characters
_TOP = 34


def all_workers(cluster: Mapping[str, Any]) -> list[Worker]:
    """The members, and workers that left a moment ago."""
    return [*cluster["workers"], *cluster.get("departed", ())]


def draw(cluster: Mapping[str, Any], stores: Sequence[Mapping[str, Any]]) -> str:
    """Draws the cluster as one SVG element; workers of several hosts are in a frame for each host."""
    workers = sorted(all_workers(cluster), key=lambda worker: _natural(worker["worker_id"]))
    hosts = sorted({worker.get("host") or "" for worker in workers}, key=_natural)
    num_of_role = Counter(worker["role"] for worker in workers)
    fields = {role for role, number in num_of_role.items() if number > _MAX_CARDS}
    places: dict[str, Place] = {}
    shapes: list[str] = []
    bottoms = dict.fromkeys(_COLUMNS.values(), float(_TOP))
    by_host = {host: [worker for worker in workers if (worker.get("host") or "") == host] for host in hosts}
    if len(hosts) > MAX_FRAMES:
        shapes, bottom = small_frames(by_host, _TOP, cluster)
        bottoms, by_host = dict.fromkeys(bottoms, bottom), {}
    for host, members in by_host.items():
        if len(hosts) == 1:
            drawn, bottoms = _roles(members, _TOP, cluster["silent_after_s"], fields, places)
        else:
            top = max(bottoms.values())
            drawn, bottoms = _roles(members, top + HEAD_H, cluster["silent_after_s"], fields, places)
            shapes += host_frame(host, top, max(bottoms.values()), cluster.get("host_links", ()))
            bottoms = dict.fromkeys(bottoms, max(bottoms.values()) + FOOT_H)
        shapes += drawn
    height = max(*bottoms.values(), _TOP + _GATEWAY_H + 70) - 26
    gateway = Place(10, (_TOP + height) / 2 - _GATEWAY_H / 2, _GATEWAY_W, _GATEWAY_H)
    cards, bottom = store_cards(stores, height + 34)
    links = [
        *_spokes(gateway, workers, places), *_links(workers, places), *_store_links(workers, cards.places, bottoms),
    ]  # fmt: skip
    body = "".join([*links, *_gateway(cluster, gateway), *shapes, *cards.shapes])
    return drawing(body, _WIDTH, bottom if stores else height, "The cluster", _LEAST_PX)


def _roles(
    members: Sequence[Worker], top: float, silent_after_s: float, fields: Set[str], places: dict[str, Place]
) -> tuple[list[str], dict[int, float]]:
    """Shapes of the workers of one host from `top` down, a column for each role, and where the columns end.

    `fields`: roles that are drawn as cells.
    """
    shapes: list[str] = []
    bottoms = dict.fromkeys(_COLUMNS.values(), top)
    for role in ("prefill", "both", "decode"):
        group = [worker for worker in members if worker["role"] == role]
        if group:
            x = _COLUMNS[role]
            title_y = bottoms[x] - 12
            drawn, bottoms[x] = _group(group, x, bottoms[x], silent_after_s, role in fields, places)
            title = f"{role} · {len(group)}" if role != "both" else f"prefill and decode · {len(group)}"
            shapes.append(text(x, title_y, title, 13, weight=600))
            shapes += drawn
            bottoms[x] += 40
    return shapes, bottoms


def _group(
    members: Sequence[Worker], x: float, y: float, silent_after_s: float, is_field: bool, places: dict[str, Place]
) -> tuple[list[str], float]:
    """Shapes of one role from (x, y) down, and where they end."""
    shapes = []
    if not is_field:
        for number, worker in enumerate(members):
            place = Place(x, y + number * (CARD_H + CARD_GAP), CARD_W, CARD_H)
            places[worker["worker_id"]] = place
            shapes.append(card(worker, standing(worker, silent_after_s), place))
        return shapes, y + len(members) * (CARD_H + CARD_GAP) - CARD_GAP
    step = CELL + CELL_GAP
    for number, worker in enumerate(members):
        row, column = divmod(number, _CELLS_A_ROW)
        place = Place(x + column * step, y + row * step, CELL, CELL)
        shapes.append(cell(worker, standing(worker, silent_after_s), place))
    return shapes, y + -(-len(members) // _CELLS_A_ROW) * step - CELL_GAP


def _gateway(cluster: Mapping[str, Any], place: Place) -> list[str]:
    x, y, width, height = place
    missing = cluster.get("missing")
    colour, word = (RED, "refusing") if missing else (GREEN, "serving")
    return [
        f'<rect x="{x}" y="{y:.1f}" width="{width}" height="{height}" rx="8" fill="currentColor" fill-opacity="0.05" '
        f'stroke="currentColor" stroke-opacity="0.35"/>',
        text(x + 16, y + 26, "gateway", 14, weight=600),
        f'<circle cx="{x + width - 16}" cy="{y + 21:.1f}" r="4.5" fill="{colour}"/>',
        text(x + width - 26, y + 26, word, 12, anchor="end"),
        text(x + 16, y + 47, shortened(cluster.get("served_model") or "", _GATEWAY_CHARS), 12.5, opacity=0.75),
        text(x + 16, y + 65, shortened(cluster.get("gateway_id") or "", _GATEWAY_CHARS), 11, opacity=0.5),
    ]


def _spokes(gateway: Place, workers: Sequence[Worker], places: Mapping[str, Place]) -> list[str]:
    """Curves from the gateway to the workers it sends prompts to: each card, or the field of cells."""
    x1, y1 = gateway.x + gateway.width, gateway.y + gateway.height / 2
    ends = [
        places[worker["worker_id"]]
        for worker in workers
        if worker["role"] != "decode" and worker["worker_id"] in places
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
    return [_drop(x + CARD_W / 2, bottoms[x] - 40, stores[address]) for x, address in sorted(using)]


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


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts worker-2 before worker-10."""
    parts = "".join(char if char.isdigit() else f" {char} " for char in name).split()
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
