"""Settings of the planner service."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field
from pydantic_settings import BaseSettings

from halfmoon.config.observability import ObservedConfig
from halfmoon.config.planner import PlannerConfig
from halfmoon.config.section import Texts
from halfmoon.config.security import OperatorConfig
from halfmoon.config.state import StateConfig
from halfmoon.rpc.addresses.masked_url import HIDDEN, masked_url
from halfmoon.rpc.service import service_config


class PlannerSettings(PlannerConfig, OperatorConfig, StateConfig, ObservedConfig, BaseSettings):
    """Environment (`HALFMOON_PLANNER_…`) and command line (`--kebab-case`), read once."""

    model_config = service_config("planner")

    listen: str = Field("127.0.0.1:0", description="host:port of the planner; port 0 picks one")
    advertise: str | None = Field(None, description="host:port where others reach the planner, if not --listen")
    metrics_port: int | None = Field(None, ge=0, le=65535, description="serve Prometheus metrics on this port")
    gateway: Texts = Field(
        (),
        description="URL of a gateway whose workers the autopilot watches; repeat it for more; none: no autopilot",
    )
    gateway_ca: Path | None = Field(None, description="authorities to trust for a gateway at https://")
    fleet: str | None = Field(
        None,
        description="address at which `halfmoon up` changes its workers, unix:PATH; default: plans cannot be applied",
    )

    @property
    def host(self) -> str:
        """Returns the host that the planner listens on."""
        return self.listen.rpartition(":")[0].strip("[]")

    def as_logged(self) -> dict[str, Any]:
        """Returns every setting, without the ledger's password and the token."""
        token = None if self.operator_token is None else HIDDEN
        return {**self.model_dump(mode="json"), "ledger_url": masked_url(self.ledger), "operator_token": token}
