"""The ranks of a worker that are on other hosts of a Ray cluster than the worker itself."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from halfmoon.up.on_ray.remote_process import Actor, RemoteProcess
from halfmoon.up.on_ray.rooms import Place
from halfmoon.up.ranks import rank_spec
from halfmoon.up.supervision.child import Room, ServiceSpec
from halfmoon.up.supervision.log_files import LogFiles


class RemoteRanks:
    """Owns the actors of one worker's ranks on other hosts. They end with the worker, and are started with it again."""

    def __init__(self, spec: ServiceSpec, group: PlacementGroup, remote: Any, logs: LogFiles) -> None:
        """`spec`: the worker's; `remote`: the class of actors; `group`: its first bundle is the worker's own."""
        assert spec.room is not None
        self._spec = spec
        self._logs = logs
        self._actors: list[Actor] = []
        self._reading: set[asyncio.Task[None]] = set()
        self._where: list[tuple[Actor, int]] = []  # with the number among the ranks of its host
        for bundle, room in enumerate(spec.room.rest, start=1):
            strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
            num_ranks = ranks_in(room)
            amounts = {"num_cpus": room.num_cpus / num_ranks, "num_gpus": room.num_gpus / num_ranks}
            for index in range(num_ranks):
                actor = remote.options(**amounts, scheduling_strategy=strategy).remote()
                self._actors.append(actor)
                self._where.append((actor, index))

    async def start(self, worker: str, directory: str, files: Mapping[str, bytes]) -> None:
        """Starts all, which join the worker at that address. Raises OSError and RayError."""
        model = self._spec.arguments[self._spec.arguments.index("--model") + 1]
        for number, (actor, index) in enumerate(self._where):
            place: Place = (await actor.place.remote())[0]
            name = f"{self._spec.name}-rank-{number}"
            spec = rank_spec(name, worker, model, place.node, index)
            environment = {**self._spec.environment, **spec.environment}
            start = ServiceSpec(name, spec.arguments, environment, python=place.python).process_start
            pid = await actor.start.remote(start, directory, files)
            process = RemoteProcess(actor, place.host, pid, lambda: None)
            reading = asyncio.create_task(self._read(name, process))
            self._reading.add(reading)
            reading.add_done_callback(self._reading.discard)

    def end(self) -> None:
        """Ends all at once."""
        for actor in self._actors:
            ray.kill(actor)

    async def _read(self, name: str, process: RemoteProcess) -> None:
        with closing(self._logs.file(name)) as file:
            async for line in process.lines():
                file.write(line)


def ranks_in(room: Room) -> int:
    """Returns the number of ranks that a room is for: one for each GPU, or each processor."""
    return room.num_gpus or int(room.num_cpus)
