"""Pages of lists, as OpenAI's API has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aiohttp import web

from halfmoon.errors import InvalidRequest
from services.gateway.http.received_request import query_number

_MOST = 100
_USUAL = 20


def page_of(
    rows: Sequence[Mapping[str, Any]],
    request: web.Request,
    usual_order: str,
    most: int = _MOST,
    usual: int = _USUAL,
) -> dict[str, Any]:
    """One page of rows that are given oldest first, by the query's `limit`, `order` and `after`.

    Raises InvalidRequest.
    """
    order = request.query.get("order", usual_order)
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    limit = query_number(request, "limit", usual, most)
    ordered = list(rows if order == "asc" else reversed(rows))
    after = request.query.get("after")
    if after:
        place = next((number for number, row in enumerate(ordered) if row["id"] == after), None)
        if place is None:
            raise InvalidRequest("after: there is no such item in this list", param="after")
        ordered = ordered[place + 1 :]
    page = ordered[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > limit,
    }
