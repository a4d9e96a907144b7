"""Starts services on the hosts of a Ray cluster, each in an actor with the resources that it needs."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

import halfmoon
from halfmoon.errors import Incompatible, Unavailable
from halfmoon.rpc.tls.identity_files import TLS_VARIABLES
from halfmoon.up.on_ray.process_actor import ProcessActor
from halfmoon.up.on_ray.remote_process import Actor, RemoteProcess
from halfmoon.up.on_ray.remote_ranks import RemoteRanks, ranks_in
from halfmoon.up.on_ray.rooms import (
    LargestHosts,
    Place,
    divided,
    further_resources,
    on_host,
    resources,
    wanted,
    worker_room,
)
from halfmoon.up.supervision.child import Room, ServiceSpec
from halfmoon.up.supervision.log_files import LogFiles, OnTrouble
from halfmoon.up.supervision.service_process import ServiceProcess
from halfmoon.up.supervision.supervisor import launch_here
from halfmoon.up.this_host.reserved_ports import LOOPBACK, ReservedPorts
from halfmoon.up.up_options import UpOptions, WorkerStart, option_values

_CONNECT_S = 5.0
_TELL_S = 15.0  # after which it is said that a service waits for a host


class _RayActor(ProcessActor):
    def __init__(self) -> None:
        super().__init__(ray.get_runtime_context().get_node_id(), _own_address())


class _Running(NamedTuple):
    actor: Actor
    place: Place
    spec: ServiceSpec  # with the arguments of its host, once it runs there


@dataclass(slots=True)
class _Unit:
    """Services that share hosts, and the room of them all while any of them runs or waits for it."""

    rooms: Mapping[str, Room]  # of its services, by their names
    group: PlacementGroup | None = None

    @property
    def by_host(self) -> list[tuple[Room, ...]]:
        """The rooms on each of its hosts."""
        return list(zip(*((room, *room.rest) for room in self.rooms.values()), strict=True))


class RayHosts:
    """Owns the connection to a Ray cluster and the actors there. Belongs to one event loop."""

    def __init__(
        self,
        address: str,
        largest: LargestHosts,
        directory: Path,
        logs: LogFiles,
        on_trouble: OnTrouble,
    ) -> None:
        """`address`: that of this host. `largest`: among the hosts of the cluster.

        `directory`: where services keep files, the same on every host. `logs`: those of the supervisor.
        """
        self.address = address
        self._largest = largest
        self._logs = logs
        self._directory = str(directory)
        self._on_trouble = on_trouble
        self._stores: dict[str, str] = {}  # addresses by node
        self._addresses: dict[str, str] = {}  # of the hosts of stores, by the stores' names
        self._reserved: dict[str, _Running] = {}  # whose service has not started, by its name
        self._running: dict[str, _Running] = {}
        self._starting: set[str] = set()  # names of services that wait for their room or start there
        self._units: dict[str, _Unit] = {}  # by the names of their services

    def metrics_address(self, spec: ServiceSpec) -> str | None:
        """See `Hosts.metrics_address`."""
        if spec.room is None:
            return None if spec.metrics_port is None else f"{LOOPBACK}:{spec.metrics_port}"
        running = self._running.get(spec.name)
        return None if running is None else f"{running.place.address}:{running.spec.metrics_port}"

    async def default_stores(self) -> int:
        """See `Hosts.default_stores`. One on each host."""
        return len(await _nodes())

    def worker_room(self, start: WorkerStart, device: str) -> Room:
        """See `Hosts.worker_room`. A processor for each rank, or a GPU."""
        is_of_cpu = device == "cpu" or start.on_cpu or start.gpu == "cpu"
        on_gpus = not is_of_cpu and (self._largest.has_gpus or device == "cuda")
        tensor = int(option_values(start.arguments).get("--tensor-parallel", 1))
        gpu = self._largest.kind(start.gpu) if on_gpus and start.gpu else ""
        return worker_room(start.num_gpus, tensor, on_gpus, start.unit, gpu)

    async def stores(self, names: Sequence[str], ports: ReservedPorts) -> dict[str, tuple[str, Room | None]]:
        """See `Hosts.stores`. Each host has one in turn, and a store stays on its host."""
        nodes = await _nodes()
        rooms = {name: Room(num_cpus=0.0, node=nodes[index % len(nodes)]) for index, name in enumerate(names)}
        specs = [ServiceSpec(name, (), {}, room=room) for name, room in rooms.items()]
        self._reserved = dict(zip(names, await asyncio.gather(*map(self._placed, specs)), strict=True))
        found: dict[str, tuple[str, Room | None]] = {}
        for name, (actor, place, _) in self._reserved.items():
            self._addresses[name] = place.address
            found[name] = f"{place.address}:{await actor.port.remote()}", rooms[name]
            self._stores.setdefault(place.node, found[name][0])
        return found

    def share(self, specs: Sequence[ServiceSpec]) -> None:
        """See `Hosts.share`. The room for a unit's services is reserved for all of them together."""
        units: dict[str, dict[str, Room]] = {}
        for spec in specs:
            if spec.room is not None:
                units.setdefault(f"unit {spec.room.unit}" if spec.room.unit else spec.name, {})[spec.name] = spec.room
        for whole in units.values():
            rooms = divided(whole, self._largest.most(next(iter(whole.values()))))
            if any(room.unit or room.rest for room in rooms.values()):
                self._units |= dict.fromkeys(rooms, _Unit(rooms))

    async def launch(self, spec: ServiceSpec) -> ServiceProcess:
        """Starts a service where its room is, or on this host if it has none. Waits until there is room.

        Raises OSError if the host is lost meanwhile, and Incompatible for another version of Halfmoon there.
        """
        if spec.room is None:
            return await launch_here(spec)
        if spec.name in self._units:
            spec = replace(spec, room=self._units[spec.name].rooms[spec.name])
        self._starting.add(spec.name)
        try:
            return await self._launch(spec, _room(spec))
        finally:
            self._starting.discard(spec.name)
            self._give_back(spec.name)

    async def _launch(self, spec: ServiceSpec, room: Room) -> ServiceProcess:
        try:
            running = self._reserved.pop(spec.name, None) or await self._placed(spec)
            port = await running.actor.port.remote() if "--metrics-port" in spec.arguments else 0
            here = on_host(spec, running.place, port, self._stores)
            ranks = None
            if room.rest:
                here, ranks = await self._with_ranks(here, running)
            start = replace(here.process_start, environment=dict(here.environment))
            pid = await running.actor.start.remote(start, self._directory, _files(spec.environment))
        except RayError as error:
            raise OSError(f"its host was lost, or cannot run Halfmoon: {_reason(error)}") from error
        self._running[spec.name] = running._replace(spec=here)
        return RemoteProcess(running.actor, running.place.host, pid, partial(self._on_ended, spec.name, ranks))

    async def _with_ranks(self, spec: ServiceSpec, running: _Running) -> tuple[ServiceSpec, RemoteRanks]:
        """Starts the ranks of other hosts, which wait for the worker. Returns its spec with where they join it."""
        group = self._units[spec.name].group
        assert group is not None
        ranks = RemoteRanks(spec, group, _remote(), self._logs)
        address = f"{running.place.address}:{await running.actor.port.remote()}"
        try:
            await ranks.start(address, self._directory, _files(spec.environment))
        except (OSError, RayError):
            ranks.end()
            raise
        joining = ("--remote-ranks", str(sum(map(ranks_in, _room(spec).rest))), "--rank-listen", address)
        return replace(spec, arguments=(*spec.arguments, *joining)), ranks

    async def write_certificates(self) -> None:
        """Sends certificates that were renewed to all hosts."""
        calls = [one.actor.write_files.remote(_files(one.spec.environment)) for one in self._running.values()]
        await asyncio.gather(*calls, return_exceptions=True)

    async def close(self) -> None:
        """Ends all actors."""
        await asyncio.to_thread(ray.shutdown)

    async def _placed(self, spec: ServiceSpec) -> _Running:
        """Returns an actor on its host. Raises RayError if that host is or gets lost, and Incompatible."""
        actor = _remote().options(**self._options(spec, await _nodes())).remote()
        placing = asyncio.ensure_future(actor.place.remote())
        try:
            if not (await asyncio.wait({placing}, timeout=_TELL_S))[0]:
                unit = self._units.get(spec.name)
                hosts = " and another with ".join(map(wanted, unit.by_host if unit else [[_room(spec)]]))
                self._on_trouble(f"{spec.name} waits for a host of the Ray cluster with {hosts} free")
            place, version = await placing
            if version != halfmoon.__version__:
                text = f"{place.host} has Halfmoon {version}, and this host {halfmoon.__version__}"
                raise Incompatible(f"{text}: install the same on each")
        except BaseException:
            placing.cancel()
            ray.kill(actor)
            raise
        return _Running(actor, place, spec)

    def _options(self, spec: ServiceSpec, nodes: Sequence[str]) -> dict[str, Any]:
        room, unit = _room(spec), self._units.get(spec.name)
        strategy: Any = "SPREAD"
        further = further_resources(room)
        if room.node in nodes:
            strategy = NodeAffinitySchedulingStrategy(room.node, soft=False)
        elif room.node:  # a host that comes back is another node with the same address
            further = {f"node:{self._addresses[spec.name]}": 0.001}
        elif unit is not None:
            if unit.group is None:
                unit.group = placement_group([resources(rooms) for rooms in unit.by_host], strategy="PACK")
            strategy = PlacementGroupSchedulingStrategy(unit.group, placement_group_bundle_index=0)
        amounts = {"num_cpus": room.num_cpus, "num_gpus": room.num_gpus, "resources": further}
        return {**amounts, "scheduling_strategy": strategy}

    def _on_ended(self, name: str, ranks: RemoteRanks | None) -> None:
        if ranks is not None:
            ranks.end()
        del self._running[name]
        self._give_back(name)

    def _give_back(self, name: str) -> None:
        """Removes the room of a service's unit once none of its services runs or waits for it."""
        unit = self._units.get(name)
        if unit is None or unit.group is None:
            return
        if not any(self._units.get(other) is unit for other in (*self._running, *self._starting)):
            remove_placement_group(unit.group)
            unit.group = None


