"""Settings of the planner service."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from pydantic import Field
from pydantic_settings import BaseSettings

from halfmoon.ledger.database import mask_password
from halfmoon.rpc.service import service_config
from halfmoon.rpc.tracing import OTLP_HELP


class PlannerSettings(BaseSettings):
    """Environment (`HALFMOON_PLANNER_…`) and command line (`--kebab-case`), read once."""

    model_config = service_config("planner")

    listen: str = Field("127.0.0.1:0", description="host:port of the planner; port 0 picks one")
    advertise: str | None = Field(None, description="host:port where others reach the planner, if not --listen")
    metrics_port: int | None = Field(None, ge=0, le=65535, description="serve Prometheus metrics on this port")
    otlp_endpoint: str | None = Field(None, description=OTLP_HELP)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
    state_dir: Path = Field(Path(".halfmoon"), description="where the default ledger is kept: the gateway's")
    ledger_url: str | None = Field(
        None,
        description="where plans are kept: sqlite:///file or postgresql://user:password@host/database; "
        "None: SQLite in state_dir",
    )
    operator_token: str | None = Field(
        None, description="what every call asks for; None: nothing on a loopback host, and no calls elsewhere"
    )
    fleet: str | None = Field(
        None, description="where `halfmoon up` changes its workers: unix:PATH; None: plans cannot be applied"
    )
    max_running: int = Field(1, ge=1, description="searches and simulations at once")
    max_waiting: int = Field(4, ge=0, description="that wait for their turn; more are refused")
    deadline_s: float = Field(900.0, gt=0, description="total time of one")
    processes: int = Field(os.cpu_count() or 1, ge=1, description="of one search")

    @property
    def ledger(self) -> str:
        """The ledger's SQLAlchemy URL."""
        return self.ledger_url or f"sqlite:///{self.state_dir.resolve() / 'ledger.db'}"

    @property
    def host(self) -> str:
        """That the planner listens on."""
        return self.listen.rpartition(":")[0].strip("[]")

    def as_logged(self) -> dict[str, Any]:
        """Every setting, without the ledger's password and the token."""
        token = None if self.operator_token is None else "***"
        return {**self.model_dump(mode="json"), "ledger_url": mask_password(self.ledger), "operator_token": token}
