"""A frame around the workers of one host, with its name and the measured speed of its links to other hosts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from console.charts.svg import Place, escaped, text, tip
from console.charts.worker_shapes import CELL, CELL_GAP, Worker, cell, standing
from console.plain_text import shortened
from console.quantities import seconds

HEAD_H, FOOT_H = 48, 22  # from a frame's top to its workers' cards, and from one frame's end to the next one's top
MAX_FRAMES = 6  # hosts with a frame as wide as the drawing; more have small ones
_X, _WIDTH = 233, 764
_SMALL_W, _SMALL_GAP, _SMALL_A_ROW, _CELLS_A_ROW = 246, 13, 3, 8
_NAME_CHARS, _OTHER_CHARS = 26, 18  # limits on characters
_MAX_NAMED = 2  # links in the frame; the tooltip has all
_ABOVE, _BELOW = 22, 22

Link = Mapping[str, Any]


def host_frame(host: str, top: float, bottom: float, links: Sequence[Link]) -> list[str]:
    """Shapes of the frame. `links`: those between all hosts, as the gateway's control API names them."""
    outgoing = [link for link in links if link["source"] == host and link["target"] != host]
    speeds = " · ".join(f"→ {shortened(link['target'], _OTHER_CHARS)} {speed(link)}" for link in outgoing[:_MAX_NAMED])
    further = f" · {len(outgoing) - _MAX_NAMED} more" if len(outgoing) > _MAX_NAMED else ""
    y = top - _ABOVE
    place = Place(_X, y, _WIDTH, bottom - _BELOW - y)
    return [
        *_frame(host, place, links),
        text(_X + _WIDTH - 14, y + 21, speeds + further, 12.5, opacity=0.75, anchor="end"),
    ]


def small_frames(
    by_host: Mapping[str, Sequence[Worker]], top: float, cluster: Mapping[str, Any]
) -> tuple[list[str], float]:
    """Shapes of many hosts from `top` down, several in a row, their workers as cells; and where they end."""
    step = CELL + CELL_GAP
    names, shapes, y = list(by_host), [], top - _ABOVE
    for first in range(0, len(names), _SMALL_A_ROW):
        row = names[first : first + _SMALL_A_ROW]
        height = 40 + step * max(-(-len(by_host[host]) // _CELLS_A_ROW) for host in row)
        for column, host in enumerate(row):
            place = Place(_X + column * (_SMALL_W + _SMALL_GAP), y, _SMALL_W, height)
            shapes += _frame(host, place, cluster.get("host_links", ()))
            for number, worker in enumerate(by_host[host]):
                down, right = divmod(number, _CELLS_A_ROW)
                at = Place(place.x + 10 + right * step, y + 34 + down * step, CELL, CELL)
                shapes.append(cell(worker, standing(worker, cluster["silent_after_s"]), at))
        y += height + _SMALL_GAP
    return shapes, y + _BELOW


def _frame(host: str, place: Place, links: Sequence[Link]) -> list[str]:
    x, y, width, height = place
    measured = "; ".join(described(link) for link in links if host in (link["source"], link["target"]))
    return [
        f'<g data-host="{escaped(host)}">{tip(measured or f"{host}: no link was measured yet")}'
        f'<rect x="{x}" y="{y:.1f}" width="{width}" height="{height:.1f}" rx="12" fill="currentColor" '
        f'fill-opacity="0.015" stroke="currentColor" stroke-opacity="0.3"/></g>',
        text(x + 12, y + 21, shortened(host or "unknown host", _NAME_CHARS), 14, weight=600),
    ]


def speed(link: Link) -> str:
    """The measured bandwidth of a link."""
    return f"{link['bytes_per_s'] / 1e9:.2f} GB/s"


def described(link: Link) -> str:
    """A link between hosts in a line."""
    latency, num = seconds(link["latency_s"]), link["num_links"]
    return f"{link['source']} → {link['target']}: {speed(link)}, {latency} latency, median of {num}"


def link_row(link: Link) -> dict[str, Any]:
    """A link between hosts as one row of a table."""
    return {
        "from": link["source"],
        "to": link["target"],
        "GB/s": link["bytes_per_s"] / 1e9,
        "latency (ms)": link["latency_s"] * 1000,
        "links": link["num_links"],
    }
