"""Settings of the planner service."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Literal

from pydantic import Field, ValidationError
from pydantic_settings import BaseSettings, CliApp, SettingsConfigDict

from halfmoon.errors import InvalidRequest

_PREFIX = "HALFMOON_PLANNER_"


class PlannerSettings(BaseSettings):
    """Environment (`HALFMOON_PLANNER_…`) and command line (`--kebab-case`), read once."""

    model_config = SettingsConfigDict(
        env_prefix=_PREFIX,
        cli_prog_name="python -m services.planner",
        extra="forbid",
        frozen=True,
        cli_kebab_case=True,
        cli_avoid_json=True,
        cli_hide_none_type=True,
        env_ignore_empty=True,
    )

    listen: str = Field("127.0.0.1:0", description="host:port of the planner; port 0 picks one")
    advertise: str | None = Field(None, description="host:port where others reach the planner, if not --listen")
    metrics_port: int | None = Field(None, ge=0, le=65535, description="serve Prometheus metrics on this port")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"


def read_settings(arguments: Sequence[str]) -> PlannerSettings:
    """From environment and command line. Raises InvalidRequest for a wrong value or a variable that names no setting.

    A wrong command line ends the program with its usage, as argparse does.
    """
    known = {_PREFIX + name.upper() for name in PlannerSettings.model_fields}
    unknown = sorted(name for name in os.environ if name.startswith(_PREFIX) and name not in known)
    if unknown:
        raise InvalidRequest(f"unknown settings in the environment: {', '.join(unknown)}")
    try:
        return CliApp.run(PlannerSettings, cli_args=list(arguments))
    except ValidationError as err:
        raise InvalidRequest(str(err)) from err
