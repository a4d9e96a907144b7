"""Resources that services reserve on other hosts, and how a service's arguments follow the host it got. No Ray."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
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

    def most(self, room: Room) -> int:
        """Of what a room needs: GPUs of its kind, or processors."""
        return self.most_gpus(room.gpu) if room.num_gpus else self.most_cpus()

    def kind(self, planned: str) -> str:
        """Returns Ray's name of a plan's kind of GPU: `a100-80g` is A100-80G where hosts were given that, else A100.

        Empty where no host says its kind.
        """
        known = {name.removeprefix(_KIND) for node in self._nodes for name in node if name.startswith(_KIND)}
        if not known:
            return ""
        exact = planned.upper()
        return exact if exact in known else exact.partition("-")[0]


def resources(rooms: Iterable[Room]) -> dict[str, float]:
    """Returns a placement group's bundle: what services of one host need together."""
    total: dict[str, float] = {}
    for room in rooms:
        gpus = {"GPU": float(room.num_gpus)} if room.num_gpus else {}
        for name, amount in ({"CPU": room.num_cpus} | gpus | further_resources(room)).items():
            total[name] = total.get(name, 0.0) + amount
    return total


def further_resources(room: Room) -> dict[str, float]:
    """Returns what a room needs of its host beside processors and GPUs: these of a kind."""
    return {_KIND + room.gpu: 0.001} if room.gpu else {}


def wanted(rooms: Iterable[Room]) -> str:
    """Says what the rooms need together of one host."""
    total = resources(rooms)
    kind = next((name.removeprefix(_KIND) for name in total if name.startswith(_KIND)), "GPU")
    gpus = f"{total['GPU']:g} {kind}" if "GPU" in total else ""
    return " and ".join(filter(None, (f"{total['CPU']:g} CPU" if total.get("CPU") else "", gpus))) or "room"


def worker_room(num_ranks: int, tensor_parallel: int, on_gpus: bool, unit: str, gpu: str = "") -> Room:
    """Returns the room of a worker that shares no host with others yet: a GPU for each rank, of that kind, or a
    processor.
    """
    room = Room(1.0, num_ranks, gpu=gpu) if on_gpus else Room(float(num_ranks))
    return replace(room, unit=unit, num_stages=num_ranks // tensor_parallel)


def divided(rooms: Mapping[str, Room], most: int) -> dict[str, Room]:
    """Returns the rooms of services, by name, that share hosts: each host has the same stages of all of them.

    `most`: what the largest host has of the GPUs that they need, or of processors. If that is too little for all, they
    are divided: as many stages as fit on a host. Raises Incompatible if not one does. 0 if there is no such host yet:
    one that comes is expected to have room.
    """
    needed = {name: room.num_gpus or room.num_cpus for name, room in rooms.items()}
    if sum(needed.values()) <= most or not most:
        return dict(rooms)
    names = " and ".join(rooms)
    kind = "GPUs" if any(room.num_gpus for room in rooms.values()) else "processors"
    numbers = {room.num_stages for room in rooms.values()}
    if len(numbers) > 1:
        raise Incompatible(
            f"no host of the Ray cluster has the {sum(needed.values()):g} {kind} of {names} together: {most} is the "
            "most, and different numbers of stages cannot share hosts. Plan for the --gpus-per-node of these hosts"
        )
    num_stages = numbers.pop()
    stage = sum(needed.values()) / num_stages
    here = int(most // stage)
    if here == 0:
        raise Incompatible(
            f"no host of the Ray cluster has the {stage:g} {kind} of one pipeline stage of {names}: {most} is the "
            "most. Use less tensor_parallel, and more pipeline_parallel"
        )
    parts = [min(here, num_stages - before) for before in range(0, num_stages, here)]
    return {name: _in_parts(room, parts) for name, room in rooms.items()}


def _in_parts(room: Room, parts: Sequence[int]) -> Room:
    of_stage = (room.num_gpus or int(room.num_cpus)) // room.num_stages
    rooms = [
        Room(room.num_cpus, num * of_stage, gpu=room.gpu) if room.num_gpus else Room(float(num * of_stage))
        for num in parts
    ]
    return replace(rooms[0], unit=room.unit, num_stages=room.num_stages, rest=tuple(rooms[1:]))


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
