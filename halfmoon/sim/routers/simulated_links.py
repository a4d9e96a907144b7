"""What a simulated worker would have measured of its links to the others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from halfmoon.sim.cluster.cluster_spec import Network
from halfmoon.sim.routers.colocation import SimulatedColocation
from halfmoon.sim.worker.worker import SimWorker


class SimulatedLink(NamedTuple):
    """One link, as `LinkSpeeds` reads it."""

    address: str
    bandwidth_bytes_per_s: float
    latency_s: float


class SimulatedLinks:
    """The links from one worker to all that decode, slower between nodes than within one."""

    def __init__(
        self, sender: SimWorker, network: Network, workers: Sequence[SimWorker], colocation: SimulatedColocation
    ) -> None:
        self._sender = sender
        self._network = network
        self._workers = workers
        self._colocation = colocation

    def __iter__(self) -> Iterator[SimulatedLink]:
        network = self._network
        for worker in self._workers:
            if worker.group.role != "prefill":
                speed = network.node_bytes_per_s if worker.node == self._sender.node else network.bytes_per_s
                yield SimulatedLink(self._colocation.known(worker).address, speed, network.latency_s)
