"""The life of a worker: load the model, serve, register, drain, stop."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import socket
import uuid
from contextlib import aclosing
from dataclasses import replace

import halfmoon
from halfmoon.engine.async_engine import AsyncEngine
from halfmoon.engine.engine import Engine
from halfmoon.engine.engine_facts import EngineFacts
from halfmoon.engine.kv_memory.cuda_memory import CudaMemory
from halfmoon.freed_memory import keep_freed_memory
from halfmoon.kv import frame
from halfmoon.pb import gateway_pb2
from halfmoon.rpc.addresses.towards import own_host
from halfmoon.rpc.credentials.access import CallAccess
from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.credentials.listeners import check_listener
from halfmoon.rpc.credentials.sources import own_credential
from halfmoon.rpc.layout_message import layout_message
from halfmoon.rpc.server import advertised_address, running_server, until_told_to_drain, until_told_to_stop
from halfmoon.rpc.service import metrics_endpoint
from halfmoon.rpc.store.kvstore_client import KVStoreClient
from halfmoon.rpc.telemetry.spans import Tracer
from halfmoon.rpc.telemetry.tracing import tracing
from halfmoon.rpc.transport.link import LinkSettings
from halfmoon.rpc.transport.rank_fetches import RankKVServicer
from halfmoon.rpc.transport.ranks import RankLinks
from halfmoon.worker.engine_host import loaded_host
from halfmoon.worker.handover.kv_channels import KVChannels
from halfmoon.worker.handover.link_codecs import LinkCodecs
from halfmoon.worker.membership.calibration import Profile
from halfmoon.worker.membership.decode_peers import DecodePeers
from halfmoon.worker.membership.serving_calibration import StepTap, calibrated_serving
from halfmoon.worker.metrics import WorkerMetrics
from halfmoon.worker.servicers.cache_servicer import CacheServicer
from halfmoon.worker.servicers.decode_servicer import DecodeServicer
from halfmoon.worker.servicers.kept_answers import KeptAnswers
from halfmoon.worker.servicers.prefill_servicer import PrefillServicer
from halfmoon.worker.serving import ROLES, Serving, worker_services
from halfmoon.worker.serving_engine import PoolingEngine
from halfmoon.worker.settings import WorkerSettings
from halfmoon.worker.state import WorkerState
from halfmoon.worker.store.chain_queue import MAX_WAITING, ChainQueue
from halfmoon.worker.store.restorer import Restorer
from halfmoon.worker.store.source_links import HolderKind, SourceLinks
from halfmoon.worker.store.store_writer import StoreWriter
from halfmoon.worker.store.write_delay import LONGEST_S

log = logging.getLogger(__name__)

_CPU_BATCH_S = 0.02  # each batch of KV stops the threads that compute: measured in docs/log/worker.md


async def serve(settings: WorkerSettings, loaded: Engine | None) -> None:
    """Runs one worker until told to stop."""
    with tracing(settings.role, settings.otlp_endpoint) as tracer:
        await _serve(settings, loaded, tracer)


async def _serve(settings: WorkerSettings, loaded: Engine | None, tracer: Tracer) -> None:
    kv_links, credential = link_settings(settings), own_credential("worker")
    check_listener(settings.listen, credential)  # before the weights are loaded
    keep_freed_memory()
    stopping, retiring = asyncio.create_task(until_told_to_stop()), asyncio.create_task(until_told_to_drain())
    loading = asyncio.create_task(asyncio.to_thread(loaded_host, settings, loaded))
    await asyncio.wait({stopping, loading}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        for process in multiprocessing.active_children():  # of a vLLM that starts
            process.kill()
        os._exit(0)  # a thread that is reading weights cannot be stopped in any other way
    host = await loading
    metrics = WorkerMetrics()
    identity = gateway_pb2.WorkerIdentity()
    chains = ChainQueue(MAX_WAITING if settings.kv_store else 0, metrics.store.put_chains_dropped.inc)
    kept = KeptAnswers(settings.keep_answers_s, int(settings.keep_answers_bytes))
    decode_peers = DecodePeers(is_open=credential is None)
    sources = SourceLinks(
        settings.kv_store,
        lambda address, kind: holder_client(settings, address, kind, credential),
        is_open=credential is None,
    )
    metrics.host_weights.set(host.facts.host_weights)
    interval_s = settings.stream_interval_ms / 1000
    state = WorkerState(identity, host.facts.layout, metrics, chains, decode_peers, kept, sources, interval_s)
    if host.profile is not None and host.profile.prefills:
        state.compute_rate.begin_with(host.profile.prefills)
    else:
        for result in await asyncio.to_thread(host.first_steps):
            state.compute_rate.observe(result)
    death: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    tap = StepTap(state.on_step)
    async with (
        host.running(tap, death.set_result) as engine,
        aclosing(sources),
    ):
        profile = host.profile
        if settings.engine == "vllm":
            profile = await calibrated_serving(
                engine,
                tap,
                host.facts,
                settings.role,
                settings.calibrate,
                settings.calibrate_s,
                settings.state_dir,
                settings.engine_args,
            )
            state.compute_rate.begin_with(profile.prefills if profile else ())
        device = _device_memory(engine.engine) if isinstance(engine, AsyncEngine) else None
        ranks = _rank_links(engine.engine, credential) if isinstance(engine, AsyncEngine) else None
        restorer = Restorer(engine, state, sources, metrics.store, codecs=LinkCodecs(state.layout))
        channels = KVChannels(
            replace(kv_links, batch_s=_CPU_BATCH_S if host.facts.device == "cpu" else 0.0),
            lambda transport: metrics.kv_fallbacks.labels(transport).inc(),
            device,
            credential=credential,
            ranks=ranks,
        )
        prefill = PrefillServicer(engine, state, metrics, channels, restorer)

        decode = DecodeServicer(engine, state, metrics, settings.lease_s, device, ranks)
        cache = CacheServicer(engine, host.facts.num_readable_blocks, state, metrics)
        services = worker_services(prefill, decode, cache)
        if ranks is not None:
            services += RankKVServicer(ranks.ranks.staged, ranks.fetches).registrations()
        access = CallAccess(credential)
        async with running_server(settings.listen, services, metrics.rpc, tracer=tracer, access=access) as server:
            own = await asyncio.to_thread(own_host, settings.listen, settings.gateway)
            address = advertised_address(
                settings.listen, server.port, settings.advertise or (own and f"{own}:{server.port}")
            )
            if ranks is not None:
                ranks.announce(address)
            identity.CopyFrom(_identity(settings, host.facts, profile, address))
            await server.set_serving()
            with metrics_endpoint(settings.listen, settings.metrics_port, metrics.registry):
                log.info("service.ready", extra={"address": address, "worker_id": identity.worker_id})
                work = Serving(
                    engine,
                    state,
                    lambda: state.load(engine, prefill.links(), restorer.holders.speeds()),
                    death,
                    credential,
                )
                if sources.own is not None:
                    work.add(store_writer(engine, state, sources, metrics).run())
                await work.until_stopped(settings.gateway, settings.drain_s, stopping, retiring)
        await prefill.close()
        decode.close()
        if ranks is not None:
            await ranks.aclose()


def holder_client(
    settings: WorkerSettings, address: str, kind: HolderKind, credential: Credential | None
) -> KVStoreClient:
    """Client of a holder of KV, limited as the settings say for links to stores or to workers."""
    if kind == "store":
        return store_client(address, settings.kv_store_mbps, credential)
    return KVStoreClient(address, b"", link_settings(settings), credential, kind)


def store_client(address: str, mbps: float | None, credential: Credential | None = None) -> KVStoreClient:
    """Client of the store at `address`, limited to `mbps` megabytes per second if given."""
    limit = LinkSettings(bytes_per_s=None if mbps is None else mbps * 1e6)
    return KVStoreClient(address, b"", limit, credential)


def store_writer(
    engine: PoolingEngine, state: WorkerState, sources: SourceLinks, metrics: WorkerMetrics
) -> StoreWriter:
    """Writer of this worker's blocks to the stores. On a GPU nothing has to wait: its steps need hardly any core."""
    longest_wait_s = LONGEST_S if state.identity.device == "cpu" else 0.0
    return StoreWriter(
        engine,
        sources,
        state.chains,
        metrics.store,
        lambda: state.compute_rate.model,
        state.router.is_running,
        longest_wait_s,
    )


