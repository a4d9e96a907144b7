"""The store of `halfmoon up`: its process, and how workers find it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from halfmoon.errors import InvalidRequest
from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.supervisor import ServiceSpec


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """Its tiers, as its own settings have them. Raises InvalidRequest for a codec that there is not."""

    dram_bytes: str = "512MiB"
    disk_dir: Path | None = None  # None: under the state directory
    disk_bytes: str = "8GiB"
    cold_url: str | None = None
    dram_codec: str = "raw"
    disk_codec: str = "raw"
    cold_codec: str = "raw"

    def __post_init__(self) -> None:
        for codec in (self.dram_codec, self.disk_codec, self.cold_codec):
            EntryCodec.parse(codec)
        if self.disk_dir is not None and self.disk_dir.exists() and not self.disk_dir.is_dir():
            raise InvalidRequest(f"--disk-dir {self.disk_dir} is not a directory")


def store_spec(options: StoreOptions, state_dir: Path, address: str) -> ServiceSpec:
    """The store as a child, at the same address whenever it is started again."""
    arguments = {
        "--listen": address,
        "--dram-bytes": options.dram_bytes,
        "--disk-dir": str(options.disk_dir or state_dir / "kvstore"),
        "--disk-bytes": options.disk_bytes,
        "--dram-codec": options.dram_codec,
        "--disk-codec": options.disk_codec,
        "--cold-codec": options.cold_codec,
    }
    # A URL may hold a password, which a process's arguments would show to everybody on the host.
    environment = {} if options.cold_url is None else {"HALFMOON_KVSTORE_COLD_URL": options.cold_url}
    flags = tuple(part for pair in arguments.items() for part in pair)
    return ServiceSpec("kvstore", ("-m", "services.kvstore", *flags), environment, restarts=True)


def free_port() -> int:
    """A port that is free now; who takes it may still be too late."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
