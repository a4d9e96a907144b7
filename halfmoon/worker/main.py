"""The life of a worker: load the model, serve, register, drain, stop."""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Protocol

import torch

import halfmoon
from halfmoon.engine.async_engine import AsyncEngine
from halfmoon.engine.checkpoint.adapters import read_adapters
from halfmoon.engine.checkpoint.checkpoint import prepare_checkpoint
from halfmoon.engine.config import EngineConfig, OffloadConfig
from halfmoon.engine.engine import Engine
from halfmoon.engine.engine_facts import EngineFacts
from halfmoon.engine.kv_memory.cuda_memory import CudaMemory
from halfmoon.engine.step_result import StepResult
from halfmoon.engine.warm_up_steps import warm_up_steps
from halfmoon.errors import InvalidRequest
from halfmoon.kv import frame
from halfmoon.pb import gateway_pb2
from halfmoon.policy.forecast.restore_plan import LAYER_PASSES
from halfmoon.rpc.credentials.access import CallAccess
from halfmoon.rpc.credentials.child_environment import child_environment
from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.credentials.listeners import check_listener
from halfmoon.rpc.credentials.sources import own_credential
from halfmoon.rpc.layout_message import layout_message
from halfmoon.rpc.server import advertised_address, running_server, until_told_to_drain, until_told_to_stop
from halfmoon.rpc.service import metrics_endpoint
from halfmoon.rpc.store.kvstore_client import KVStoreClient
from halfmoon.rpc.telemetry.spans import Tracer
from halfmoon.rpc.telemetry.tracing import tracing
from halfmoon.rpc.transport.freed_memory import keep_freed_memory
from halfmoon.rpc.transport.link import LinkSettings
from halfmoon.vllm_engine.frontend.engine_arguments import VllmOptions
from halfmoon.worker.cache_servicer import CacheServicer
from halfmoon.worker.decode_servicer import DecodeServicer
from halfmoon.worker.kept_answers import KeptAnswers
from halfmoon.worker.kv_channels import KVChannels
from halfmoon.worker.link_codecs import LinkCodecs
from halfmoon.worker.loading_progress import loading_progress
from halfmoon.worker.membership.calibration import Profile, calibrated
from halfmoon.worker.membership.decode_peers import DecodePeers
from halfmoon.worker.membership.serving_calibration import StepTap, calibrated_serving
from halfmoon.worker.metrics import WorkerMetrics
from halfmoon.worker.prefill_servicer import PrefillServicer
from halfmoon.worker.serving import ROLES, Serving, worker_services
from halfmoon.worker.serving_engine import PoolingEngine
from halfmoon.worker.settings import WorkerSettings
from halfmoon.worker.state import WorkerState
from halfmoon.worker.store.chain_queue import MAX_WAITING, ChainQueue
from halfmoon.worker.store.restorer import Restorer
from halfmoon.worker.store.source_links import HolderKind, SourceLinks
from halfmoon.worker.store.store_writer import StoreWriter

log = logging.getLogger(__name__)


def load_shared(settings: WorkerSettings) -> Engine | None:
    """Loads an engine whose weights forked workers share; None where a fork is not possible once it has loaded."""
    if settings.engine == "vllm":
        return None  # it has processes of its own
    may_be_cuda = settings.device != "cpu" and torch.version.cuda is not None  # asking for devices would begin CUDA
    is_plain = settings.tensor_parallel == settings.pipeline_parallel == 1 and settings.offload_kv == "none"
    if may_be_cuda or not is_plain:
        return None
    keep_freed_memory()
    return _load_engine(settings, load_threads=1)


async def serve(settings: WorkerSettings, loaded: Engine | None) -> None:
    """Runs one worker until told to stop."""
    with tracing(settings.role, settings.otlp_endpoint) as tracer:
        await _serve(settings, loaded, tracer)


