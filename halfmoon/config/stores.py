"""Configuration of a KV store."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, ByteSize, Field

from halfmoon.config.section import Section
from halfmoon.errors import Incompatible, InvalidRequest
from halfmoon.kv.entry_codec import EntryCodec

PolicyName = Literal["lru", "lfu", "length-aware", "cost-aware"]


def _known(codec: str) -> str:
    """Checks a codec. Raises ValueError for an unknown one. Its package may be missing here."""
    try:
        with suppress(Incompatible):
            EntryCodec.parse(codec)
    except InvalidRequest as error:
        raise ValueError(error.message) from error
    return codec


CodecName = Annotated[str, AfterValidator(_known)]


class StoreConfig(Section):
    """Tiers of a store: size, eviction policy and encoding of blocks."""

    dram_bytes: ByteSize = Field(ByteSize(512 << 20), gt=0, description="memory of each store, such as 512MiB")
    disk_dir: Path | None = Field(
        None,
        description="directory of the disk tier; default: `halfmoon up` creates one in the state directory, a store by "
        "itself has no disk tier",
    )
    disk_bytes: ByteSize = Field(
        ByteSize(8 << 30), gt=0, description="most bytes that a store's blocks on disk may take"
    )
    cold_url: str | None = Field(
        None,
        description="cold tier, which other hosts can read too: s3://, gs://, az://, file://, redis:// or rediss://",
    )
    cold_bytes: ByteSize = Field(ByteSize(64 << 30), gt=0, description="most bytes that a store keeps in the cold tier")
    cold_timeout_s: float = Field(5.0, gt=0, description="a cold operation that takes longer has failed")
    dram_policy: PolicyName = Field("lru", description="which block leaves memory first")
    disk_policy: PolicyName = Field("lru", description="which block leaves the disk first")
    cold_policy: PolicyName = Field("lru", description="which block leaves the cold tier first")
    dram_codec: CodecName = Field(
        "raw",
        description="encoding of blocks in memory: raw, int8, int4, int2, fp8, lz4, zstd, or two of them as int8+zstd",
    )
    disk_codec: CodecName = Field("raw", description="encoding of blocks on disk, as for memory")
    cold_codec: CodecName = Field("raw", description="encoding of blocks in the cold tier, as for memory")
    ttl_s: float | None = Field(None, gt=0, description="seconds after which stored blocks expire; default: never")
    replica_cool_s: float = Field(
        300.0, gt=0, description="seconds without use after which a copy of another store's block is dropped"
    )
    lease_s: float = Field(10.0, gt=0, description="seconds of silence after which a sender's incoming block is freed")
