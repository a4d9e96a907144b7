"""Pages of a tenant's rows, by when they were made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from sqlalchemy import ColumnElement, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from halfmoon.errors import InvalidRequest
from halfmoon.ledger.models import BatchRow, FileRow

ListedRow: TypeAlias = type[FileRow] | type[BatchRow]


class Page(NamedTuple):
    """Which rows of a list to read."""

    most: int
    is_newest_first: bool = True
    after: str | None = None  # the id of the row before the first


async def read_page(
    session: AsyncSession, table: ListedRow, mine: Sequence[ColumnElement[bool]], page: Page
) -> Sequence[Any]:
    """Rows of `table` for which `mine` holds, one more than the page has if there are more.

    Raises InvalidRequest if there is no row `after`.
    """
    place = tuple_(table.created_at, table.id)
    rows = select(table).where(*mine)
    if page.after is not None:
        before = select(table.created_at, table.id).where(*mine, table.id == page.after)
        found = (await session.execute(before)).first()
        if found is None:
            raise InvalidRequest("after: there is no such item in this list", param="after")
        rows = rows.where(place < tuple(found) if page.is_newest_first else place > tuple(found))
    order = (table.created_at.desc(), table.id.desc()) if page.is_newest_first else (table.created_at, table.id)
    return (await session.scalars(rows.order_by(*order).limit(page.most + 1))).all()