async def _serve(settings: WorkerSettings, loaded: Engine | None, tracer: Tracer) -> None:
    kv_links, credential = link_settings(settings), own_credential("worker")
    check_listener(settings.listen, credential)  # before the weights are loaded
    keep_freed_memory()
    stopping, retiring = asyncio.create_task(until_told_to_stop()), asyncio.create_task(until_told_to_drain())
    loading = asyncio.create_task(asyncio.to_thread(_loaded_host, settings, loaded))
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
    state = WorkerState(identity, host.facts.layout, metrics, chains, decode_peers, kept, sources)
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
        restorer = Restorer(engine, state, sources, metrics.store, codecs=LinkCodecs(state.layout))
        channels = KVChannels(
            kv_links, lambda transport: metrics.kv_fallbacks.labels(transport).inc(), device, credential=credential
        )
        prefill = PrefillServicer(engine, state, metrics, channels, restorer)

        decode = DecodeServicer(engine, state, metrics, settings.lease_s, device)
        cache = CacheServicer(engine, host.facts.num_readable_blocks, state, metrics)
        services = worker_services(prefill, decode, cache)
        access = CallAccess(credential)
        async with running_server(settings.listen, services, metrics.rpc, tracer=tracer, access=access) as server:
            address = advertised_address(settings.listen, server.port, settings.advertise)
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
    """Writer of this worker's blocks to the stores."""
    return StoreWriter(engine, sources, state.chains, metrics.store, lambda: state.compute_rate.model)


class EngineHost(Protocol):
    """An engine that is ready to serve."""

    @property
    def facts(self) -> EngineFacts:
        """What others are told of it."""
        ...

    @property
    def profile(self) -> Profile | None:
        """What was measured of it, now or at an earlier start."""
        ...

    def first_steps(self) -> Sequence[StepResult]:
        """Measures a few steps."""
        ...

    def running(
        self, on_step: Callable[[StepResult], None], on_death: Callable[[BaseException], None]
    ) -> AbstractAsyncContextManager[PoolingEngine]:
        """Serves requests while inside. `on_death` is called, at most once, when it computes nothing any more."""
        ...


class OwnHost:
    """Our own engine."""

    def __init__(self, engine: Engine, profile: Profile | None) -> None:
        config = engine.config
        self._engine = engine
        self.profile = profile
        self.facts = EngineFacts(
            model=engine.checkpoint.name,
            fingerprint=engine.checkpoint.fingerprint,
            layout=engine.layout,
            layer_passes=min(LAYER_PASSES, engine.layout.num_layers) if engine.loads_by_layer else 0,
            context_tokens=engine.context_tokens,
            num_blocks=engine.stats().num_blocks,
            num_readable_blocks=engine.stats().num_blocks,
            step_tokens=config.step_tokens,
            chunk_tokens=config.prefill_chunk_tokens,
            max_running=config.max_running,
            device=config.device,
            tensor_parallel=config.tensor_parallel,
            pipeline_parallel=config.pipeline_parallel,
        )

    def first_steps(self) -> Sequence[StepResult]:
        """See `EngineHost.first_steps`."""
        return warm_up_steps(self._engine)

    def running(self, on_step: Callable[[StepResult], None], on_death: Callable[[BaseException], None]) -> AsyncEngine:
        """See `EngineHost.running`."""
        return AsyncEngine(self._engine, on_step, on_death)


def _loaded_host(settings: WorkerSettings, loaded: Engine | None) -> EngineHost:
    if settings.engine == "vllm":
        return _start_vllm(settings)
    engine = loaded or _load_engine(settings)
    profile = calibrated(engine, settings.role, settings.calibrate, settings.calibrate_s, settings.state_dir)
    return OwnHost(engine, profile)


