"""Many simulated workers in one process, each with an address and a membership of its own. No torch."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, closing
from dataclasses import dataclass
from functools import partial

import halfmoon
from halfmoon.kv import frame
from halfmoon.kv.keys import root_key
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.pb import gateway_pb2
from halfmoon.policy.models.latency import PrefillSample
from halfmoon.policy.view.worker_view import Role
from halfmoon.rpc.credentials.access import CallAccess
from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.layout_message import layout_message
from halfmoon.rpc.server import running_server
from halfmoon.rpc.store.kvstore_client import KVStoreClient
from halfmoon.rpc.telemetry.spans import NO_TRACER, Tracer
from halfmoon.rpc.transport.link import LinkSettings
from halfmoon.sim.answer_model import AnswerModel
from halfmoon.sim.latency_sources.worker_profile import WorkerProfile
from halfmoon.worker.handover.kv_channels import KVChannels
from halfmoon.worker.membership.decode_peers import DecodePeers
from halfmoon.worker.metrics import WorkerMetrics
from halfmoon.worker.servicers.cache_servicer import CacheServicer
from halfmoon.worker.servicers.decode_servicer import LEASE_S, DecodeServicer
from halfmoon.worker.servicers.prefill_servicer import PrefillServicer
from halfmoon.worker.serving import ROLES, Serving, worker_services
from halfmoon.worker.simulated.simulated_engine import SimulatedEngine
from halfmoon.worker.state import WorkerState
from halfmoon.worker.store.chain_queue import MAX_WAITING, ChainQueue
from halfmoon.worker.store.restorer import Restorer
from halfmoon.worker.store.source_links import HolderKind, SourceLinks
from halfmoon.worker.store.store_writer import StoreWriter

_MAX_IDLE_LINKS = 1024  # for the whole process, whose workers share them
_KNOWN_PREFILLS = ((256, 0), (2048, 0), (8192, 0), (2048, 8192))  # (new, cached) tokens of steps of a known length
_GRACE_S = 0.2  # given by a worker's server to streams that have nothing more to send


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """The model that all workers of a simulation serve."""

    name: str
    fingerprint: str
    profile: WorkerProfile
    block_tokens: int
    answers: AnswerModel

    @property
    def layout(self) -> KVLayout:
        """Layout of what is sent and stored, four bytes a token. Times of transfers are those of the profile's KV."""
        return KVLayout(1, 1, 1, "float16", self.block_tokens)

    @property
    def known_prefills(self) -> list[PrefillSample]:
        """What the workers know of their speed from the start, as real ones do from warming up."""
        seconds = self.profile.prefill.seconds
        return [PrefillSample(new, cached, seconds(new, cached)) for new, cached in _KNOWN_PREFILLS]


@dataclass(frozen=True, slots=True)
class SimulatedCluster:
    """Addresses of a simulation's gateways and workers, and how workers end."""

    gateways: str  # host:port of cluster services, separated by commas
    host: str = "127.0.0.1"
    lease_s: float = LEASE_S
    drain_s: float = 0.0  # time for running requests when the simulation stops
    report_s: float = 1.0  # longest interval between load reports
    credential: Credential | None = None  # of all workers
    stores: tuple[str, ...] = ()  # host:port of each; assigned to the workers of each role in turn
    unit: str = ""  # paired unit of all workers


class SimulatedWorker:
    """Owns nothing: names a worker that `Simulation` runs."""

    def __init__(self, role: Role, kv_store: str | None = None) -> None:
        self.role = role
        self.kv_store = kv_store
        self.metrics = WorkerMetrics()
        self.worker_id = f"sim-{role}-{uuid.uuid4().hex[:8]}"
        self.address: asyncio.Future[str] = asyncio.get_running_loop().create_future()


