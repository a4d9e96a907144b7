"""Settings of the kvstore service."""

from __future__ import annotations

import math

from pydantic import Field
from pydantic_settings import BaseSettings

from halfmoon.config.observability import ObservedConfig
from halfmoon.config.section import Texts
from halfmoon.config.stores import StoreConfig
from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.rpc.addresses.masked_url import masked_url
from halfmoon.rpc.service import service_config
from services.kvstore.options import PoolOptions


class KVStoreSettings(StoreConfig, ObservedConfig, BaseSettings):
    """Environment (`HALFMOON_KVSTORE_…`) and command line (`--kebab-case`), read once."""

    model_config = service_config("kvstore")

    listen: str = Field("127.0.0.1:0", description="host:port of the store; port 0 picks one")
    advertise: str | None = Field(None, description="host:port where others reach the store, if not --listen")
    peers: Texts = Field(
        (),
        description="host:port of another store that this one copies prompts from when a gateway asks; "
        "repeat it; none: on mutual TLS any that shows a store's certificate, else no other",
    )
    metrics_port: int | None = Field(None, ge=0, le=65535, description="serve Prometheus metrics on this port")

    def pool_options(self) -> PoolOptions:
        """Options of the pool. Raises InvalidRequest for an unknown codec."""
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
        """All settings for the log, without the secrets in the cold tier's URL."""
        return {**self.model_dump(mode="json"), "cold_url": self.cold_url and masked_url(self.cold_url)}