def link_settings(settings: WorkerSettings) -> LinkSettings:
    """Transport settings of KV links. Raises InvalidRequest for an unknown transport or too small a window."""
    return LinkSettings(
        transports=tuple(name.strip() for name in settings.kv_transports.split(",")),
        window_bytes=int(settings.kv_window),
        stall_s=settings.kv_stall_s,
        bytes_per_s=None if settings.kv_link_mbps is None else settings.kv_link_mbps * 1e6,
        delay_s=settings.kv_link_delay_ms / 1e3,
    )


def _rank_links(engine: Engine, credential: Credential | None) -> RankLinks | None:
    """How ranks pass KV on among themselves; None where one computes alone."""
    return None if engine.ranks is None else RankLinks(engine.ranks, credential)


def _device_memory(engine: Engine) -> CudaMemory | None:
    """Gathers and scatters KV on the device; None where KV is not copied on a device."""
    config = engine.config
    is_plain = config.num_ranks == 1 and config.offload is None
    can_copy = config.device.startswith("cuda") and is_plain and config.attention_backend == "triton"
    return CudaMemory(engine.layout) if can_copy else None


def _identity(
    settings: WorkerSettings, facts: EngineFacts, profile: Profile | None, address: str
) -> gateway_pb2.WorkerIdentity:
    return gateway_pb2.WorkerIdentity(
        worker_id=f"{settings.role}-{uuid.uuid4().hex[:8]}",
        role=ROLES[settings.role],
        address=address,
        model=settings.model_name or facts.model,
        model_fingerprint=facts.fingerprint,
        layout=layout_message(facts.layout),
        context_tokens=facts.context_tokens,
        total_blocks=facts.num_blocks,
        version=halfmoon.__version__,
        device=facts.device,
        pid=os.getpid(),
        step_tokens=facts.step_tokens,
        profile=None if profile is None else _profile_message(profile),
        kv_store=settings.kv_store or "",
        kv_frame_version=frame.VERSION,
        chunk_tokens=facts.chunk_tokens,
        follows_targets=facts.follows_targets,
        nests_steps=facts.nests_steps,
        max_running=facts.max_running,
        tensor_parallel=facts.tensor_parallel,
        pipeline_parallel=facts.pipeline_parallel,
        sequence_parallel=facts.sequence_parallel,
        can_fetch=True,
        can_change_role=True,
        layer_passes=facts.layer_passes,
        adapter_fingerprints=facts.adapters,
        host=settings.host_name or socket.gethostname(),
        unit=settings.unit,
    )


def _profile_message(profile: Profile) -> gateway_pb2.LatencyProfile:
    return gateway_pb2.LatencyProfile(kind=profile.kind, prefill=profile.prefill_model, step=profile.step_model)
