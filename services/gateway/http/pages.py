"""Pages of lists, as OpenAI's API has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from halfmoon.errors import InvalidRequest
from halfmoon.ledger.kept.pages import Page
from services.gateway.http.received_request import query_number

_MOST = 100
_USUAL = 20


def requested_page(request: web.Request, most: int = _MOST, usual: int = _USUAL) -> Page:
    """The page of the query's `limit`, `order` and `after`. Raises InvalidRequest."""
    order = request.query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    limit = query_number(request, "limit", usual, most)
    return Page(limit, order == "desc", request.query.get("after") or None)


def page_of(rows: Sequence[Mapping[str, Any]], page: Page) -> Sequence[Mapping[str, Any]]:
    """What `shown_page` is to show of all rows, which are given oldest first. Raises InvalidRequest."""
    ordered = list(reversed(rows) if page.is_newest_first else rows)
    if page.after is None:
        return ordered
    place = next((number for number, row in enumerate(ordered) if row["id"] == page.after), None)
    if place is None:
        raise InvalidRequest("after: there is no such item in this list", param="after")
    return ordered[place + 1 :]


def shown_page(rows: Sequence[Mapping[str, Any]], page: Page) -> dict[str, Any]:
    """The body of a page. `rows` are in its order and begin with it; if there are more, more rows follow."""
    shown = rows[: page.most]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(rows) > page.most,
    }
