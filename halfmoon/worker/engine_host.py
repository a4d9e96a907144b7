"""The engine that computes in a worker: loaded, measured, and ready to serve."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import torch

from halfmoon.engine.async_engine import AsyncEngine
from halfmoon.engine.checkpoint.adapters import read_adapters
from halfmoon.engine.checkpoint.checkpoint import prepare_checkpoint
from halfmoon.engine.checkpoint.converted import default_cache_dir, expanded
from halfmoon.engine.config import EngineConfig, HostChoiceConfig, JoinedRanks, OffloadConfig
from halfmoon.engine.device_path import check_device
from halfmoon.engine.engine import Engine
from halfmoon.engine.engine_facts import EngineFacts
from halfmoon.engine.step_result import StepResult
from halfmoon.engine.warm_up_steps import warm_up_steps
from halfmoon.errors import InvalidRequest
from halfmoon.freed_memory import keep_freed_memory
from halfmoon.policy.forecast.restore_plan import LAYER_PASSES
from halfmoon.policy.models.chunk_length import CONSTANT_CHUNKS, ChunkRule
from halfmoon.policy.offload.host_choice import Objective
from halfmoon.rpc.credentials.child_environment import child_environment
from halfmoon.rpc.credentials.credential import rank_key
from halfmoon.rpc.credentials.sources import own_credential
from halfmoon.vllm_engine.frontend.engine_arguments import VllmOptions
from halfmoon.worker.loading_progress import loading_progress
from halfmoon.worker.membership.calibration import Profile, calibrated
from halfmoon.worker.serving_engine import PoolingEngine
from halfmoon.worker.settings import WorkerSettings


class EngineHost(Protocol):
    """An engine that is ready to serve."""

    @property
    def facts(self) -> EngineFacts:
        """What others are told of it."""

    @property
    def profile(self) -> Profile | None:
        """What was measured of it, now or at an earlier start."""

    def first_steps(self) -> Sequence[StepResult]:
        """Measures a few steps."""

    def running(
        self, on_step: Callable[[StepResult], None], on_death: Callable[[BaseException], None]
    ) -> AbstractAsyncContextManager[PoolingEngine]:
        """Serves requests while inside. `on_death` is called, at most once, when it computes nothing any more."""


def load_shared(settings: WorkerSettings) -> Engine | None:
    """Loads an engine whose weights forked workers share; None where a fork is not possible once it has loaded."""
    if settings.engine == "vllm":
        return None  # it has processes of its own
    may_be_cuda = settings.device != "cpu" and torch.version.cuda is not None  # asking for devices would begin CUDA
    num_ranks = settings.tensor_parallel * settings.pipeline_parallel * settings.sequence_parallel
    is_plain = num_ranks == 1 and settings.offload_kv == "none" and not settings.offload_weights
    if may_be_cuda or not is_plain:
        return None
    keep_freed_memory()
    return _load_engine(settings, load_threads=1)


def loaded_host(settings: WorkerSettings, loaded: Engine | None) -> EngineHost:
    if settings.engine == "vllm":
        return _start_vllm(settings)
    engine = loaded or _load_engine(settings)
    profile = calibrated(engine, settings.role, settings.calibrate, settings.calibrate_s, settings.state_dir)
    return OwnHost(engine, profile)


class OwnHost:
    """Our own engine."""

    def __init__(self, engine: Engine, profile: Profile | None) -> None:
        config = engine.config
        self._engine = engine
        self.profile = profile
        rule = CONSTANT_CHUNKS
        if profile is not None and config.chunk_tokens is None:
            rule = ChunkRule(profile.prefill_model, profile.step_model)
        engine.follow_targets(rule)
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
            follows_targets=rule.is_known,
            nests_steps=engine.can_be_interrupted,
            max_running=config.max_running,
            device=config.device,
            tensor_parallel=config.tensor_parallel,
            pipeline_parallel=config.pipeline_parallel,
            sequence_parallel=config.sequence_parallel,
            host_weights=config.host_weights,
        )

    def first_steps(self) -> Sequence[StepResult]:
        """See `EngineHost.first_steps`."""
        return warm_up_steps(self._engine)

    def running(self, on_step: Callable[[StepResult], None], on_death: Callable[[BaseException], None]) -> AsyncEngine:
        """See `EngineHost.running`."""
        return AsyncEngine(self._engine, on_step, on_death)


def _load_engine(settings: WorkerSettings, load_threads: int | None = None) -> Engine:
    if settings.lora:
        raise InvalidRequest(
            "lora: our own engine computes no adapters; start its worker with --engine vllm", param="lora"
        )
    device = _device(settings.device)
    checkpoint = prepare_checkpoint(settings.model, quantization=settings.quantization)
    config = EngineConfig(
        device=device,
        dtype=settings.dtype,
        kv_dtype=settings.kv_dtype,
        speculation=settings.speculation,
        weights=settings.weights,
        prepared_weights=_prepared_weights(settings.prepared_weights),
        block_tokens=settings.block_tokens,
        kv_memory_bytes=None if settings.kv_memory is None else int(settings.kv_memory),
        paused_bytes=None if settings.paused_memory is None else int(settings.paused_memory),
        host_workers=settings.host_workers,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        max_batch_tokens=settings.max_batch_tokens,
        chunk_tokens=settings.chunk_tokens,
        max_running=settings.max_running,
        max_context_tokens=settings.max_context_tokens,
        attention=settings.attention,
        mixed_attention=settings.mixed_attention,
        offload=offload_config(settings),
        host_weights=0.0 if settings.offload_weights == "auto" else settings.offload_weights,
        host_choice=host_choice_config(settings),
        cuda_graphs=settings.cuda_graphs,
        num_threads=settings.num_threads,
        load_threads=load_threads,
        tensor_parallel=settings.tensor_parallel,
        pipeline_parallel=settings.pipeline_parallel,
        sequence_parallel=settings.sequence_parallel,
        long_prompt_tokens=settings.long_prompt_tokens,
        joined=_joined_ranks(settings),
    )
    with loading_progress(f"{settings.role}: weights") as on_progress:
        return Engine(checkpoint, config, on_progress)


def _prepared_weights(setting: str) -> Path | None:
    if setting == "off":
        return None
    return default_cache_dir() / "prepared" if setting == "auto" else expanded(setting, "prepared_weights")


def _joined_ranks(settings: WorkerSettings) -> JoinedRanks | None:
    """Raises InvalidRequest where strangers could join."""
    if not settings.remote_ranks:
        return None
    if settings.rank_listen is None:
        raise InvalidRequest("remote_ranks join at HOST:PORT of this host: give --rank-listen", param="rank_listen")
    return JoinedRanks(settings.remote_ranks, settings.rank_listen, rank_key(own_credential("worker")))


def offload_config(settings: WorkerSettings) -> OffloadConfig | None:
    """KV on the host; None: there is none."""
    if settings.offload_kv == "none":
        return None
    schedule = settings.offload_schedule
    if schedule == "auto":
        schedule = "throughput" if settings.offload_weights else "latency"
    return OffloadConfig(int(settings.offload_bytes), schedule, settings.offload_recompute)


def host_choice_config(settings: WorkerSettings) -> HostChoiceConfig | None:
    """What is chosen at start of weights and KV on the host; None: nothing. Raises InvalidRequest."""
    weights, kv = settings.offload_weights == "auto", settings.offload_kv == "auto"
    if not weights and not kv:
        if settings.device_memory is not None:
            raise InvalidRequest(
                "device_memory is for offload_weights: auto and offload_kv: auto to divide; else give kv_memory",
                param="device_memory",
            )
        return None
    objective: Objective = "latency" if settings.offload_schedule == "latency" else "throughput"
    device_bytes = None if settings.device_memory is None else int(settings.device_memory)
    return HostChoiceConfig(weights, kv, objective, device_bytes)


def _device(requested: str) -> str:
    """Resolves `auto` to a GPU if there is one. Raises Incompatible if a GPU is requested and none is found."""
    if requested == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    check_device(requested)
    return requested


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
    if settings.remote_ranks:
        raise InvalidRequest(
            "--remote-ranks is of our own engine: vLLM places its ranks itself, by Ray", param="remote_ranks"
        )
    if settings.sequence_parallel > 1:
        raise InvalidRequest(
            "--sequence-parallel is of our own engine; give vLLM's own context parallelism by --engine-args, or "
            "--tensor-parallel",
            param="sequence_parallel",
        )
    if settings.offload_weights:
        raise InvalidRequest(
            "--offload-weights is of our own engine; give vLLM its own, such as --engine-args '--cpu-offload-gb 8'",
            param="offload_weights",
        )
    if settings.speculation != "off":
        raise InvalidRequest(
            "--speculation is of our own engine; a worker with vLLM guesses no tokens", param="speculation"
        )
    for name in os.environ.keys() - child_environment(os.environ, "vllm").keys():
        del os.environ[name]
    checkpoint = prepare_checkpoint(settings.model, for_any_engine=True, as_numbers=True)
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
