"""Settings of traces and logs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from halfmoon.config.section import Section
from halfmoon.rpc.telemetry.tracing import OTLP_HELP

LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


class ObservedConfig(Section):
    """Traces and logs of every service."""

    otlp_endpoint: str | None = Field(None, description=OTLP_HELP)
    log_level: LogLevel = Field("INFO", description="lowest severity that is logged")
