"""Latency from AIConfigurator: kernel times that NVIDIA measured for each device and engine, summed over a model's
layers.

The times cover kernels and exchanges only, without launches, host work and sampling. They come from a package that is
not installed by default: https://pypi.org/project/aiconfigurator-core (Apache-2.0; Linux on x86-64).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from halfmoon.architectures.weight_format import BFLOAT16
from halfmoon.errors import Incompatible, InvalidRequest
from halfmoon.policy.models.latency import StepSample
from halfmoon.sim.latency_sources.hardware import Device, device
from halfmoon.sim.latency_sources.interpolation import PromptsSample, prefill_pieces, step_pieces
from halfmoon.sim.latency_sources.latency_model import FitError, LatencyModel
from halfmoon.sim.latency_sources.model_shape import ModelShape
from halfmoon.sim.latency_sources.roofline import Efficiency

BACKENDS = ("trtllm", "vllm", "sglang")  # engines with measured kernels; the first is the package's default
SYSTEMS: Mapping[str, str] = MappingProxyType(
    {"a100-80g": "a100_sxm", "h100": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "l40s": "l40s"}
)
"""The package's names for the devices of our catalogue."""

_ROOM = Efficiency()  # the memory share and the largest step, as for the roofline
_PROMPTS = (1, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
_CONTEXTS = (256, 1024, 4096, 16384)  # of each sequence
_CHECK_PROMPTS = ((48, 0), (192, 0), (768, 0), (1536, 0), (3072, 0), (6144, 0), (12288, 0), (512, 4096), (2048, 8192))
_CHECK_BATCHES = (3, 6, 12, 24, 48, 96, 192)
_CHECK_CONTEXTS = (512, 2048, 8192)


class Engine(Protocol):
    """The methods used of the package's compiled model. Milliseconds, through all pipeline stages."""

    def predict_prefill_latency(self, bs: int, isl: int, prefix: int = 0) -> float:
        """Time of `bs` prompts of `isl` tokens, `prefix` of which are cached."""

    def predict_decode_latency(self, bs: int, isl: int, osl: int = 2) -> float:
        """Time of the decode step after `bs` prompts of `isl` tokens."""


class Compiled(NamedTuple):
    """A model on one worker's devices."""

    engine: Engine
    kv_tokens: int  # KV capacity beside the weights


@dataclass(frozen=True, slots=True)
class KernelTimes:
    """A model of known shape, computed with one engine's kernels."""

    shape: ModelShape
    backend: str = BACKENDS[0]
    default_gpu: str | None = None

    def model(self, gpu: str | None, tensor_parallel: int, pipeline_parallel: int) -> LatencyModel:
        """A latency model with the package's KV capacity. The first call reads tables, which takes seconds.

        Raises InvalidRequest if the package is not installed, if it has no times for the hardware, shape or
        parallelism, or if the weights leave no room for KV.
        """
        name = gpu or self.default_gpu
        if name is None or device(name).name not in SYSTEMS:
            raise InvalidRequest(f"aiconfigurator has times of {', '.join(SYSTEMS)}, not of {name}", param="gpu")
        on = device(name)
        try:
            self.shape.check(tensor_parallel, pipeline_parallel)
        except Incompatible as error:
            raise InvalidRequest(f"{self.shape.name}: {error.message}", param="tensor_parallel") from error
        try:
            compiled = _compiled(self.shape, on, self.backend, tensor_parallel, pipeline_parallel)
            return sampled(compiled, self, on, tensor_parallel, pipeline_parallel)
        except (ValueError, LookupError, RuntimeError) as error:  # the package's own errors are among these
            raise InvalidRequest(
                f"aiconfigurator has no answer for {self.shape.name} on {on.name} with {self.backend}, "
                f"TP{tensor_parallel} x PP{pipeline_parallel}: {error}",
                param="latency",
            ) from error


def sampled(compiled: Compiled, of: KernelTimes, on: Device, tensor: int, pipeline: int) -> LatencyModel:
    """Interpolates the package's answers on a grid. The error is measured at points between those of the grid."""
    engine, kv_tokens = compiled
    prefill, prefill_error = prefill_pieces(
        _prompts(engine, ((new, 0) for new in _PROMPTS), pipeline), _prompts(engine, _CHECK_PROMPTS, pipeline)
    )
    step, step_error = step_pieces(
        _steps(engine, _BATCHES, _CONTEXTS, kv_tokens, pipeline),
        _steps(engine, _CHECK_BATCHES, _CHECK_CONTEXTS, kv_tokens, pipeline),
    )
    return LatencyModel(
        prefill,
        step,
        kv_tokens,
        of.shape.kv_bytes_per_token,
        source=f"aiconfigurator's times of {of.shape.name} on {on.name} with {of.backend}, TP{tensor} x PP{pipeline}",
        error=FitError(prefill_error, step_error),
        num_stages=pipeline,
        num_devices=tensor * pipeline,
        fills_stages=True,
    )


def _prompts(engine: Engine, sizes: Iterable[tuple[int, int]], stages: int) -> list[PromptsSample]:
    """One stage's seconds for single prompts, given as (new tokens, cached tokens)."""
    return [
        PromptsSample(
            new,
            new * (cached + new / 2),
            engine.predict_prefill_latency(1, cached + new, cached) / 1000 / stages,
        )
        for new, cached in sizes
    ]


def _steps(
    engine: Engine, batches: Iterable[int], contexts: Iterable[int], kv_tokens: int, stages: int
) -> list[StepSample]:
    """One stage's seconds for decode steps whose KV fits, and for single sequences."""
    sizes = [
        (batch, context_tokens)
        for batch in batches
        for context_tokens in contexts
        if batch * context_tokens <= kv_tokens or context_tokens == min(contexts)
    ]
    return [
        StepSample(batch, batch * one, engine.predict_decode_latency(batch, one) / 1000 / stages)
        for batch, one in sizes
    ]


def _compiled(shape: ModelShape, on: Device, backend: str, tensor: int, pipeline: int) -> Compiled:
    """Compiles a model. The package reads nothing but the shape from its config.json."""
    try:
        sdk = import_module("aiconfigurator_core.sdk")
    except ImportError as error:
        raise InvalidRequest(
            "these latencies need NVIDIA's package: pip install 'halfmoon[aiconfigurator]'", param="latency"
        ) from error
    logging.getLogger("aiconfigurator_core").setLevel(
        logging.ERROR
    )  # it warns about tables that dense models never use
    with TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(llama_config(shape)))
        kind = directory, SYSTEMS[on.name], backend
        capacity = sdk.estimate_kv_cache(
            *kind,
            backend_version="current",
            max_num_tokens=_ROOM.batch_tokens,
            max_batch_size=max(_BATCHES),
            memory_fraction_kind="of_free" if backend == "trtllm" else "of_total",
            memory_fraction_value=_ROOM.kv_memory,
            tp_size=tensor,
            pp_size=pipeline,
        )
        engine: Engine = sdk.EngineHandle.compile(*kind, backend_version="current", tp_size=tensor, pp_size=pipeline)
    # its bytes per token cover all layers, whatever their stage
    return Compiled(engine, int(capacity["total_kv_size_bytes"] // shape.device_kv_bytes_per_token(tensor, pipeline)))


def llama_config(shape: ModelShape) -> dict[str, Any]:
    """The config.json of a Llama of this shape. Qwen's extras (biases, head norms) take negligible time.

    Raises InvalidRequest for models with ungated MLPs, and for what differs from Llama in more than its size.
    """
    special = {
        "a mixture of experts": shape.experts is not None,
        "attention over latents": shape.latent is not None,
        "windows": bool(shape.windows),
        f"weights in {shape.weights.name}": shape.weights != BFLOAT16,
    }
    if any(special.values()):
        raise InvalidRequest(
            f"{shape.name} has {' and '.join(what for what, has in special.items() if has)}, for which its times are "
            f"not asked here: plan with the roofline (roofline:{shape.name})",
            param="latency",
        )
    if shape.mlp_matrices != 3:
        raise InvalidRequest(f"aiconfigurator knows no models like {shape.name}, without gates", param="model")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context_tokens or max(_PROMPTS),
        "tie_word_embeddings": shape.tied_embeddings,
        "torch_dtype": "bfloat16",
    }
