"""The system under test: a running one, or one started for the replay with simulated workers."""

from __future__ import annotations

import asyncio
import math
import ssl
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

from halfmoon.background import first_result, running
from halfmoon.errors import Unavailable
from halfmoon.replay.client import Gateway
from halfmoon.replay.outcome import ReplayTargets
from halfmoon.rpc.tls.http_context import client_context, unreached
from halfmoon.up.specs.service_specs import gateway_spec
from halfmoon.up.specs.simulated import simulated_model, simulation_specs
from halfmoon.up.supervision.child import children_ready
from halfmoon.up.supervision.log_files import LogFiles
from halfmoon.up.supervision.supervisor import Supervisor
from halfmoon.up.up_options import PreparedModel, UpOptions, simulated_workers

_POLL_S = 0.1
_START_S = 60.0
_CALL = aiohttp.ClientTimeout(total=10)

T = TypeVar("T")


class SimulatedTarget:
    """Owns the processes of one gateway and its simulated workers. `while_well` runs work as long as they are well.
    Knows nothing of workloads.
    """

    def __init__(self, options: UpOptions, model: PreparedModel) -> None:
        assert options.simulation is not None
        self._options = options
        self._simulation = options.simulation
        path = simulated_model(Path(model.path), options.simulation, options.state_dir)
        self._model = PreparedModel(str(path), model.name)
        self._supervisor = Supervisor(LogFiles(options.state_dir / "logs"), lambda service, event: None)

    async def start(self, targets: ReplayTargets) -> Gateway:
        """Starts everything, with `targets` (in the trace's seconds) for every request. Raises Unavailable."""
        options, speed = self._options, self._simulation.time_scale
        workers = simulated_workers(options)
        which = ("--model", self._model.path, "--model-name", self._model.name)
        gateway = replace(
            gateway_spec(options, self._model), restarts=False
        )  # a restart would lose state and spoil the measurement
        announced = await (await self._supervisor.start(gateway)).ready
        specs = simulation_specs(self._simulation, workers, announced["address"], which)
        await children_ready([await self._supervisor.start(spec) for spec in specs])
        url: str = announced["http"]
        await _until_joined(url, len(workers))
        await _promise(url, targets, speed)
        return await discover_gateway(url, speed, hides_length=True)

    async def while_well(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises ServiceFailed as soon as a process ends."""
        async with running(work) as working, running(self._supervisor.until_one_ends()) as watching:
            return await first_result(working, watching)

    async def stop(self) -> None:
        """Stops all processes."""
        await self._supervisor.stop()


@asynccontextmanager
async def simulated_cluster(options: UpOptions, model: PreparedModel) -> AsyncIterator[SimulatedTarget]:
    """Provides a cluster whose processes end with the block."""
    cluster = SimulatedTarget(options, model)
    try:
        yield cluster
    finally:
        await cluster.stop()


async def discover_gateway(
    url: str, speed: float = 1.0, *, hides_length: bool = False, ca: Path | None = None
) -> Gateway:
    """Reads what a replay needs from a running gateway; `ca` is the file of authorities of an https:// URL.

    Raises Unavailable if the gateway does not answer, InvalidRequest for a file that cannot be used.
    """
    trusted = client_context(ca, url)
    cluster = await _cluster(url, trusted)
    return Gateway(url, cluster["served_model"], cluster["context_tokens"], hides_length, speed, trusted)


async def _until_joined(url: str, num_workers: int) -> None:
    """Waits until `num_workers` are members, and the gateway listens to those that decode."""
    give_up_s = asyncio.get_running_loop().time() + _START_S
    while True:
        workers = (await _cluster(url))["workers"]
        ready = [worker for worker in workers if worker["role"] == "prefill" or worker["listening"]]
        if len(ready) >= num_workers:
            return
        if asyncio.get_running_loop().time() > give_up_s:
            raise Unavailable(f"only {len(ready)} of {num_workers} simulated workers joined within {_START_S:g} s")
        await asyncio.sleep(_POLL_S)


async def _promise(url: str, targets: ReplayTargets, speed: float) -> None:
    """Sets the targets, in the gateway's time. The class `default` applies to every request."""
    times = {"ttft_s": targets.ttft_s, "tbt_s": targets.tbt_s}
    body = {name: time_s / speed if math.isfinite(time_s) else None for name, time_s in times.items()}
    await _controlled("PUT", f"{url}/halfmoon/v1/classes/default", json={"version": 0, **body})


async def _cluster(url: str, trusted: ssl.SSLContext | None = None) -> dict[str, Any]:
    return await _controlled("GET", f"{url}/halfmoon/v1/cluster", ssl=trusted or True)


async def _controlled(method: str, url: str, **how: Any) -> dict[str, Any]:
    """Makes one call of the control API. Raises Unavailable if it fails."""
    try:
        async with (
            aiohttp.ClientSession(timeout=_CALL, raise_for_status=True) as session,
            session.request(method, url, **how) as response,
        ):
            result: dict[str, Any] = await response.json()
            return result
    except (aiohttp.ClientError, TimeoutError) as error:
        raise Unavailable(f"no halfmoon gateway answers at {url}: {unreached(error)}") from error
