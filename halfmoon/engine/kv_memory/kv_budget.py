"""Default sizes of a worker's KV cache, and of its copies of paused answers' KV, if none are configured."""

from __future__ import annotations

from collections.abc import Callable

import torch

from halfmoon.architectures.model_config import ModelConfig
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.models import build_model
from halfmoon.engine.offload.weights import layers_on_host
from halfmoon.errors import Incompatible
from halfmoon.host_limits import free_memory_bytes
from halfmoon.kv.kv_layout import KVLayout

_MAX_HOST_BYTES = 2 << 30
_HOST_SHARE = 8  # divisor of the free memory; two workers and the weights must fit on a laptop
_PAUSED_SHARE = 4  # divisor of the free host memory, for copies that pauses make
_DIVIDING = 2  # workers of a host that take such a share each; more of them divide it
_ABSORBED = "kv_b_proj.weight"  # of latent attention: no matrix product, so it stays on the device
_LEAST_STEP_BYTES = 1 << 30  # set aside on a GPU for steps
_STAGING_BYTES = 512 << 20  # of that, for workspaces, staging buffers and copies of KV on their way
_LOGIT_COPIES = 7  # float32 rows of the vocabulary for a sequence: a graph's of each size, a step's, and the sampler's


def kv_budget_bytes(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    device_bytes: Callable[[], int] | None = None,
) -> int:
    """KV memory of each rank in bytes: the configured size, or a sensible one for its device.

    On a CPU that is a share of the free memory, which all ranks share; more than two workers of a host divide a
    quarter. On a GPU it is `gpu_memory_utilization` of the smallest one (`device_bytes`, not run on a GPU yet) minus
    the weights and what a step needs. Raises Incompatible when the weights leave no room.
    """
    if config.device == "cpu":
        share_bytes = min(_share_bytes(config, _HOST_SHARE), _MAX_HOST_BYTES)
        return (config.kv_memory_bytes or share_bytes) // config.num_ranks_here
    if config.kv_memory_bytes is not None:
        return config.kv_memory_bytes
    total = (device_bytes or _smallest_device_bytes)()
    weights = device_weight_bytes(model, dtype, config.host_weights) // (config.num_ranks // config.sequence_parallel)
    left = usable_bytes(config, model, dtype, total) - weights
    if left <= 0:
        raise Incompatible(
            f"{config.gpu_memory_utilization:.0%} of a GPU of {total >> 30} GiB leaves no room for KV next to weights "
            f"of {weights >> 30} GiB: use more ranks (tensor_parallel, pipeline_parallel) or raise "
            "gpu_memory_utilization"
        )
    return left


def blocks_in(kv_bytes: int, layout: KVLayout) -> int:
    """How many blocks of a layout fit into `kv_bytes`. Raises Incompatible if not even one does."""
    if kv_bytes < layout.block_bytes:
        raise Incompatible(
            f"KV memory of {kv_bytes} bytes does not hold one block of {layout.block_tokens} tokens, "
            f"{layout.block_bytes} bytes: raise kv_memory, or make block_tokens smaller",
            param="kv_memory",
        )
    return kv_bytes // layout.block_bytes


def num_positions(config: EngineConfig, most_tokens: int, num_blocks: int) -> int:
    """Positions that a model computes, of sequences of at most `most_tokens`: KV memory of `num_blocks` holds no more.

    A model may name millions. With KV on the host, too, `most_tokens` alone bounds them.
    """
    return most_tokens if config.offload is not None else min(most_tokens, num_blocks * config.block_tokens)


def usable_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device_bytes: int | None = None) -> int:
    """Memory of a GPU for weights and KV. device_bytes: all of its memory; None: the smallest device's."""
    total = _smallest_device_bytes() if device_bytes is None else device_bytes
    return int(total * config.gpu_memory_utilization) - step_bytes(config, model, dtype)


def step_bytes(config: EngineConfig, model: ModelConfig, dtype: torch.dtype) -> int:
    """Memory of a GPU that steps need: for a perceptron's inputs and outputs, logits, and copies.

    Log-probabilities of prompts are not counted, which need logits of all tokens of a step.
    """
    token_bytes = 3 * (model.hidden_size + model.intermediate_size) * dtype.itemsize
    logits_bytes = _LOGIT_COPIES * model.vocab_size * torch.float32.itemsize
    needed = _STAGING_BYTES + config.step_tokens * token_bytes + config.max_running * logits_bytes
    return max(_LEAST_STEP_BYTES, needed)


def paused_budget_bytes(config: EngineConfig, kv_bytes: int) -> int:
    """Host memory in bytes for KV of paused answers: the configured size, or `kv_bytes`, all KV, if the host has it.

    GPUs may have more KV than their host has memory: a worker must not be killed for what it can compute again.
    """
    if config.paused_bytes is not None:
        return config.paused_bytes
    return min(kv_bytes, _share_bytes(config, _PAUSED_SHARE))


def _share_bytes(config: EngineConfig, divisor: int) -> int:
    """This worker's share of the free memory: those that start with it find as much free."""
    return free_memory_bytes() * _DIVIDING // (divisor * max(config.host_workers, _DIVIDING))


def weight_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """Size of the whole model's weights, from a model that takes no memory."""
    return sum(view.nbytes for view in build_model(model, dtype, "meta").parameters().values())


def device_weight_bytes(model: ModelConfig, dtype: torch.dtype, host_share: float) -> int:
    """Size of the weights that stay on the devices, with the two buffers for those that do not."""
    layers = layers_on_host(model.num_layers, host_share)
    if not layers:
        return weight_bytes(model, dtype)
    by_layer = movable_bytes(model, dtype)
    on_host = [by_layer[layer] for layer in layers]
    return weight_bytes(model, dtype) - sum(on_host) + 2 * max(on_host)


def movable_bytes(model: ModelConfig, dtype: torch.dtype) -> list[int]:
    """Size of each layer's weights that may be on the host."""
    by_layer = [0] * model.num_layers
    for name, view in build_model(model, dtype, "meta").parameters().items():
        if ".layers." in name and not name.endswith(_ABSORBED):
            by_layer[int(name.split(".layers.")[1].split(".")[0])] += view.nbytes
    return by_layer


def _smallest_device_bytes() -> int:
    return min(torch.cuda.mem_get_info(index)[1] for index in range(torch.cuda.device_count()))
