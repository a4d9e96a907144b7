"""The KV stores of `halfmoon up`: their processes, directories and addresses."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from halfmoon.errors import InvalidRequest
from halfmoon.kv.entry_codec import EntryCodec
from halfmoon.up.state.state_files import replace_file
from halfmoon.up.supervision.child import ServiceSpec
from halfmoon.up.supervision.log_files import OnTrouble

_INDEX = "index.sqlite"  # the disk tier's index
_ADDRESSES = "stores"  # file in the state directory, one address per line


@dataclass(frozen=True, slots=True)
class StoreOptions:
    """The number of stores and the tiers of each. Raises InvalidRequest for an unknown codec."""

    dram_bytes: str = "512MiB"
    disk_dir: Path | None = None  # None: under the state directory
    disk_bytes: str = "8GiB"
    cold_url: str | None = None
    dram_codec: str = "raw"
    disk_codec: str = "raw"
    cold_codec: str = "raw"
    num_stores: int | None = None  # assigned to the workers of each role in turn; None: one for each host

    def __post_init__(self) -> None:
        if self.num_stores is not None and self.num_stores < 1:
            raise InvalidRequest("there has to be at least one store")
        for codec in (self.dram_codec, self.disk_codec, self.cold_codec):
            EntryCodec.parse(codec)
        if self.disk_dir is not None and os.path.exists(self.disk_dir) and not os.path.isdir(self.disk_dir):
            raise InvalidRequest(f"--disk-dir {self.disk_dir} is not a directory")


def store_specs(
    options: StoreOptions, state_dir: Path, addresses: Sequence[str], environment: Mapping[str, str] | None = None
) -> list[ServiceSpec]:
    """Returns the specs of the stores. They share the cold tier; each has its own memory and directory."""
    names = store_names(len(addresses))
    directories = _directories(options, state_dir)
    return [
        _store_spec(
            options, *place, peers=[other for other in addresses if other != place[-1]], settings=environment or {}
        )
        for place in zip(names, directories, addresses, strict=True)
    ]


def store_names(num_stores: int) -> list[str]:
    """Returns the names of the stores' processes."""
    return ["kvstore"] if num_stores == 1 else [f"kvstore-{index}" for index in range(num_stores)]


def idle_directories(options: StoreOptions, state_dir: Path) -> list[Path]:
    """Returns directories left by an earlier, larger number of stores. Their blocks are neither used nor freed."""
    directory = options.disk_dir or state_dir / "kvstore"
    used = _directories(options, state_dir)
    return [
        path for path in (directory, *sorted(directory.glob("[0-9]*"))) if path not in used and (path / _INDEX).exists()
    ]


def remember_stores(state_dir: Path, addresses: Sequence[str], on_trouble: OnTrouble) -> None:
    """Writes the addresses that `known_stores` reads."""
    replace_file(state_dir / _ADDRESSES, "\n".join(addresses), on_trouble)


def known_stores(state_dir: Path) -> tuple[str, ...]:
    """Returns the addresses of the stores last started with this state directory, whether they still run or not."""
    try:
        return tuple((state_dir / _ADDRESSES).read_text().split())
    except OSError:
        return ()


def list_item(address: str) -> str:
    """Returns an address as an option takes it that may be repeated: one that begins with a bracket would be a list."""
    return json.dumps(address) if address.startswith("[") else address


def _directories(options: StoreOptions, state_dir: Path) -> list[Path]:
    directory = options.disk_dir or state_dir / "kvstore"
    num_stores = options.num_stores or 1
    return [directory] if num_stores == 1 else [directory / str(n) for n in range(num_stores)]


def _store_spec(
    options: StoreOptions, name: str, directory: Path, address: str, peers: Sequence[str], settings: Mapping[str, str]
) -> ServiceSpec:
    arguments = {
        "--listen": address,
        "--dram-bytes": options.dram_bytes,
        "--disk-dir": str(directory),
        "--disk-bytes": options.disk_bytes,
        "--dram-codec": options.dram_codec,
        "--disk-codec": options.disk_codec,
        "--cold-codec": options.cold_codec,
    }
    # A URL may hold a password, and a process's arguments are visible to every user of the host.
    environment = (
        {**settings} if options.cold_url is None else {**settings, "HALFMOON_KVSTORE_COLD_URL": options.cold_url}
    )
    flags = tuple(
        part for pair in (*arguments.items(), *(("--peers", list_item(peer)) for peer in peers)) for part in pair
    )
    return ServiceSpec(name, ("-m", "services.kvstore", *flags), environment, restarts=True, cluster_role="store")
