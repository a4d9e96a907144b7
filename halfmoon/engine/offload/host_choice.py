"""Chooses at start what of a model's weights and KV is on the host, by rates measured on a few of its layers.

The whole model may not fit the device, so a few layers of its middle stand for all, with their own weights, packed.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import asdict, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from halfmoon import host_limits
from halfmoon.architectures.model_config import ModelConfig
from halfmoon.engine.attention.attention_backend import AttentionBackend
from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.config import EngineConfig, HostChoiceConfig
from halfmoon.engine.device_path import choose_path, keeps_blocks, pack
from halfmoon.engine.kv_memory.kv_arena import TORCH_DTYPES, KVArena
from halfmoon.engine.kv_memory.kv_budget import movable_bytes, usable_bytes, weight_bytes
from halfmoon.engine.kv_memory.kv_watch import LayerWatch
from halfmoon.engine.model_runner import ModelRunner
from halfmoon.engine.models import Model, build_model
from halfmoon.engine.models.blocks import Blocks
from halfmoon.engine.models.forward_batch import ForwardBatch
from halfmoon.engine.models.linear import Multiply, PackWeight
from halfmoon.engine.models.model_part import ModelPart
from halfmoon.engine.native.prepared_model import PackedWeight
from halfmoon.engine.offload.build import keys_values_of
from halfmoon.engine.offload.link import Throttle, link_to
from halfmoon.engine.offload.profile import measure_context, measure_costs, measure_load
from halfmoon.engine.offload.staging import Staging
from halfmoon.engine.offload.tiers import TieredKV
from halfmoon.engine.parallel.weights import fill_dummy_part, load_part
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
from halfmoon.policy.offload.recompute import NEVER

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 256
_PROBE_LAYERS = 4  # at most: what a step takes beside its layers counts for the less


class Measured(NamedTuple):
    """What a few layers say of all."""

    rates: Rates
    layer_bytes: int  # of the largest layer's weights that may be on the host


def with_host_choice(checkpoint: Checkpoint, config: EngineConfig, layout: KVLayout, most_tokens: int) -> EngineConfig:
    """The configuration with `offload`, `host_weights` and the KV memory chosen. Its `dtype` is resolved.

    Raises Incompatible if the memory does not hold one sequence of `most_tokens`.
    """
    wish = config.host_choice
    assert wish is not None
    assert config.dtype != "auto"
    model = checkpoint.model_config
    measured = measure(checkpoint, config, layout, most_tokens)
    sizes = model_sizes(model, TORCH_DTYPES[config.dtype], layout, measured.layer_bytes)
    device_bytes = wish.device_bytes
    if device_bytes is None:
        device_bytes = usable_bytes(config, model, TORCH_DTYPES[config.dtype])
    host_kv_bytes = 0 if config.offload is None else config.offload.host_bytes
    choice = choose_host_share(
        measured.rates,
        sizes,
        Memory(device_bytes, host_limits.free_memory_bytes() / config.host_workers, host_kv_bytes),
        Demand(most_tokens, config.max_running),
        wish.objective,
        None if wish.weights else [num_host_layers(model.num_layers, config.host_weights)],
    )
    return _apply(config, wish, choice, int(device_bytes - sizes.device_bytes(choice.host_layers)))


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


def model_sizes(model: ModelConfig, dtype: torch.dtype, layout: KVLayout, layer_bytes: int) -> ModelSizes:
    """The model's sizes, with each layer as large as the largest; what stays on the device is counted in `dtype`."""
    others = weight_bytes(model, dtype) - sum(movable_bytes(model, dtype))
    token_bytes = layout.block_bytes / layout.block_tokens
    return ModelSizes(model.num_layers, layer_bytes, others, token_bytes, layout.block_tokens)


def measure(checkpoint: Checkpoint, config: EngineConfig, layout: KVLayout, most_tokens: int) -> Measured:
    """Measures layers in the middle of the model, and the link. Raises Incompatible."""
    assert config.dtype != "auto"
    whole, dtype, device = checkpoint.model_config, TORCH_DTYPES[config.dtype], torch.device(config.device)
    num_layers = min(whole.num_layers, _PROBE_LAYERS)
    first = (whole.num_layers - num_layers) // 2
    part = ModelPart(whole, Shard(first, first + num_layers, 0, whole.num_kv_heads))
    path = choose_path(config, part.config, dtype, most_tokens)
    model = build_model(whole, dtype, config.device, path.layer_ops, part)
    if config.weights == "dummy":
        fill_dummy_part(model, part)
    else:
        as_numbers = not keeps_blocks(checkpoint, path)
        load_part(model, part, checkpoint.weight_files, blocks=checkpoint.block_file, as_numbers=as_numbers)
    recompute = "never" if config.offload is None else config.offload.recompute
    keys_values = None if recompute == "never" else keys_values_of(model, part.config)
    packed: Counter[int] = Counter()
    pack(model, path, checkpoint.quantization, pack_layer=partial(_counted, packed))
    thin = replace(layout, num_layers=num_layers, dtype=config.dtype)
    num_blocks = -(-_PROBE_TOKENS // layout.block_tokens)
    arena = KVArena(thin, num_blocks, config.device, path.kernels)
    memory = TieredKV(arena, num_blocks, thin, keys_values)
    staging = Staging(thin, num_blocks, dtype, device, keys_values is not None)
    runner = LayersRunner(part, model, arena, path.attention)
    layer_bytes = max(packed.values())
    link = link_to(device, Throttle(config.link_bytes_per_s))
    try:
        costs = measure_costs(runner, memory, staging, link)
        layer_load_s = measure_load(layer_bytes, device, link)
        context_s = measure_context(runner, layout.block_tokens, num_blocks, num_layers)
    finally:
        link.close()
    row_s = costs.tokens.compute_s
    if recompute == "never":
        costs = replace(costs, inputs=None, tokens=NEVER)
    logger.info("offload.measured", extra={**asdict(costs), "layer_load_s": layer_load_s, "context_s": context_s})
    return Measured(Rates(costs, layer_load_s, row_s, context_s), layer_bytes)


class LayersRunner(ModelRunner):
    """Runs a part of a model over hidden states of zeros, as if the part before it were there."""

    def __init__(self, part: ModelPart, model: Model, arena: KVArena, attention: AttentionBackend) -> None:
        super().__init__(model, arena, attention, frozenset())
        self._part = part

    def forward(self, batch: ForwardBatch, hidden: Tensor | None = None, watch: LayerWatch | None = None) -> Tensor:
        """See `ModelRunner.forward`."""
        if not self._part.is_first:
            shape = len(batch.token_ids), self._part.whole.hidden_size
            hidden = self._arena.tensor.new_zeros(shape, dtype=self._model.hidden_dtype)
        return super().forward(batch, hidden, watch)


def _counted(packed: Counter[int], pack_weight: PackWeight, layer: int) -> PackWeight:
    """Counts the bytes of a layer's matrices as they are packed."""

    def pack_counted(weight: Tensor | Blocks) -> Multiply | None:
        multiply = pack_weight(weight)
        plain = weight.data if isinstance(weight, Blocks) else weight
        packed[layer] += multiply.memory.nbytes if isinstance(multiply, PackedWeight) else plain.nbytes
        return multiply

    return pack_counted