class Simulation:
    """Owns the workers' tasks, and the KV links that the workers share: one to each address."""

    def __init__(
        self, model: SimulatedModel, cluster: SimulatedCluster, workers: asyncio.TaskGroup, tracer: Tracer
    ) -> None:
        self._model = model
        self._tracer = tracer
        self._cluster = cluster
        self._workers = workers
        self._tasks: dict[SimulatedWorker, asyncio.Task[None]] = {}
        self._num_started: Counter[Role] = Counter()
        self._stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._links = LinkSettings(transports=())
        self._channels = KVChannels(self._links, max_idle=_MAX_IDLE_LINKS, credential=cluster.credential)
        self._access = CallAccess(cluster.credential)

    async def start(self, role: Role) -> SimulatedWorker:
        """Starts a worker; returns when it listens. It becomes a member a moment later."""
        stores = self._cluster.stores
        worker = SimulatedWorker(role, stores[self._num_started[role] % len(stores)] if stores else None)
        self._num_started[role] += 1
        self._tasks[worker] = self._workers.create_task(self._run(worker))
        await worker.address
        return worker

    def workers(self) -> list[SimulatedWorker]:
        """Running workers in order of their start."""
        return list(self._tasks)

    async def kill(self, worker: SimulatedWorker) -> None:
        """Ends a worker without notice, like a crash."""
        task = self._tasks.pop(worker)
        task.cancel()
        await asyncio.wait({task})

    def stop(self) -> None:
        """Lets the workers drain and end. Idempotent."""
        if not self._stopping.done():
            self._stopping.set_result(None)

    async def close(self) -> None:
        """Closes the links."""
        await self._channels.close_idle(0)

    async def _run(self, worker: SimulatedWorker) -> None:
        model, cluster, metrics = self._model, self._cluster, worker.metrics
        identity, is_open = gateway_pb2.WorkerIdentity(), cluster.credential is None
        chains = ChainQueue(MAX_WAITING if worker.kv_store else 0, metrics.store.put_chains_dropped.inc)
        sources = SourceLinks(worker.kv_store, self._holder_client, is_open=is_open)
        state = WorkerState(identity, model.layout, metrics, chains, DecodePeers(is_open=is_open), sources=sources)
        state.compute_rate.begin_with(model.known_prefills)
        root = partial(root_key, model.fingerprint, model.layout)
        engine = SimulatedEngine(
            model.profile, model.layout, root, model.answers, state.on_step, fingerprint=model.fingerprint
        )
        async with aclosing(sources):
            restorer = Restorer(engine, state, sources, metrics.store)
            with closing(DecodeServicer(engine, state, metrics, cluster.lease_s)) as decode:
                prefill = PrefillServicer(engine, state, metrics, self._channels, restorer)
                cache = CacheServicer(engine, engine.num_blocks, state, metrics)
                services = worker_services(prefill, decode, cache)
                async with (
                    engine.running() as death,
                    running_server(
                        f"{cluster.host}:0", services, metrics.rpc, _GRACE_S, self._tracer, access=self._access
                    ) as server,
                ):
                    address = f"{cluster.host}:{server.port}"
                    identity.CopyFrom(self._identity(worker, address, engine.num_blocks))
                    await server.set_serving()
                    worker.address.set_result(address)
                    load = partial(self._load, engine, state, prefill, restorer)
                    serving = Serving(engine, state, load, death, cluster.credential, cluster.report_s)
                    if worker.kv_store is not None:
                        rate = state.compute_rate
                        serving.add(StoreWriter(engine, sources, chains, metrics.store, lambda: rate.model).run())
                    await serving.until_stopped(cluster.gateways, cluster.drain_s, self._stopping)
        if self._tasks.pop(worker, None) is not None and serving.returns and not self._stopping.done():
            await self.start(worker.role)

    def _holder_client(self, address: str, kind: HolderKind) -> KVStoreClient:
        return KVStoreClient(address, b"", self._links, self._cluster.credential, kind)

    def _load(
        self, engine: SimulatedEngine, state: WorkerState, prefill: PrefillServicer, restorer: Restorer
    ) -> gateway_pb2.WorkerLoad:
        """A load report, in which the link to each decode worker has its modelled speed."""
        link = engine.links.estimate(self._model.layout)
        links = {} if link is None else dict.fromkeys(prefill.links(), link)
        return state.load(engine, links, restorer.holders.speeds())

    def _identity(self, worker: SimulatedWorker, address: str, num_blocks: int) -> gateway_pb2.WorkerIdentity:
        model, profile = self._model, self._model.profile
        device = f"simulated {profile.name}"
        return gateway_pb2.WorkerIdentity(
            worker_id=worker.worker_id,
            role=ROLES[worker.role],
            address=address,
            model=model.name,
            model_fingerprint=model.fingerprint,
            layout=layout_message(model.layout),
            context_tokens=profile.context_tokens,
            total_blocks=num_blocks,
            version=halfmoon.__version__,
            device=device,
            pid=os.getpid(),
            step_tokens=profile.max_batch_tokens,
            profile=gateway_pb2.LatencyProfile(kind=device, prefill=profile.prefill, step=profile.step),
            kv_frame_version=frame.VERSION,
            chunk_tokens=profile.chunk_tokens,
            follows_targets=profile.follows_targets,
            nests_steps=profile.nests_steps,
            max_running=profile.max_running,
            tensor_parallel=1,
            pipeline_parallel=1,
            kv_store=worker.kv_store or "",
            can_fetch=True,
            can_change_role=True,
            unit=self._cluster.unit,
        )


@asynccontextmanager
async def running_simulation(
    model: SimulatedModel, cluster: SimulatedCluster, tracer: Tracer = NO_TRACER
) -> AsyncIterator[Simulation]:
    """Runs a simulation: workers can be started and killed inside, the others drain at the end.

    Raises, as an exception group, the error that ended a worker.
    """
    async with asyncio.TaskGroup() as workers:
        simulation = Simulation(model, cluster, workers, tracer)
        try:
            yield simulation
        finally:
            simulation.stop()
    await simulation.close()
