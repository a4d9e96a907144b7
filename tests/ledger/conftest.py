"""Ledgers in both databases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ledger.postgresql import PostgresqlServer, installed_postgresql


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    """One for all of this room: nobody stops it."""
    yield from installed_postgresql()


@pytest.fixture(params=["sqlite", "postgresql"])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'deep' / 'ledger.db'}"
    server: Any = request.getfixturevalue("postgresql")
    url: str = server.new_database()
    return url
