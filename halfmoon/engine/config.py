"""Configuration of an engine: plain values, no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Literal

from halfmoon import host_limits
from halfmoon.errors import Incompatible
from halfmoon.kv.kv_layout import FloatDtype, KVDtype
from halfmoon.policy.offload.host_choice import Objective

OffloadSchedule = Literal["latency", "throughput"]
OffloadOverlap = Literal["layers", "layer", "none"]
Kernels = Literal["torch", "native", "triton"]  # implementation of everything between matrix products

_LEAST: Mapping[str, int] = MappingProxyType(
    {
        "block_tokens": 1,
        "kv_memory_bytes": 1,
        "host_workers": 1,
        "num_blocks": 1,
        "paused_bytes": 0,
        "max_batch_tokens": 1,
        "chunk_tokens": 1,
        "max_running": 1,
        "num_threads": 1,
        "load_threads": 1,
        "max_context_tokens": 1,
        "tensor_parallel": 1,
        "pipeline_parallel": 1,
        "sequence_parallel": 1,
        "long_prompt_tokens": 1,
    }
)
_PARAMS: Mapping[str, str] = MappingProxyType({"kv_memory_bytes": "kv_memory", "paused_bytes": "paused_memory"})


@dataclass(frozen=True, slots=True)
class OffloadConfig:
    """Keeps KV that does not fit in the device's KV memory on the host and brings it in layer by layer (`offload/`)."""

    host_bytes: int  # of all ranks, which divide it evenly
    schedule: OffloadSchedule = "latency"
    # auto: computed again instead of loaded where the measured rates say that it pays; always: K and V of what is
    # computed here, from inputs. Never with several ranks, each of which would choose by its own rates
    recompute: Literal["auto", "never", "always"] = "auto"
    # what a fetch runs beside. layers: two buffers, one fills while the layer before it computes; layer: one buffer, it
    # fills beside its own layer's computing from inputs; none: beside nothing. The last two for comparisons
    overlap: OffloadOverlap = "layers"


@dataclass(frozen=True, slots=True)
class HostChoiceConfig:
    """Chooses at start, by measured rates, what of weights and KV is on the host (`offload/host_choice.py`)."""

    weights: bool  # the share of layers whose weights are there; False: `EngineConfig.host_weights`
    kv: bool  # whether KV is there at all; False: if and only if `EngineConfig.offload` says so
    objective: Objective = "throughput"
    device_bytes: int | None = None  # for weights and KV; None, on a GPU only: `gpu_memory_utilization` of it


