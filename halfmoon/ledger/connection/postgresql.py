"""PostgreSQL as the ledger's database: opening its connections."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import URL, event
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

_POOL_SIZE = 4
_ARGS: Mapping[str, Any] = {  # a vanished host is detected within half a minute
    "connect_timeout": 5,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 20_000,
    "application_name": "halfmoon",
    "client_encoding": "utf8",  # the driver reads no text of a database in SQL_ASCII otherwise
}


def postgresql_engine(url: URL, pool_timeout_s: float) -> AsyncEngine:
    """Makes an engine without connecting. Raises ModuleNotFoundError without the driver."""
    args = {name: value for name, value in _ARGS.items() if name not in url.query}
    engine = create_async_engine(
        url, pool_size=_POOL_SIZE, max_overflow=0, pool_timeout=pool_timeout_s, pool_pre_ping=True, connect_args=args
    )
    event.listen(engine.sync_engine, "connect", _take_any_text)
    return engine


def _take_any_text(connection: Any, record: Any) -> None:
    """Has a connection take texts with the character NUL, which a client may send and no text of PostgreSQL has."""
    from psycopg.types.string import StrDumperUnknown  # installed where there is a connection

    class TextDumper(StrDumperUnknown):
        def dump(self, obj: str) -> Any:
            return super().dump(obj.replace("\0", "\N{REPLACEMENT CHARACTER}"))

    connection.adapters.register_dumper(str, TextDumper)
