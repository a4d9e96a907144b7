"""The configuration of DeepSeek-V2 and V3: attention over latents, mixtures whose experts are in groups. Torch-free."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

from halfmoon.architectures.config_fields import (
    Raw,
    count,
    flag,
    num_layers_of,
    number,
    refuse,
    required,
    rope_parameters,
    served_positions,
)
from halfmoon.architectures.expert_config import checked, num_experts_of
from halfmoon.architectures.model_config import Experts, Latent, ModelConfig
from halfmoon.errors import Incompatible

DEEPSEEK_FAMILY = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")


def parse_deepseek(raw: Raw, architecture: str) -> ModelConfig:
    """Raises Incompatible for what we do not compute."""
    is_third = architecture == "DeepseekV3ForCausalLM"
    refuse(raw, "hidden_act", ("silu",))
    refuse(raw, "attention_bias", (False, None))
    refuse(raw, "mlp_bias", (False, None))
    num_layers = num_layers_of(raw)
    latent = _latent(raw, is_third)
    rope = rope_parameters(raw)
    max_positions = count(raw, "max_position_embeddings", 4096 if is_third else 2048)
    return ModelConfig(
        architecture=architecture,
        family="llama",
        vocab_size=required(raw, "vocab_size"),
        hidden_size=required(raw, "hidden_size"),
        intermediate_size=required(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=required(raw, "num_attention_heads"),
        num_kv_heads=1,
        head_dim=latent.row_size // 2,
        max_positions=max_positions,
        context_tokens=served_positions(max_positions, rope),
        activation="silu",
        norm_eps=number(raw, "rms_norm_eps", 1e-6, zero=True),
        tie_word_embeddings=flag(raw, "tie_word_embeddings", False),
        attention_scale=_scale(latent, rope),
        latent=latent,
        experts=_experts(raw, is_third, num_layers),
        num_prediction_layers=_num_prediction_layers(raw),
        rope_type=rope["rope_type"],
        rope_theta=rope["rope_theta"],
        rope_parameters=MappingProxyType(rope),
        rotary_dim=latent.rotary_size,
    )


def _num_prediction_layers(raw: Raw) -> int:
    names = ("num_nextn_predict_layers", "num_mtp_layers")
    return next(filter(None, (count(raw, name, 0, least=0) for name in names)), 0)


def _latent(raw: Raw, is_third: bool) -> Latent:
    latent = Latent(
        size=count(raw, "kv_lora_rank", 512),
        rotary_size=count(raw, "qk_rope_head_dim", 64),
        plain_size=count(raw, "qk_nope_head_dim", 128),
        value_size=count(raw, "v_head_dim", 128),
        query_size=count(raw, "q_lora_rank", 1536, least=0, null=0),
        is_interleaved=flag(raw, "rope_interleave", True) if is_third else True,
    )
    if latent.rotary_size % 2 or latent.size % 2 or latent.size < latent.rotary_size:
        raise Incompatible(
            f"config.json: a latent of {latent.size} numbers with {latent.rotary_size} rotated ones is not supported; "
            "both must be even, and the latent the larger part (kv_lora_rank, qk_rope_head_dim)",
            param="kv_lora_rank",
        )
    return latent


def _scale(latent: Latent, rope: dict[str, Any]) -> float:
    """The scale of scores, which a stretched context changes (YaRN, section 3.4, squared: queries and keys)."""
    scale = 1 / math.sqrt(latent.plain_size + latent.rotary_size)
    factor, share = number(rope, "factor", 1.0), number(rope, "mscale_all_dim", 0.0, zero=True)
    if rope["rope_type"] == "default" or not share or factor <= 1:
        return scale
    return scale * math.pow(0.1 * share * math.log(factor) + 1.0, 2)


def _experts(raw: Raw, is_third: bool, num_layers: int) -> Experts:
    refuse(raw, "moe_layer_freq", (1, None))
    refuse(raw, "scoring_func", ("sigmoid",) if is_third else ("softmax",))
    refuse(raw, "topk_method", ("noaux_tc", None) if is_third else ("greedy", "group_limited_greedy", None))
    if not is_third:
        refuse(raw, "norm_topk_prob", (False, None))
    is_grouped = is_third or raw.get("topk_method") == "group_limited_greedy"
    each = count(raw, "moe_intermediate_size", 2048 if is_third else 1407)
    first = count(raw, "first_k_dense_replace", 3 if is_third else 0, least=0)
    shared = count(raw, "n_shared_experts", 1 if is_third else 2, least=0, null=0)
    return checked(
        Experts(
            num_experts=num_experts_of(
                raw, ("n_routed_experts", "num_experts", "num_local_experts"), 256 if is_third else 64
            ),
            num_chosen=count(raw, "num_experts_per_tok", 8),
            intermediate_size=each,
            in_layer=tuple(layer >= first for layer in range(num_layers)),
            normalised=is_third and flag(raw, "norm_topk_prob", True),
            scoring="sigmoid" if is_third else "softmax",
            is_biased=is_third,
            num_groups=count(raw, "n_group", 8 if is_third else 1) if is_grouped else 1,
            num_chosen_groups=count(raw, "topk_group", 4 if is_third else 1) if is_grouped else 1,
            weight_scale=number(raw, "routed_scaling_factor", 2.5 if is_third else 1.0),
            shared_intermediate_size=each * shared,
            names="deepseek",
        )
    )
