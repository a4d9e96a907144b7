"""Settings of a KV store."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, ByteSize, Field

from halfmoon.config.section import Section
from halfmoon.errors import Incompatible, InvalidRequest
from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.policy.eviction import PolicyName


def _known(codec: str) -> str:
    """Raises ValueError for an unknown codec. A known codec may lack its package on this host."""
    try:
        with suppress(Incompatible):
            EntryCodec.parse(codec)
    except InvalidRequest as error:
        raise ValueError(error.message) from error
    return codec


CodecName = Annotated[str, AfterValidator(_known)]


class StoreConfig(Section):
    """The tiers of a store: size, eviction policy and codec of each."""

    dram_bytes: ByteSize = Field(ByteSize(512 << 20), gt=0, description="memory of each store, such as 512MiB")
    disk_dir: Path | None = Field(
        None,
        description="directory of the disk tier; none: `halfmoon up` uses one in the state directory, a store alone "
        "has no disk tier",
    )
    disk_bytes: ByteSize = Field(ByteSize(8 << 30), gt=0, description="largest size of a store's blocks on disk")
    disk_reserve_bytes: ByteSize | None = Field(
        None,
        description="room that is left free on the disk's file system: a store takes less than `disk_bytes` there, and "
        "gives back what others need; none: 1 GiB, or a tenth of a file system that is smaller than 10 GiB",
    )
    cold_url: str | None = Field(
        None,
        description="URL of the cold tier, which other hosts can also read: s3://, gs://, az://, file://, redis:// or rediss://",
    )
    cold_bytes: ByteSize = Field(
        ByteSize(64 << 30), gt=0, description="largest size of the blocks that a store keeps in the cold tier"
    )
    cold_timeout_s: float = Field(5.0, gt=0, description="timeout of one operation on the cold tier")
    dram_policy: PolicyName = Field("cost-aware", description="which block is evicted from memory first")
    disk_policy: PolicyName = Field("cost-aware", description="which block is evicted from disk first")
    cold_policy: PolicyName = Field("cost-aware", description="which block is evicted from the cold tier first")
    dram_codec: CodecName = Field(
        "raw",
        description="encoding of blocks in memory: raw, int8, int4, int2, fp8, lz4, zstd, or two, such as int8+zstd",
    )
    disk_codec: CodecName = Field("raw", description="encoding of blocks on disk, as for memory")
    cold_codec: CodecName = Field("raw", description="encoding of blocks in the cold tier, as for memory")
    ttl_s: float | None = Field(None, gt=0, description="how long after storing it a block is dropped; none: never")
    replica_cool_s: float = Field(
        300.0, gt=0, description="a copy of another store's block is dropped after this long without use"
    )
    lease_s: float = Field(
        10.0, gt=0, description="an incoming block is freed after its sender has been silent this long"
    )
