"""Settings of the prefill service."""

from __future__ import annotations

from pydantic_settings import SettingsConfigDict

from halfmoon.worker.settings import RoleName, WorkerSettings


class PrefillSettings(WorkerSettings):
    """A worker's settings; inherited, against the rule, because the two services are one program in two roles."""

    model_config = SettingsConfigDict(env_prefix="HALFMOON_PREFILL_", cli_prog_name="python -m services.prefill")

    role: RoleName = "prefill"
