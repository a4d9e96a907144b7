"""Settings of the planner service."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings

from halfmoon.rpc.service import service_config


class PlannerSettings(BaseSettings):
    """Environment (`HALFMOON_PLANNER_…`) and command line (`--kebab-case`), read once."""

    model_config = service_config("planner")

    listen: str = Field("127.0.0.1:0", description="host:port of the planner; port 0 picks one")
    advertise: str | None = Field(None, description="host:port where others reach the planner, if not --listen")
    metrics_port: int | None = Field(None, ge=0, le=65535, description="serve Prometheus metrics on this port")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
