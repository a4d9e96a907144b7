"""Parameters on one device of a tensor-parallel group, from the model's configuration alone.

Split over the group: query heads, the feed-forward width and the vocabulary, as in Megatron-LM (Shoeybi et al. 2019,
section 3). Replicated on every device: norms, position embeddings, biases added after a reduction, and embedding
projections. With one device the count is that of the checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from halfmoon.engine.model_config import ModelConfig
from halfmoon.errors import InvalidRequest

_OPT_POSITION_OFFSET = 2  # OPT's position table starts two rows early


@dataclass(frozen=True, slots=True)
class DeviceShare:
    """One device's part of each split dimension."""

    q_heads: int
    kv_heads: int
    intermediate: int
    vocab: int


def device_share(config: ModelConfig, num_devices: int) -> DeviceShare:
    """Share of the fullest device. Raises InvalidRequest if the query heads cannot be divided.

    KV heads are divided if possible. If the number of devices is a multiple of the KV heads, each device holds one
    head, which others hold too. Otherwise every device holds all of them.
    """
    if config.num_heads % num_devices:
        raise InvalidRequest(
            f"{config.num_heads} attention heads cannot be divided among {num_devices} devices", param="num_devices"
        )
    if config.num_kv_heads % num_devices == 0:
        kv_heads = config.num_kv_heads // num_devices
    else:
        kv_heads = 1 if num_devices % config.num_kv_heads == 0 else config.num_kv_heads
    return DeviceShare(
        q_heads=config.num_heads // num_devices,
        kv_heads=kv_heads,
        intermediate=ceil(config.intermediate_size / num_devices),
        vocab=ceil(config.vocab_size / num_devices),
    )


def num_parameters(config: ModelConfig, num_devices: int = 1) -> int:
    """Parameters on one device. Raises InvalidRequest as `device_share` does."""
    share = device_share(config, num_devices)
    if config.family == "opt":
        return config.num_layers * _opt_layer(config, share) + _opt_outside(config, share)
    return config.num_layers * _llama_layer(config, share) + _llama_outside(config, share)


def _attention(config: ModelConfig, share: DeviceShare) -> int:
    q_size, kv_size = share.q_heads * config.head_dim, share.kv_heads * config.head_dim
    weights = config.hidden_size * (q_size + 2 * kv_size) + q_size * config.hidden_size
    qkv_bias = (q_size + 2 * kv_size) if config.qkv_bias else 0
    output_bias = config.hidden_size if config.output_bias else 0
    qk_norm = 2 * config.head_dim if config.qk_norm else 0
    return weights + qkv_bias + output_bias + qk_norm


def _llama_layer(config: ModelConfig, share: DeviceShare) -> int:
    mlp = 3 * config.hidden_size * share.intermediate
    mlp_bias = (2 * share.intermediate + config.hidden_size) if config.mlp_bias else 0
    return _attention(config, share) + mlp + mlp_bias + 2 * config.hidden_size


def _llama_outside(config: ModelConfig, share: DeviceShare) -> int:
    embedding = share.vocab * config.hidden_size
    return embedding * (1 if config.tie_word_embeddings else 2) + config.hidden_size


def _opt_layer(config: ModelConfig, share: DeviceShare) -> int:
    mlp = 2 * config.hidden_size * share.intermediate
    mlp_bias = (share.intermediate + config.hidden_size) if config.mlp_bias else 0
    return _attention(config, share) + mlp + mlp_bias + 2 * _opt_norm(config)


def _opt_outside(config: ModelConfig, share: DeviceShare) -> int:
    embedding = share.vocab * config.embed_proj_dim * (1 if config.tie_word_embeddings else 2)
    projections = 2 * config.hidden_size * config.embed_proj_dim if config.embed_proj_dim != config.hidden_size else 0
    positions = (config.max_positions + _OPT_POSITION_OFFSET) * config.hidden_size
    return embedding + projections + positions + (_opt_norm(config) if config.final_norm else 0)


def _opt_norm(config: ModelConfig) -> int:
    return 2 * config.hidden_size if config.norm_affine else 0