def connected(options: UpOptions, logs: LogFiles, on_trouble: OnTrouble) -> RayHosts:
    """Connects to the Ray cluster. Raises Unavailable if none answers. May block for seconds."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    tree = Path(halfmoon.__file__).parents[1]
    variables = {"PYTHONPATH": str(tree)} if (tree / "pyproject.toml").exists() else {}
    try:
        _check_answers(options.ray_address)
        ray.init(
            address=options.ray_address,
            namespace="halfmoon",
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
            runtime_env={"env_vars": variables} if variables else None,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise Unavailable(
            f"no Ray cluster answers at {options.ray_address}: {error}. `ray start --head` begins one on this host, "
            "and `ray start --address=HOST:PORT` adds another"
        ) from error
    address = options.host_address or _own_address()
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    return RayHosts(address, LargestHosts(nodes), options.state_dir, logs, on_trouble)


def _reason(error: RayError) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"


def _room(spec: ServiceSpec) -> Room:
    assert spec.room is not None
    return spec.room


async def _nodes() -> list[str]:
    """Returns the hosts that are there, the one of this process first."""
    own = ray.get_runtime_context().get_node_id()
    alive = [node["NodeID"] for node in await asyncio.to_thread(ray.nodes) if node["Alive"]]
    return sorted(alive, key=lambda node: (node != own, node))


def _check_answers(address: str) -> None:
    """Raises OSError if nothing listens there: Ray itself would try for minutes. ValueError for no address."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if "//" in address or not port.isdigit():
        raise ValueError("give its HOST:PORT, or auto")
    socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()


def _own_address() -> str:
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _remote() -> Any:
    return ray.remote(max_restarts=0, max_task_retries=0)(_RayActor)


def _files(environment: Mapping[str, str]) -> dict[str, bytes]:
    """Returns the certificate's files that the environment names."""
    paths = [environment[name] for name in TLS_VARIABLES if name in environment]
    return {path: Path(path).read_bytes() for path in paths}