@dataclass(frozen=True, slots=True)
class JoinedRanks:
    """The last ranks of a worker, which run on other hosts and join it (`parallel/joined_ranks.py`)."""

    count: int
    listen: str  # HOST:PORT of this host
    key: bytes = field(repr=False)  # whoever knows it is one of us

    def __post_init__(self) -> None:
        host, _, port = self.listen.rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise Incompatible(
                f"engine: ranks join at HOST:PORT of this host, not at {self.listen!r}", param="rank_listen"
            )


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one worker computes. `dtype` "auto" is bfloat16 where the CPU multiplies it natively, else float32."""

    device: str = "cpu"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_dtype: Literal["auto", "int8", "fp8"] = "auto"  # of KV in memory; auto: `dtype`
    block_tokens: int = 64
    kv_memory_bytes: int | None = None  # per rank; on a CPU, of all ranks of a host; None: `kv_memory/kv_budget.py`
    host_workers: int = 1  # that start on this host at once: they divide its free memory, where a size is None
    gpu_memory_utilization: float = 0.9  # the share of a GPU for weights, KV and steps, if kv_memory_bytes is None
    num_blocks: int | None = None  # overrides kv_memory_bytes
    paused_bytes: int | None = None  # host memory for KV of paused answers; None: `kv_memory/kv_budget.py`; 0: none
    max_batch_tokens: int | None = None  # per step; None: 512 on a CPU, which that keeps busy, else 2048
    chunk_tokens: int | None = None  # prefill tokens in a step that also decodes; None: 128 on a CPU, else 512
    max_running: int = 64
    num_threads: int | None = None  # None: torch's own choice, which an engine of this process leaves at one
    load_threads: int | None = None  # while loading; 1 leaves no thread behind, so that the process may fork
    max_context_tokens: int | None = None  # None: the model's
    weights: Literal["checkpoint", "dummy"] = "checkpoint"
    prepared_weights: Path | None = None  # directory of packed weights that workers of a host share; None: not kept
    prefix_cache: bool = True
    # triton: attention, layers and copies by our kernels; native: attention and layers, on a CPU; sdpa, flex: by torch
    attention: Literal["auto", "sdpa", "native", "triton", "flex"] = "auto"
    mixed_attention: Literal["auto", "fused", "apart"] = "auto"  # triton's kernels of a step with decodes and prompts
    speculation: Literal["off", "ngram"] = "off"  # ngram: decodes run tokens that the text so far suggests
    cuda_graphs: bool = True  # decode steps are captured at start when triton computes on a CUDA device
    tensor_parallel: int = 1  # ranks that share every layer; with more than one rank, num_threads is per rank
    pipeline_parallel: int = 1  # stages that divide the layers
    sequence_parallel: int = 1  # ranks with the whole model that share the tokens of long prompts; not with the others
    long_prompt_tokens: int = 4096  # more than these are computed by all sequence ranks, fewer by one
    joined: JoinedRanks | None = None  # None: all ranks are on this host
    offload: OffloadConfig | None = None  # None: all KV is on the device
    host_weights: float = 0.0  # share of the layers whose weights are on the host and come in layer by layer
    host_choice: HostChoiceConfig | None = None  # None: `offload` and `host_weights` hold
    link_bytes_per_s: float | None = None  # throttles what comes from the host to this rate, for experiments on a CPU

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise Incompatible(
                    f"engine: {name} must be at least {least}, got {value}", param=_PARAMS.get(name, name)
                )
        for name in ("num_threads", "load_threads"):
            value = getattr(self, name)
            if value is not None and value > host_limits.MOST_THREADS:
                raise Incompatible(
                    f"engine: {name} must be at most {host_limits.MOST_THREADS}, got {value}", param=name
                )
        if self.link_bytes_per_s is not None and not self.link_bytes_per_s > 0:
            raise Incompatible(
                f"engine: link_bytes_per_s must be positive, got {self.link_bytes_per_s}", param="link_bytes_per_s"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise Incompatible(
                f"engine: gpu_memory_utilization must be above 0 and at most 1, got {self.gpu_memory_utilization}",
                param="gpu_memory_utilization",
            )
        if not 0 <= self.host_weights <= 1:
            raise Incompatible(
                f"engine: the weights on the host are a share of the layers, from 0 to 1, not {self.host_weights}",
                param="offload_weights",
            )
        if self.host_choice is not None:
            self._check_host_choice(self.host_choice)
        if self.offload is not None and self.num_ranks > self.tensor_parallel:
            raise Incompatible(
                "engine: KV on the host is not for stages of layers, or ranks that share tokens: leave out "
                "--offload-kv, or --pipeline-parallel and --sequence-parallel",
                param="offload",
            )
        if self.offload is not None and self.offload.recompute == "always" and self.num_ranks > 1:
            raise Incompatible(
                "engine: several ranks load all KV from the host, each its heads: leave out --offload-recompute always "
                "or --tensor-parallel",
                param="offload_recompute",
            )
        if self.sequence_parallel > 1 and self.num_ranks > self.sequence_parallel:
            raise Incompatible(
                "engine: sequence ranks have the whole model each: leave out --sequence-parallel, or --tensor-parallel "
                "and --pipeline-parallel",
                param="sequence_parallel",
            )
        if self.joined is not None and not 0 < self.joined.count < self.num_ranks:
            raise Incompatible(
                f"engine: of {self.num_ranks} ranks (tensor, pipeline and sequence parallel), {self.joined.count} "
                "cannot be on other hosts: one at least is here",
                param="remote_ranks",
            )
        if self.offload is not None and self.kv_dtype != "auto":
            raise Incompatible(
                "engine: KV on the host is kept in the model's dtype: leave out --offload-kv or --kv-dtype",
                param="kv_dtype",
            )
        if self.speculation != "off" and (self.device != "cpu" or self.offload is not None):
            raise Incompatible(
                "engine: guessed tokens are computed on a CPU, where they have the bits of others, and with all KV in "
                "its memory: leave out --speculation, or --offload-kv",
                param="speculation",
            )
        if self.step_tokens <= self.max_running:
            raise Incompatible(
                f"engine: max_batch_tokens ({self.step_tokens}) must exceed max_running ({self.max_running})",
                param="max_batch_tokens",
            )

    def _check_host_choice(self, wish: HostChoiceConfig) -> None:
        param = "offload_weights" if wish.weights else "offload_kv"
        problem = None
        if self.num_ranks > 1:
            problem = "rates are measured on one device: with several ranks, name offload_kv and the share of weights"
        elif self.kv_memory_bytes is not None or self.num_blocks is not None:
            problem = "the memory is divided between weights and KV: give device_memory instead of kv_memory"
        elif wish.device_bytes is None and self.device == "cpu":
            problem = "on a CPU, device_memory has to say how much memory weights and KV may take"
        if problem is not None:
            raise Incompatible(f"engine: {param}: auto: {problem}", param=param)

    @property
    def step_tokens(self) -> int:
        """`max_batch_tokens`, resolved. A batch beyond what keeps the device busy only makes the first prompt wait."""
        return self.max_batch_tokens or (512 if self.device == "cpu" else 2048) * self.sequence_parallel

    @property
    def prefill_chunk_tokens(self) -> int:
        """`chunk_tokens`, resolved: it bounds the stall that a running request feels with each chunk."""
        return self.chunk_tokens or (128 if self.device == "cpu" else 512)

    def layout_dtype(self, dtype: FloatDtype) -> KVDtype:
        """The dtype of KV in memory where the model computes in `dtype`."""
        return dtype if self.kv_dtype == "auto" else self.kv_dtype

    @property
    def num_ranks(self) -> int:
        """Number of processes that compute."""
        return self.tensor_parallel * self.pipeline_parallel * self.sequence_parallel

    @property
    def num_ranks_here(self) -> int:
        """Number of these processes on this host."""
        return self.num_ranks - (0 if self.joined is None else self.joined.count)

    @property
    def shares_cores(self) -> bool:
        """Whether this host's workers, or their threads if all have as many as this one, exceed its cores."""
        if self.host_workers == 1 or self.device != "cpu":
            return False
        threads = host_limits.num_threads() if self.num_threads is None else self.num_threads * self.num_ranks_here
        cores = host_limits.num_cores()
        return self.host_workers > cores or threads > math.ceil(cores / self.host_workers)

    @property
    def attention_backend(self) -> Literal["sdpa", "native", "triton", "flex"]:
        """`attention`, resolved: native on a CPU; triton with a CUDA device and the package installed."""
        if self.attention != "auto":
            return self.attention
        if self.device == "cpu":
            return "native"
        return "triton" if self.device.startswith("cuda") and find_spec("triton") is not None else "sdpa"
