"""What an engine computes with: model, KV memory and runner, on one device, with host memory, or over several ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from halfmoon import host_limits
from halfmoon.architectures.model_config import ModelConfig
from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.constraint import TokenMasks
from halfmoon.engine.device_path import (
    DevicePath,
    capture_decode,
    choose_path,
    compile_ahead,
    keeps_blocks,
    pack,
    weights_place,
)
from halfmoon.engine.kv_memory.kv_access import KVMemory
from halfmoon.engine.kv_memory.kv_arena import TORCH_DTYPES, KVArena
from halfmoon.engine.kv_memory.kv_budget import blocks_in, kv_budget_bytes, num_positions
from halfmoon.engine.model_runner import ModelRunner
from halfmoon.engine.models import Model, build_model
from halfmoon.engine.models.linear import alike
from halfmoon.engine.models.model_part import whole_model
from halfmoon.engine.models.weights import Progress, fill_dummy_weights, load_block_shapes, load_weights
from halfmoon.engine.native.prepared_model import ModelSteps, ready_model
from halfmoon.engine.offload.build import Offload
from halfmoon.engine.offload.host_choice import with_host_choice
from halfmoon.engine.offload.link import Throttle
from halfmoon.engine.offload.runner import OffloadRunner
from halfmoon.engine.offload.weights import WeightStream, layers_on_host, weight_stream
from halfmoon.engine.parallel.runner import ParallelRunner
from halfmoon.kv.kv_layout import FloatDtype, KVLayout


class Assembled(NamedTuple):
    """The runner of the steps, the memory of the KV, and the weights that are on the host, if some are."""

    runner: ModelRunner | OffloadRunner | ParallelRunner
    memory: KVMemory
    weights: WeightStream | None = None


def kv_layout(model: ModelConfig, config: EngineConfig) -> KVLayout:
    """The layout of a model's KV, with `config`'s dtypes resolved for its device."""
    dtype = config.layout_dtype(_resolve_dtype(config))
    return KVLayout(model.num_layers, model.num_kv_heads, model.head_dim, dtype, config.block_tokens)


def most_context_tokens(checkpoint: Checkpoint, config: EngineConfig) -> int:
    """Most tokens of prompt and output together, as far as the KV memory has room."""
    return min(checkpoint.context_tokens, config.max_context_tokens or checkpoint.context_tokens)


def with_chosen_host(checkpoint: Checkpoint, config: EngineConfig, layout: KVLayout) -> EngineConfig:
    """The configuration once what is on the host has been chosen, if it is to be. Raises Incompatible."""
    if config.host_choice is None:
        return config
    torch.set_num_threads(_num_threads(config))
    known = replace(config, dtype=_resolve_dtype(config))
    return with_host_choice(checkpoint, known, layout, most_context_tokens(checkpoint, config))


def assemble(
    checkpoint: Checkpoint, config: EngineConfig, layout: KVLayout, on_progress: Progress | None = None
) -> Assembled:
    """Loads the weights, reporting to `on_progress`. Raises Incompatible and ServiceFailed."""
    config = replace(config, dtype=_resolve_dtype(config))
    num_threads = _num_threads(config)
    torch.set_num_threads(config.load_threads or num_threads)
    if config.num_ranks == 1:
        return _on_one_device(checkpoint, config, layout, num_threads, on_progress)
    parallel = ParallelRunner(checkpoint, config, layout, on_progress)
    return Assembled(parallel, parallel, parallel.weights)


def _on_one_device(
    checkpoint: Checkpoint, config: EngineConfig, layout: KVLayout, num_threads: int, on_progress: Progress | None
) -> Assembled:
    assert config.dtype != "auto"
    dtype, most_tokens = TORCH_DTYPES[config.dtype], most_context_tokens(checkpoint, config)
    model_config = replace(checkpoint.model_config, context_tokens=most_tokens)
    num_blocks = config.num_blocks or blocks_in(kv_budget_bytes(config, model_config, dtype), layout)
    model_config = replace(model_config, context_tokens=num_positions(config, most_tokens, num_blocks))
    path = choose_path(config, model_config, dtype, most_tokens)
    device, throttle = torch.device(config.device), Throttle(config.link_bytes_per_s)
    host_layers = layers_on_host(model_config.num_layers, config.host_weights)
    weights = weight_stream(host_layers, device, throttle, path.packing)
    steps = _model_steps(checkpoint, model_config, config, path, dtype, host_layers, weights, on_progress)
    offload = None
    if config.offload is not None:
        model = steps.build()
        steps.load(model)
        offload = Offload(config.offload, layout, model, model_config, num_blocks, most_tokens)
        num_blocks = offload.rooms.device
        steps.pack(model, lambda pack_weight: pack_weight)
    else:
        model = ready_model(steps, weights_place(config, checkpoint, path, dtype))
    if weights is not None:
        weights.begin()
    arena = KVArena(layout, num_blocks, config.device, path.kernels)
    recorded = capture_decode(config, model_config, model, arena, path.attention)
    path.use_threads(num_threads)
    masks = TokenMasks(checkpoint.path, model_config.vocab_size, checkpoint.eos_token_ids)
    runner = ModelRunner(model, arena, path.attention, checkpoint.eos_token_ids, recorded, masks, path.sampler)
    if path.kernels == "triton" and arena.tensor.is_cuda:
        compile_ahead(runner, arena, layout, most_tokens)
    if offload is None:
        return Assembled(runner, arena, weights)
    return Assembled(*offload.around(runner, path.attention, arena, throttle), weights)


def _model_steps(
    checkpoint: Checkpoint,
    model_config: ModelConfig,
    config: EngineConfig,
    path: DevicePath,
    dtype: torch.dtype,
    host_layers: frozenset[int],
    weights: WeightStream | None,
    on_progress: Progress | None,
) -> ModelSteps:
    blocks, are_kept = checkpoint.block_file, keeps_blocks(checkpoint, path)

    def load(model: Model) -> None:
        if config.weights == "dummy":
            fill_dummy_weights(model)
        else:
            load_weights(model, checkpoint.weight_files, on_progress, blocks, as_numbers=not are_kept)

    part = replace(whole_model(model_config), host_layers=host_layers)
    pack_layer = alike if weights is None else weights.pack_layer
    return ModelSteps(
        build=partial(build_model, model_config, dtype, config.device, path.layer_ops, part),
        load=load,
        load_shapes=lambda model: load_block_shapes(model, blocks if are_kept else None),
        pack=lambda model, wrap: pack(model, path, checkpoint.quantization, wrap, pack_layer),
    )


def _num_threads(config: EngineConfig) -> int:
    return config.num_threads or min(torch.get_num_threads(), host_limits.num_threads())


def _resolve_dtype(config: EngineConfig) -> FloatDtype:
    if config.dtype != "auto":
        return config.dtype
    if config.device != "cpu":
        return "bfloat16"
    capabilities = torch.cpu.get_capabilities()
    fast = any(capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16", "bf16"))
    return "bfloat16" if fast else "float32"
