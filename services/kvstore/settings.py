"""Settings of the kvstore service."""

from __future__ import annotations

from typing import Literal

from pydantic import ByteSize, Field
from pydantic_settings import BaseSettings

from halfmoon.rpc.service import service_config


class KVStoreSettings(BaseSettings):
    """Environment (`HALFMOON_KVSTORE_…`) and command line (`--kebab-case`), read once."""

    model_config = service_config("kvstore")

    listen: str = Field("127.0.0.1:0", description="host:port of the store; port 0 picks one")
    advertise: str | None = Field(None, description="host:port where others reach the store, if not --listen")
    dram_bytes: ByteSize = Field(ByteSize(512 << 20), gt=0, description="memory for blocks, such as 512MiB")
    lease_s: float = Field(10.0, gt=0, description="a block on its way in is freed when its sender is silent this long")
    metrics_port: int | None = Field(None, ge=0, le=65535, description="serve Prometheus metrics on this port")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"
