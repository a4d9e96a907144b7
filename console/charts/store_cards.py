"""The KV stores as cards below the workers: what they hold, and how much of their budget is used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from console.charts.palette import GREEN, PURPLE, RED
from console.charts.svg import Place, bar, escaped, text, tip
from console.plain_text import shortened
from console.quantities import count, size

_FIRST_X, _WIDTH, _HEIGHT, _GAP = 245, 240, 72, 15
_IN_A_ROW = 3
_CHARS = 26  # limit on characters in a card

Store = Mapping[str, Any]


class StoreCards(NamedTuple):
    """Shapes of the cards, and the place of each store by address."""

    shapes: list[str]
    places: dict[str, Place]


def store_cards(stores: Sequence[Store], top: float) -> tuple[StoreCards, float]:
    """Cards from `top` down, and where they end. Empty without stores."""
    cards, bottom = StoreCards([], {}), top
    if not stores:
        return cards, bottom
    num_in_row = min(len(stores), _IN_A_ROW)
    left = _FIRST_X + (_IN_A_ROW - num_in_row) * (_WIDTH + _GAP) / 2
    for number, store in enumerate(stores):
        row, column = divmod(number, _IN_A_ROW)
        place = Place(left + column * (_WIDTH + _GAP), top + row * (_HEIGHT + _GAP), _WIDTH, _HEIGHT)
        cards.shapes.append(_card(store, place))
        cards.places[store["address"]] = place
        bottom = place.y + _HEIGHT + 6
    return cards, bottom


def _card(store: Store, place: Place) -> str:
    x, y, width, height = place
    tiers = store.get("tiers", ())
    is_there = store["state"] == "there"
    colour, word = (GREEN, "serving") if is_there else (RED, "✕ away")
    used, budget = (sum(tier[name] for tier in tiers) for name in ("used_bytes", "budget_bytes"))
    blocks = sum(tier["num_blocks"] for tier in tiers)
    line = f"{count(blocks)} blocks · {size(used)} of {size(budget)}" if is_there else "does not answer"
    of_tiers = "; ".join(
        f"{tier['tier']}: {size(tier['used_bytes'])} of {size(tier['budget_bytes'])}" for tier in tiers
    )
    frame = f'x="{x}" y="{y:.1f}" height="{height}"'
    detail = of_tiers or store.get("reason") or line
    edge = PURPLE if is_there else RED
    full = bar(Place(x + 16, y + height - 16, width - 28, 6), used / budget if budget else 0.0, PURPLE)
    return (
        f'<g data-store="{escaped(store["address"])}" data-standing="{store["state"]}">'
        f"{tip('KV store ' + store['address'] + ': ' + detail)}"
        f'<rect {frame} width="{width}" rx="8" fill="{edge}" fill-opacity="{0.03 if is_there else 0.1}" '
        f'stroke="{edge}" stroke-opacity="0.55"/><rect {frame} width="5" rx="2.5" fill="{edge}"/>'
        + text(x + 16, y + 22, shortened(f"store {store['address']}", _CHARS), 13, weight=600)
        + f'<circle cx="{x + width - 16}" cy="{y + 17:.1f}" r="4.5" fill="{colour}"/>'
        + text(x + width - 26, y + 22, word, 12, anchor="end")
        + text(x + 16, y + 43, line, 12.5, opacity=0.75)
        + (full if is_there else "")
        + "</g>"
    )
