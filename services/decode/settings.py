"""Settings of the decode service."""

from __future__ import annotations

from pydantic_settings import SettingsConfigDict

from halfmoon.worker.settings import RoleName, WorkerSettings


class DecodeSettings(WorkerSettings):
    """A worker's settings; inherited, against the rule, because the two services are one program in two roles."""

    model_config = SettingsConfigDict(env_prefix="HALFMOON_DECODE_", cli_prog_name="python -m services.decode")

    role: RoleName = "decode"
