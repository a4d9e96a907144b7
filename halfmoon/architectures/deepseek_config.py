"""The configuration of DeepSeek-V2 and V3: attention over latents, mixtures whose experts are in groups. Torch-free."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Any

from halfmoon.architectures.config_fields import Raw, refuse, required, rope_parameters, served_positions
from halfmoon.architectures.expert_config import checked
from halfmoon.architectures.model_config import Experts, Latent, ModelConfig
from halfmoon.errors import Incompatible

DEEPSEEK_FAMILY = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")


def parse_deepseek(raw: Raw, architecture: str) -> ModelConfig:
    """Raises Incompatible for what we do not compute."""
    is_third = architecture == "DeepseekV3ForCausalLM"
    refuse(raw, "hidden_act", ("silu",))
    refuse(raw, "attention_bias", (False, None))
    refuse(raw, "mlp_bias", (False, None))
    num_layers = required(raw, "num_hidden_layers")
    latent = _latent(raw, is_third)
    rope = rope_parameters(raw)
    max_positions = int(raw.get("max_position_embeddings") or (4096 if is_third else 2048))
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
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_scale=_scale(latent, rope),
        latent=latent,
        experts=_experts(raw, is_third, num_layers),
        num_prediction_layers=int(raw.get("num_nextn_predict_layers") or raw.get("num_mtp_layers") or 0),
        rope_type=rope["rope_type"],
        rope_theta=float(rope["rope_theta"]),
        rope_parameters=MappingProxyType(rope),
        rotary_dim=latent.rotary_size,
    )


def _latent(raw: Raw, is_third: bool) -> Latent:
    latent = Latent(
        size=int(raw.get("kv_lora_rank") or 512),
        rotary_size=int(raw.get("qk_rope_head_dim") or 64),
        plain_size=int(raw.get("qk_nope_head_dim") or 128),
        value_size=int(raw.get("v_head_dim") or 128),
        query_size=int(raw.get("q_lora_rank", 1536) or 0),
        is_interleaved=bool(raw.get("rope_interleave", True)) if is_third else True,
    )
    if latent.rotary_size % 2 or latent.size % 2 or latent.size < latent.rotary_size:
        raise Incompatible(
            f"config.json: a latent of {latent.size} numbers with {latent.rotary_size} rotated ones is not supported; "
            "both must be even, and the latent the larger part"
        )
    return latent


def _scale(latent: Latent, rope: dict[str, Any]) -> float:
    """The scale of scores, which a stretched context changes (YaRN, section 3.4, squared: queries and keys)."""
    scale = 1 / math.sqrt(latent.plain_size + latent.rotary_size)
    factor, share = float(rope.get("factor", 1.0)), float(rope.get("mscale_all_dim") or 0.0)
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
    each = int(raw.get("moe_intermediate_size") or (2048 if is_third else 1407))
    first = int(raw.get("first_k_dense_replace", 3 if is_third else 0))
    shared = raw.get("n_shared_experts", 1 if is_third else 2) or 0
    num_experts = raw.get("n_routed_experts") or raw.get("num_experts") or raw.get("num_local_experts")
    return checked(
        Experts(
            num_experts=int(num_experts or (256 if is_third else 64)),
            num_chosen=int(raw.get("num_experts_per_tok") or 8),
            intermediate_size=each,
            in_layer=tuple(layer >= first for layer in range(num_layers)),
            normalised=is_third and bool(raw.get("norm_topk_prob", True)),
            scoring="sigmoid" if is_third else "softmax",
            is_biased=is_third,
            num_groups=int(raw.get("n_group") or (8 if is_third else 1)) if is_grouped else 1,
            num_chosen_groups=int(raw.get("topk_group") or (4 if is_third else 1)) if is_grouped else 1,
            weight_scale=float(raw.get("routed_scaling_factor", 2.5 if is_third else 1.0)),
            shared_intermediate_size=each * int(shared),
            names="deepseek",
        )
    )
