"""Ledgers in both databases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ledger.postgresql import PostgresqlServer, find_programs, running_postgresql


@pytest.fixture(scope="session")
def postgresql() -> Iterator[PostgresqlServer]:
    programs = find_programs()
    if programs is None:
        pytest.skip("PostgreSQL is not installed (Debian: apt-get install postgresql)")
    with running_postgresql(programs) as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def ledger_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'deep' / 'ledger.db'}"
    server: Any = request.getfixturevalue("postgresql")
    url: str = server.new_database()
    return url
