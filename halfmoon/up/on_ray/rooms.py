"""Resources that services reserve on other hosts, and how a service's arguments follow the host it got. No Ray."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from halfmoon.errors import Incompatible
from halfmoon.up.supervision.child import Room, ServiceSpec

_KIND = "accelerator_type:"  # begins the resource by which Ray names a host's kind of GPU

Spec = TypeVar("Spec", bound=ServiceSpec)


@dataclass(frozen=True, slots=True)
class Place:
    """The host of a service. `node` is Ray's name of it."""

    node: str
    address: str  # an IP address of the host
    host: str  # its name
    python: str  # its interpreter


class LargestHosts:
    """What the largest hosts have. `nodes`: the resources of each, by Ray's names."""

    def __init__(self, nodes: Iterable[Mapping[str, float]]) -> None:
        self._nodes = list(nodes)

    @property
    def has_gpus(self) -> bool:
        """Whether any host has a GPU."""
        return self.most_gpus("") > 0

    def most_cpus(self) -> int:
        """Processors."""
        return int(max((node.get("CPU", 0.0) for node in self._nodes), default=0.0))

    def most_gpus(self, kind: str) -> int:
        """GPUs of a kind, or of any if no host has that one: one may yet come."""
        gpus = {name: node.get("GPU", 0.0) for name, node in enumerate(self._nodes)}
        fitting = [gpus[name] for name, node in enumerate(self._nodes) if _KIND + kind in node]
        return int(max(fitting or gpus.values(), default=0.0))

    def kind(self, planned: str) -> str:
        """Returns Ray's name of a plan's kind of GPU: `a100-80g` is A100-80G where hosts were given that, else A100.

        Empty where no host says its kind.
        """
        known = {name.removeprefix(_KIND) for node in self._nodes for name in node if name.startswith(_KIND)}
        if not known:
            return ""
        exact = planned.upper()
        return exact if exact in known else exact.partition("-")[0]


def resources(room: Room) -> dict[str, float]:
    """Returns a placement group's bundle for one service."""
    gpus = {"GPU": float(room.num_gpus)} if room.num_gpus else {}
    return {"CPU": room.num_cpus, **gpus, **further_resources(room)}


def further_resources(room: Room) -> dict[str, float]:
    """Returns what a room needs of its host beside processors and GPUs: these of a kind."""
    return {_KIND + room.gpu: 0.001} if room.gpu else {}


def wanted(room: Room) -> str:
    """Says what a room needs."""
    gpus = f"{room.num_gpus} {room.gpu or 'GPU'}" if room.num_gpus else ""
    return " and ".join(filter(None, (f"{room.num_cpus:g} CPU" if room.num_cpus else "", gpus))) or "room"


def worker_room(num_ranks: int, tensor_parallel: int, on_gpus: bool, most: int, unit: str, gpu: str = "") -> Room:
    """Returns the room of a worker: a GPU for each rank, of that kind, or a processor.

    `most`: what the largest host has of them. A worker that needs more is divided: as many stages as fit on a host.
    Raises Incompatible if not one does.
    """
    kind = "GPUs" if on_gpus else "processors"
    here = num_ranks if num_ranks <= most else most // tensor_parallel * tensor_parallel
    if here == 0:
        raise Incompatible(
            f"no host of the Ray cluster has the {tensor_parallel} {kind} of one pipeline stage: {most} is the most. "
            "Use less tensor_parallel, and more pipeline_parallel"
        )
    rooms = []
    for before in range(0, num_ranks, here):
        num = min(here, num_ranks - before)
        rooms.append(Room(1.0, num, gpu=gpu) if on_gpus else Room(float(num)))
    return replace(rooms[0], rest=tuple(rooms[1:]), unit="" if rooms[1:] else unit)


def on_host(spec: Spec, place: Place, metrics_port: int, stores: Mapping[str, str]) -> Spec:
    """Returns the spec with the arguments and interpreter of its host.

    Workers listen at the host's address, on a port of their own choice. `stores` has the address of each host's store,
    by node: a worker uses that of its host, where there is one.
    """
    changed = {}
    if "--listen" in spec.arguments and spec.room is not None and not spec.room.node:
        changed["--listen"] = f"{place.address}:0"
    if "--kv-store" in spec.arguments and place.node in stores:
        changed["--kv-store"] = stores[place.node]
    if "--metrics-port" in spec.arguments:
        changed["--metrics-port"] = str(metrics_port)
    python = place.python if spec.python == sys.executable else spec.python
    return replace(
        spec,
        arguments=_with_options(spec.arguments, changed),
        python=python,
        metrics_port=metrics_port if "--metrics-port" in changed else None,
    )


def _with_options(arguments: tuple[str, ...], changed: Mapping[str, str]) -> tuple[str, ...]:
    before = ("", *arguments)
    return tuple(changed.get(option, value) for option, value in zip(before, arguments, strict=False))
