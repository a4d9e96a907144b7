"""Settings of the decode service."""

from __future__ import annotations

from halfmoon.policy.view.worker_view import Role
from halfmoon.rpc.service import service_config
from halfmoon.worker.settings import WorkerSettings


class DecodeSettings(WorkerSettings):
    """A worker's settings. Inherited, against the house rule, because the two services are one program in two roles."""

    model_config = service_config("decode")

    role: Role = "decode"
