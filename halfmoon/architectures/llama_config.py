"""The configuration of Llama, and of what differs from it in biases, norms of heads, windows or names. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from halfmoon.architectures.config_fields import (
    Raw,
    check_heads,
    count,
    flag,
    layer_windows,
    listed,
    mapping,
    num_layers_of,
    number,
    refuse,
    refuse_partial_rotation,
    required,
    rope_parameters,
    served_positions,
    sliding_layers,
)
from halfmoon.architectures.expert_config import llama_experts
from halfmoon.architectures.model_config import ModelConfig
from halfmoon.errors import Incompatible


@dataclass(frozen=True, slots=True)
class _Defaults:
    """Defaults of an architecture's configuration class for keys absent from `config.json`."""

    max_positions: int
    num_kv_heads: int | None = None  # None: as many as query heads
    qkv_bias: bool = False
    output_bias_follows_qkv: bool = True
    qk_norm: bool = False
    norm_eps: float = 1e-6
    sliding_window: int | None = 4096
    rope_theta: float = 10000.0
    head_dim: int | None = None  # None: the query heads divide the hidden size


LLAMA_FAMILY: Mapping[str, _Defaults] = MappingProxyType(
    {
        "LlamaForCausalLM": _Defaults(2048),
        "MistralForCausalLM": _Defaults(131072, num_kv_heads=8),
        "Qwen2ForCausalLM": _Defaults(32768, num_kv_heads=32, qkv_bias=True, output_bias_follows_qkv=False),
        "Qwen3ForCausalLM": _Defaults(32768, num_kv_heads=32, qk_norm=True, head_dim=128),
        "Phi3ForCausalLM": _Defaults(4096, norm_eps=1e-5, sliding_window=None),
        "MixtralForCausalLM": _Defaults(
            131072, num_kv_heads=8, norm_eps=1e-5, sliding_window=None, rope_theta=1000000.0
        ),
        "Qwen2MoeForCausalLM": _Defaults(32768, num_kv_heads=16, qkv_bias=True, output_bias_follows_qkv=False),
        "Qwen3MoeForCausalLM": _Defaults(32768, num_kv_heads=4, qk_norm=True),
    }
)
_WITHOUT_ATTENTION_BIAS = ("MistralForCausalLM", "Phi3ForCausalLM", "MixtralForCausalLM", "Qwen2MoeForCausalLM")
_MIXTURES = ("MixtralForCausalLM", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM")


def parse_llama_family(raw: Raw, architecture: str) -> ModelConfig:
    """Raises Incompatible for what we do not compute."""
    defaults = LLAMA_FAMILY[architecture]
    is_phi = architecture == "Phi3ForCausalLM"
    refuse(raw, "hidden_act", ("silu",))
    hidden, heads = required(raw, "hidden_size"), required(raw, "num_attention_heads")
    kv_heads = count(raw, "num_key_value_heads", defaults.num_kv_heads or heads)
    head_dim = count(raw, "head_dim", 1) if raw.get("head_dim") is not None else defaults.head_dim or hidden // heads
    check_heads(heads, kv_heads, head_dim)
    attention_bias = flag(raw, "attention_bias", False) and architecture not in _WITHOUT_ATTENTION_BIAS
    qkv_bias = flag(raw, "qkv_bias", True) if architecture == "Qwen2MoeForCausalLM" else True
    num_layers = num_layers_of(raw)
    max_positions = count(raw, "max_position_embeddings", defaults.max_positions)
    if is_phi:
        rope = _phi_rope(raw, max_positions, head_dim)
    else:
        refuse(raw, "partial_rotary_factor", (1, 1.0, None))
        rope = rope_parameters(raw, defaults.rope_theta)
        refuse_partial_rotation(rope)
    context_tokens = served_positions(max_positions, rope)
    if rope["rope_type"] == "longrope":
        context_tokens = min(context_tokens, rope["original_max_position_embeddings"])
    return ModelConfig(
        architecture=architecture,
        family="llama",
        vocab_size=required(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=required(raw, "intermediate_size"),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        context_tokens=context_tokens,
        activation="silu",
        norm_eps=number(raw, "rms_norm_eps", defaults.norm_eps, zero=True),
        tie_word_embeddings=flag(raw, "tie_word_embeddings", False),
        qkv_bias=attention_bias or (defaults.qkv_bias and qkv_bias),
        output_bias=attention_bias and defaults.output_bias_follows_qkv,
        mlp_bias=flag(raw, "mlp_bias", False) and architecture == "LlamaForCausalLM",
        qk_norm=defaults.qk_norm,
        windows=layer_windows(
            _window(raw, architecture, defaults), _sliding(raw, architecture, num_layers), context_tokens
        ),
        fused_in_checkpoint=is_phi,
        experts=llama_experts(raw, architecture, num_layers) if architecture in _MIXTURES else None,
        rope_type=rope["rope_type"],
        rope_theta=rope["rope_theta"],
        rope_parameters=MappingProxyType(rope),
        rotary_dim=int(head_dim * rope.get("partial_rotary_factor", 1.0)),
    )


def _phi_rope(raw: Raw, max_positions: int, head_dim: int) -> dict[str, Any]:
    """Phi-3 calls LongRoPE `su` or `yarn`, too, and keeps its original length beside the parameters.

    Raises Incompatible for an odd number of rotated values, or other than one factor for two of them.
    """
    scaling = dict(mapping(raw, "rope_parameters") or mapping(raw, "rope_scaling"))
    name = scaling.get("rope_type") or scaling.get("type")
    if name in ("su", "yarn"):
        scaling["rope_type"] = "longrope"
    rope = rope_parameters({**raw, "rope_parameters": scaling}, further=("longrope",))
    share = number(rope, "partial_rotary_factor", number(raw, "partial_rotary_factor", 1.0))
    original_name = "original_max_position_embeddings"
    original = count(rope, original_name, count(raw, original_name, 4096))
    rope.update({"partial_rotary_factor": share, original_name: original})
    rotated = int(head_dim * share)
    if share > 1 or rotated < 2 or rotated % 2:
        raise Incompatible(
            f"config.json: partial_rotary_factor must leave an even part of {head_dim} numbers to rotate, got {share}",
            param="partial_rotary_factor",
        )
    if rope["rope_type"] == "longrope":
        rope.setdefault("factor", max_positions / original)
        for name in ("short_factor", "long_factor"):
            factors = listed(rope, name, float)
            if len(factors) != rotated // 2 or min(factors) <= 0:
                raise Incompatible(
                    f"config.json: {name} must have {rotated // 2} positive numbers, one for two of the {rotated} "
                    f"rotated ones, got {len(factors)}",
                    param=name,
                )
    return rope


def _window(raw: Raw, architecture: str, defaults: _Defaults) -> int | None:
    if architecture == "LlamaForCausalLM":
        return None
    if architecture in ("Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM"):
        refuse(raw, "use_sliding_window", (False, None))
        return None
    if architecture.startswith("Qwen") and not flag(raw, "use_sliding_window", False):
        return None
    return count(raw, "sliding_window", defaults.sliding_window or 0, least=0, null=0) or None


def _sliding(raw: Raw, architecture: str, num_layers: int) -> Sequence[bool]:
    """Layers with a window, if there is one: of Mistral and Phi-3 all."""
    if not architecture.startswith("Qwen"):
        return [True] * num_layers
    first = count(raw, "max_window_layers", 28, least=0)
    return sliding_layers(raw, num_layers, [layer >= first for layer in range(num_layers)])
