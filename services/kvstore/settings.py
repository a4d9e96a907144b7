"""Settings of the kvstore service."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from pydantic import ByteSize, Field
from pydantic_settings import BaseSettings

from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.rpc.service import service_config
from halfmoon.rpc.tracing import OTLP_HELP
from services.kvstore.catalog.eviction import PolicyName
from services.kvstore.options import PoolOptions


class KVStoreSettings(BaseSettings):
    """Environment (`HALFMOON_KVSTORE_…`) and command line (`--kebab-case`), read once."""

    model_config = service_config("kvstore")

    listen: str = Field("127.0.0.1:0", description="host:port of the store; port 0 picks one")
    advertise: str | None = Field(None, description="host:port where others reach the store, if not --listen")
    dram_bytes: ByteSize = Field(ByteSize(512 << 20), gt=0, description="memory for blocks, such as 512MiB")
    disk_dir: Path | None = Field(None, description="directory of the disk tier; none: no disk tier")
    disk_bytes: ByteSize = Field(ByteSize(8 << 30), gt=0, description="most that the files there may take")
    cold_url: str | None = Field(None, description="cold tier: s3://, gs://, az://, file://, redis:// or rediss://")
    cold_bytes: ByteSize = Field(ByteSize(64 << 30), gt=0, description="most that this store puts and keeps there")
    cold_timeout_s: float = Field(5.0, gt=0, description="a cold operation that takes longer has failed")
    dram_policy: PolicyName = Field("lru", description="which block leaves memory first")
    disk_policy: PolicyName = Field("lru", description="which block leaves the disk first")
    cold_policy: PolicyName = Field("lru", description="which block leaves the cold tier first")
    dram_codec: str = Field("raw", description="raw, int8, int4, int2, fp8, lz4, zstd, or two of them as in int8+zstd")
    disk_codec: str = Field("raw", description="as --dram-codec, for the disk")
    cold_codec: str = Field("raw", description="as --dram-codec, for the cold tier")
    ttl_s: float | None = Field(None, gt=0, description="blocks are forgotten this long after they were stored")
    replica_cool_s: float = Field(
        300.0, gt=0, description="a copy of another store's block is dropped when nobody used it for so long"
    )
    lease_s: float = Field(10.0, gt=0, description="a block on its way in is freed when its sender is silent this long")
    metrics_port: int | None = Field(None, ge=0, le=65535, description="serve Prometheus metrics on this port")
    otlp_endpoint: str | None = Field(None, description=OTLP_HELP)
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = "INFO"

    def pool_options(self) -> PoolOptions:
        """Raises InvalidRequest for a codec that there is not."""
        return PoolOptions(
            dram_policy=self.dram_policy,
            disk_policy=self.disk_policy,
            cold_policy=self.cold_policy,
            dram_codec=EntryCodec.parse(self.dram_codec),
            disk_codec=EntryCodec.parse(self.disk_codec),
            cold_codec=EntryCodec.parse(self.cold_codec),
            ttl_s=self.ttl_s or math.inf,
            replica_cool_s=self.replica_cool_s,
        )

    def as_logged(self) -> dict[str, object]:
        """All of it, but a password in the cold tier's URL."""
        shown = self.model_dump(mode="json")
        if self.cold_url and "@" in self.cold_url:
            scheme, _, rest = self.cold_url.partition("://")
            shown["cold_url"] = f"{scheme}://***@{rest.rpartition('@')[2]}"
        return shown