def _start_vllm(settings: WorkerSettings) -> EngineHost:
    """Starts vLLM, whose processes get none of this one's secrets."""
    from halfmoon.vllm_engine.host import VllmHost

    if settings.quantization in ("int8", "int4"):
        raise InvalidRequest(
            f"--quantization {settings.quantization} is of our own engine; give vLLM its own, such as "
            "--engine-args '--quantization fp8'",
            param="quantization",
        )
    if settings.kv_dtype != "auto":
        raise InvalidRequest(
            f"--kv-dtype {settings.kv_dtype} is of our own engine: KV that vLLM rounds cannot be handed over; leave it "
            "out, or let the worker have --engine halfmoon",
            param="kv_dtype",
        )
    if settings.speculation != "off":
        raise InvalidRequest(
            "--speculation is of our own engine; give vLLM its own by --engine-args", param="speculation"
        )
    for name in os.environ.keys() - child_environment(os.environ, "vllm").keys():
        del os.environ[name]
    checkpoint = prepare_checkpoint(settings.model, for_any_engine=True)
    options = VllmOptions(
        model=str(checkpoint.path),
        dtype=settings.dtype,
        block_tokens=settings.block_tokens,
        max_context_tokens=settings.max_context_tokens,
        max_running=settings.max_running,
        max_batch_tokens=settings.max_batch_tokens,
        tensor_parallel=settings.tensor_parallel,
        pipeline_parallel=settings.pipeline_parallel,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        kv_memory_bytes=None if settings.kv_memory is None else int(settings.kv_memory),
        has_dummy_weights=settings.weights == "dummy",
        engine_args=settings.engine_args,
        adapters=read_adapters(settings.lora),
    )
    return VllmHost(checkpoint, options, int(settings.staging_memory))


def _load_engine(settings: WorkerSettings, load_threads: int | None = None) -> Engine:
    if settings.lora:
        raise InvalidRequest(
            "lora: our own engine computes no adapters; start its worker with --engine vllm", param="lora"
        )
    checkpoint = prepare_checkpoint(settings.model, quantization=settings.quantization)
    config = EngineConfig(
        device=_device(settings.device),
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        speculation=settings.speculation,
        weights=settings.weights,
        block_tokens=settings.block_tokens,
        kv_memory_bytes=None if settings.kv_memory is None else int(settings.kv_memory),
        gpu_memory_utilization=settings.gpu_memory_utilization,
        max_batch_tokens=settings.max_batch_tokens,
        chunk_tokens=settings.chunk_tokens,
        max_running=settings.max_running,
        max_context_tokens=settings.max_context_tokens,
        attention=settings.attention,
        offload=_offload(settings),
        cuda_graphs=settings.cuda_graphs,
        num_threads=settings.num_threads,
        load_threads=load_threads,
        tensor_parallel=settings.tensor_parallel,
        pipeline_parallel=settings.pipeline_parallel,
    )
    with loading_progress(f"{settings.role}: weights") as on_progress:
        return Engine(checkpoint, config, on_progress)


def _offload(settings: WorkerSettings) -> OffloadConfig | None:
    if settings.offload_kv == "none":
        return None
    return OffloadConfig(host_bytes=int(settings.offload_bytes), schedule=settings.offload_schedule)


def link_settings(settings: WorkerSettings) -> LinkSettings:
    """Transport settings of KV links. Raises InvalidRequest for an unknown transport or too small a window."""
    return LinkSettings(
        transports=tuple(name.strip() for name in settings.kv_transports.split(",")),
        window_bytes=int(settings.kv_window),
        stall_s=settings.kv_stall_s,
        bytes_per_s=None if settings.kv_link_mbps is None else settings.kv_link_mbps * 1e6,
        delay_s=settings.kv_link_delay_ms / 1e3,
    )


def _device(requested: str) -> str:
    """Resolves `auto` to a GPU if there is one. Raises InvalidRequest if a GPU is requested and none is found."""
    has_cuda = torch.cuda.is_available()
    if requested == "cuda" and not has_cuda:
        raise InvalidRequest("--device cuda: PyTorch sees no CUDA device here; use --device cpu", param="device")
    return "cuda" if has_cuda and requested != "cpu" else "cpu"


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
        max_running=facts.max_running,
        tensor_parallel=facts.tensor_parallel,
        pipeline_parallel=facts.pipeline_parallel,
        can_fetch=True,
        layer_passes=facts.layer_passes,
        adapter_fingerprints=facts.adapters,
    )


def _profile_message(profile: Profile) -> gateway_pb2.LatencyProfile:
    return gateway_pb2.LatencyProfile(kind=profile.kind, prefill=profile.prefill_model, step=profile.step_model)
