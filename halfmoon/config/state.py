"""Settings of persistent state."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from halfmoon.config.section import Section


class StateConfig(Section):
    """The state directory and the ledger."""

    state_dir: Path = Field(Path(".halfmoon"), description="directory for logs, the ledger and blocks on disk")
    ledger_url: str | None = Field(
        None,
        description="the ledger's database: sqlite:///file or postgresql://user:password@host/database, which several "
        "gateways may share; none: SQLite in the state directory",
    )

    @property
    def ledger(self) -> str:
        """The ledger's SQLAlchemy URL."""
        return self.ledger_url or f"sqlite:///{self.state_dir.resolve() / 'ledger.db'}"
