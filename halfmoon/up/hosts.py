"""Where services start: on this host, or on those of a cluster engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from halfmoon.errors import Incompatible
from halfmoon.up.supervision.child import Room, ServiceSpec
from halfmoon.up.supervision.log_files import LogFiles, OnTrouble
from halfmoon.up.supervision.service_process import ServiceProcess
from halfmoon.up.supervision.supervisor import launch_here
from halfmoon.up.this_host.reserved_ports import LOOPBACK, ReservedPorts
from halfmoon.up.up_options import UpOptions, WorkerStart


class Hosts(Protocol):
    """The hosts on which services start.

    `address`: that of this host, at which services of the others reach its own.
    """

    address: str

    async def launch(self, spec: ServiceSpec) -> ServiceProcess:
        """Starts a service. Raises OSError if it cannot be started now."""

    async def stores(self, names: Sequence[str], ports: ReservedPorts) -> Mapping[str, tuple[str, Room | None]]:
        """Reserves an address for each store, and its room on its host, by name."""

    async def default_stores(self) -> int:
        """Returns the number of stores where none is configured."""

    def worker_room(self, start: WorkerStart, device: str) -> Room | None:
        """Returns what a worker reserves; None on this host."""

    def share(self, specs: Sequence[ServiceSpec]) -> None:
        """Makes those of these services whose rooms name the same unit start on one host."""

    def metrics_address(self, spec: ServiceSpec) -> str | None:
        """Returns host:port of a service's metrics; None if it has none or does not run."""

    async def write_certificates(self) -> None:
        """Copies renewed certificates to where their services read them."""

    async def close(self) -> None:
        """Ends what it started itself."""


class ThisHost:
    """This host alone."""

    def __init__(self, address: str | None) -> None:
        self.address = address or LOOPBACK

    async def launch(self, spec: ServiceSpec) -> ServiceProcess:
        """See `Hosts.launch`."""
        return await launch_here(spec)

    async def stores(self, names: Sequence[str], ports: ReservedPorts) -> Mapping[str, tuple[str, Room | None]]:
        """See `Hosts.stores`."""
        return {name: (ports.address(self.address), None) for name in names}

    async def default_stores(self) -> int:
        """See `Hosts.default_stores`."""
        return 1

    def worker_room(self, start: WorkerStart, device: str) -> Room | None:
        """See `Hosts.worker_room`."""
        return None

    def share(self, specs: Sequence[ServiceSpec]) -> None:
        """See `Hosts.share`."""

    def metrics_address(self, spec: ServiceSpec) -> str | None:
        """See `Hosts.metrics_address`."""
        return None if spec.metrics_port is None else f"{self.address}:{spec.metrics_port}"

    async def write_certificates(self) -> None:
        """See `Hosts.write_certificates`."""

    async def close(self) -> None:
        """See `Hosts.close`."""


async def opened_hosts(options: UpOptions, logs: LogFiles, on_trouble: OnTrouble) -> Hosts:
    """Returns this host, or a cluster's once it has answered.

    Raises Incompatible without the package that the engine needs, and Unavailable if the cluster does not answer.
    """
    if options.on == "this-host":
        return ThisHost(options.host_address)
    try:
        from halfmoon.up.on_ray.ray_hosts import connected
    except ImportError as error:
        raise Incompatible("--on ray needs another package: pip install 'halfmoon[ray]'") from error
    return await asyncio.to_thread(connected, options, logs, on_trouble)
