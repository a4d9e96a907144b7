"""Chooses at start what of a model's weights and KV is on the host, by rates measured on a few of its layers.

The whole model may not fit the device, so these, with random weights, stand for all.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, replace

import torch

from halfmoon import host_limits
from halfmoon.architectures.model_config import ModelConfig
from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.config import EngineConfig, HostChoiceConfig
from halfmoon.engine.device_path import DevicePath, block_file, choose_path, pack
from halfmoon.engine.kv_memory.kv_arena import TORCH_DTYPES, KVArena
from halfmoon.engine.kv_memory.kv_budget import device_weight_bytes, movable_bytes, usable_bytes, weight_bytes
from halfmoon.engine.model_runner import ModelRunner
from halfmoon.engine.models import build_model
from halfmoon.engine.models.model_part import ModelPart, whole_model
from halfmoon.engine.models.weights import fill_dummy_weights
from halfmoon.engine.offload.build import keys_values_of
from halfmoon.engine.offload.link import Throttle, link_to
from halfmoon.engine.offload.profile import measure_context, measure_costs, measure_load
from halfmoon.engine.offload.staging import Staging
from halfmoon.engine.offload.tiers import TieredKV
from halfmoon.errors import Incompatible
from halfmoon.kv.kv_layout import KVLayout, Shard
from halfmoon.policy.offload.host_choice import (
    Demand,
    HostChoice,
    Memory,
    ModelSizes,
    Rates,
    choose_host_share,
    num_host_layers,
)
from halfmoon.policy.offload.recompute import Recompute

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 256
_PROBE_VOCABULARY = 64
_PROBE_LAYERS = 4  # at most: what a step takes beside its layers counts for the less
_NEVER = Recompute(0.0, float("inf"))


def with_host_choice(checkpoint: Checkpoint, config: EngineConfig, layout: KVLayout, most_tokens: int) -> EngineConfig:
    """The configuration with `offload`, `host_weights` and the KV memory chosen. Its `dtype` is resolved.

    Raises Incompatible if the memory does not hold one sequence of `most_tokens`, and for weights in blocks or rounded
    ones, whose sizes are not known before they are packed.
    """
    wish = config.host_choice
    assert wish is not None
    assert config.dtype != "auto"
    model, dtype = checkpoint.model_config, TORCH_DTYPES[config.dtype]
    path = choose_path(config, model, dtype, most_tokens)
    if checkpoint.quantization in ("int8", "int4") or block_file(checkpoint, path) is not None:
        raise Incompatible(
            "what of rounded weights fits is not known before they are packed: give the share instead of "
            "offload_weights: auto",
            param="offload_weights",
        )
    device_bytes = usable_bytes(config) if wish.device_bytes is None else wish.device_bytes
    host_kv_bytes = 0 if config.offload is None else config.offload.host_bytes
    rates = measure_rates(config, model, layout, path)
    choice = choose_host_share(
        rates,
        model_sizes(model, dtype, layout),
        Memory(device_bytes, host_limits.free_memory_bytes(), host_kv_bytes),
        Demand(most_tokens, config.max_running),
        wish.objective,
        None if wish.weights else [num_host_layers(model.num_layers, config.host_weights)],
    )
    return _apply(config, wish, choice, device_bytes - device_weight_bytes(model, dtype, choice.host_share))


def _apply(config: EngineConfig, wish: HostChoiceConfig, choice: HostChoice, kv_bytes: int) -> EngineConfig:
    offload = config.offload
    if wish.kv and not choice.host_tokens:
        offload = None
    facts = {
        "host_layers": choice.host_layers,
        "device_tokens": choice.device_tokens,
        "host_tokens": choice.host_tokens,
        "batch": choice.batch,
        "computed_again": choice.split.num_tokens,
        "step_s": choice.step_s,
        "kv_bytes": kv_bytes,
    }
    logger.info("offload.host_chosen", extra={**facts, "objective": wish.objective, "reason": choice.reason})
    return replace(config, host_choice=None, offload=offload, host_weights=choice.host_share, kv_memory_bytes=kv_bytes)


def model_sizes(model: ModelConfig, dtype: torch.dtype, layout: KVLayout) -> ModelSizes:
    """The model's sizes, with each layer as large as the largest."""
    layers = movable_bytes(model, dtype)
    others = weight_bytes(model, dtype) - sum(layers)
    token_bytes = layout.block_bytes / layout.block_tokens
    return ModelSizes(model.num_layers, max(layers), others, token_bytes, layout.block_tokens)


def measure_rates(config: EngineConfig, model: ModelConfig, layout: KVLayout, path: DevicePath) -> Rates:
    """Measures layers in the middle of the model, and the link."""
    assert config.dtype != "auto"
    dtype, device = TORCH_DTYPES[config.dtype], torch.device(config.device)
    num_layers = min(model.num_layers, _PROBE_LAYERS)
    first = (model.num_layers - num_layers) // 2
    part = ModelPart(model, Shard(first, first + num_layers, 0, model.num_kv_heads)).config
    part = replace(part, vocab_size=_PROBE_VOCABULARY)
    probe = build_model(part, dtype, config.device, path.layer_ops, whole_model(part))
    recompute = "never" if config.offload is None else config.offload.recompute
    keys_values = None if recompute == "never" else keys_values_of(probe, part)
    fill_dummy_weights(probe)
    pack(probe, path, "none")
    thin = replace(layout, num_layers=num_layers, dtype=config.dtype)
    num_blocks = -(-_PROBE_TOKENS // layout.block_tokens)
    arena = KVArena(thin, num_blocks, config.device, path.kernels)
    memory = TieredKV(arena, num_blocks, thin, keys_values)
    staging = Staging(thin, num_blocks, dtype, device, keys_values is not None)
    runner = ModelRunner(probe, arena, path.attention, frozenset())
    link = link_to(device, Throttle(config.link_bytes_per_s))
    try:
        costs = measure_costs(runner, memory, staging, link)
        layer_load_s = measure_load(max(movable_bytes(model, dtype)), device, link)
        context_s = measure_context(runner, layout.block_tokens, num_blocks, num_layers)
    finally:
        link.close()
    row_s = costs.tokens.compute_s
    if recompute == "never":
        costs = replace(costs, inputs=None, tokens=_NEVER)
    logger.info("offload.measured", extra={**asdict(costs), "layer_load_s": layer_load_s, "context_s": context_s})
    return Rates(costs, layer_load_s, row_s, context_s)
