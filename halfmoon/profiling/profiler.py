"""A whole profile: measurements of chosen workers, for the simulator and the planner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import aiohttp

from halfmoon.errors import InvalidRequest
from halfmoon.profiling.measured_slowdowns import measured_slowdowns
from halfmoon.profiling.measuring import Progress, measured_transfers, measured_work
from halfmoon.profiling.probe import WorkerProbe
from halfmoon.profiling.served_load import served_slowdowns
from halfmoon.profiling.served_request import RequestTime, measured_request_time
from halfmoon.profiling.sweep import SweepLimits
from halfmoon.profiling.target import Cluster, Target, check_idle, choose_targets, fetch_cluster
from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.tls.http_context import client_context
from halfmoon.sim.latency_sources.measured_profile import (
    MeasuredLimits,
    MeasuredPrefill,
    MeasuredProfile,
    MeasuredSlowdown,
    MeasuredStep,
    MeasuredTransfer,
)


@dataclass(frozen=True, slots=True)
class ProfileOptions:
    """What to measure."""

    gateway: str
    token: str | None = None  # the operator's
    api_key: str | None = None
    workers: tuple[str, ...] = ()  # ids; none: one worker of each role
    transports: tuple[str, ...] = ("shm", "grpc")
    limits: SweepLimits = field(default_factory=SweepLimits)
    beside: bool | None = None  # None: if two workers share one host's CPUs
    credential: Callable[[str], Credential | None] = lambda address: None  # for a worker's address
    ca: Path | None = None  # authorities of the gateway's certificate; None: the system's


async def profiled(options: ProfileOptions, on_progress: Progress) -> MeasuredProfile:
    """Measures idle workers, and leaves nothing on them however it ends.

    Raises InvalidRequest, NoCapacity for a busy worker, Unavailable for an unreachable one.
    """
    headers = {"Authorization": f"Bearer {options.token}"} if options.token else {}
    keys = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    trusted = client_context(options.ca, options.gateway) or True
    async with (
        aiohttp.ClientSession(headers=headers, connector=aiohttp.TCPConnector(ssl=trusted)) as control,
        aiohttp.ClientSession(
            headers={"Content-Type": "application/json", **keys}, connector=aiohttp.TCPConnector(ssl=trusted)
        ) as client,
        AsyncExitStack() as probes,
    ):
        cluster = await fetch_cluster(control, options.gateway)
        targets = choose_targets(cluster, options.workers)
        _check_one_kind(targets)
        neighbours = _neighbours(targets, cluster.workers, options.beside)
        is_served = bool(neighbours) and _is_one_host(cluster.workers)
        check_idle(cluster.workers if is_served else neighbours)
        made: dict[str, WorkerProbe] = {}
        for one in {one.worker_id: one for one in (*targets, *neighbours)}.values():
            probe = WorkerProbe(one, options.transports, options.credential(one.address))
            made[one.worker_id] = await probes.enter_async_context(probe)
        prefill = next(made[target.worker_id] for target in targets if target.can("prefill"))
        decode = next(made[target.worker_id] for target in targets if target.can("decode"))
        prefills, steps = await measured_work(prefill, decode, options.limits, on_progress)
        transfers = await measured_transfers(decode, options.limits, on_progress)
        beside_work = await measured_request_time(client, cluster, prefill, decode)
        slowdowns: list[MeasuredSlowdown] = []
        profile = _profile(cluster, prefill.target, decode.target, prefills, steps, transfers, beside_work)
        if is_served:
            slowdowns = await served_slowdowns(client, cluster, prefill, profile, on_progress)
        elif neighbours:
            one, other = (made[each.worker_id] for each in neighbours)
            slowdowns = await measured_slowdowns(one, other, on_progress)
    return profile.model_copy(update={"beside": tuple(slowdowns)})


def _profile(
    cluster: Cluster,
    prefill: Target,
    own: Target,
    prefills: Sequence[MeasuredPrefill],
    steps: Sequence[MeasuredStep],
    transfers: Sequence[MeasuredTransfer],
    beside_work: RequestTime,
) -> MeasuredProfile:
    return MeasuredProfile(
        model=cluster.served_model,
        device=own.device,
        tensor_parallel=own.tensor_parallel,
        pipeline_parallel=own.pipeline_parallel,
        kv_tokens=own.kv_tokens,
        kv_bytes_per_token=own.layout.token_bytes,
        limits=MeasuredLimits(
            context_tokens=own.context_tokens,
            max_batch_tokens=own.max_batch_tokens,
            chunk_tokens=own.chunk_tokens,
            max_running=own.max_running,
            nests_steps=prefill.nests_steps,
        ),
        prefill=tuple(prefills),
        step=tuple(steps),
        transfer=tuple(transfers),
        **beside_work._asdict(),
    )


def _is_one_host(workers: Sequence[Target]) -> bool:
    """Whether all workers are of one kind and share the same cores."""
    return (
        len({(worker.host, worker.device, worker.tensor_parallel, worker.pipeline_parallel) for worker in workers}) == 1
    )


def _check_one_kind(targets: Sequence[Target]) -> None:
    if len({(target.tensor_parallel, target.pipeline_parallel, target.layout) for target in targets}) > 1:
        described = ", ".join(
            f"{target.worker_id} is TP{target.tensor_parallel} x PP{target.pipeline_parallel}" for target in targets
        )
        raise InvalidRequest(f"a profile is of one kind of worker: {described}. Name workers of one with --worker")


def _neighbours(
    targets: Sequence[Target], workers: Sequence[Target], wanted: bool | None
) -> tuple[Target, Target] | tuple[()]:
    """Two workers of one host, at least one of them chosen, with different roles if possible. Raises InvalidRequest if
    none.
    """
    if wanted is False:
        return ()
    pairs = [
        pair
        for pair in combinations(sorted(workers, key=lambda one: one not in targets), 2)
        if pair[0] in targets and pair[0].host == pair[1].host and (wanted or pair[0].device == pair[1].device == "cpu")
    ]
    if not pairs:
        if wanted:
            raise InvalidRequest("--beside: no other worker is on the host of one that is measured", param="beside")
        return ()
    return max(pairs, key=lambda pair: pair[0].role != pair[1].role)
