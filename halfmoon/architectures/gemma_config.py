"""The configuration of Gemma 2 and 3 (text): alternating windows, capped scores, offset norms. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from halfmoon.architectures.config_fields import (
    Raw,
    check_heads,
    count,
    flag,
    layer_windows,
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
from halfmoon.architectures.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class _Defaults:
    """Defaults of an architecture's configuration class for keys absent from `config.json`."""

    max_positions: int
    period: int  # every so many layers one sees all tokens
    attention_softcap: float | None
    logit_softcap: float | None


GEMMA_FAMILY: Mapping[str, _Defaults] = MappingProxyType(
    {
        "Gemma2ForCausalLM": _Defaults(8192, 2, 50.0, 30.0),
        "Gemma3ForCausalLM": _Defaults(131072, 6, None, None),
    }
)


def parse_gemma(raw: Raw, architecture: str) -> ModelConfig:
    """Raises Incompatible for what we do not compute."""
    defaults, is_third = GEMMA_FAMILY[architecture], architecture == "Gemma3ForCausalLM"
    refuse(raw, "hidden_activation", ("gelu_pytorch_tanh", None))
    refuse(raw, "use_bidirectional_attention", (False, None))
    refuse(raw, "attention_bias", (False, None))
    hidden, heads = required(raw, "hidden_size"), required(raw, "num_attention_heads")
    kv_heads, head_dim = count(raw, "num_key_value_heads", 4), count(raw, "head_dim", 256)
    check_heads(heads, kv_heads, head_dim)
    num_layers = num_layers_of(raw)
    rope, window_theta = _rope(raw, is_third)
    refuse_partial_rotation(rope)
    max_positions = count(raw, "max_position_embeddings", defaults.max_positions)
    context_tokens = served_positions(max_positions, rope)
    period = count(raw, "sliding_window_pattern", defaults.period)
    sliding = sliding_layers(raw, num_layers, [(layer + 1) % period > 0 for layer in range(num_layers)])
    window = count(raw, "sliding_window", 4096)
    # Layers keep their windows even where no sequence is longer: they decide the rotation, too.
    windows = layer_windows(window, sliding, max(context_tokens, window + 1) if is_third else context_tokens)
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
        activation="gelu_new",
        norm_eps=number(raw, "rms_norm_eps", 1e-6, zero=True),
        tie_word_embeddings=flag(raw, "tie_word_embeddings", True),
        qk_norm=is_third,
        norm_offset=True,
        post_norms=True,
        embedding_scale=hidden**0.5,
        attention_scale=number(raw, "query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=_softcap(raw, "attn_logit_softcapping", defaults.attention_softcap),
        logit_softcap=_softcap(raw, "final_logit_softcapping", defaults.logit_softcap),
        windows=windows,
        rope_type=rope["rope_type"],
        rope_theta=rope["rope_theta"],
        rope_parameters=MappingProxyType(rope),
        window_rope_theta=window_theta,
    )


def _softcap(raw: Raw, name: str, default: float | None) -> float | None:
    return number(raw, name, default or 0.0, zero=True, null=0.0) or None


def _rope(raw: Raw, is_third: bool) -> tuple[dict[str, Any], float | None]:
    """Rotation of layers without a window, and the base of those with one if it is another."""
    if not is_third:
        return rope_parameters(raw), None
    by_kind = mapping(raw, "rope_parameters")
    windowed = mapping(by_kind, "sliding_attention")
    refuse(windowed, "rope_type", ("default",))
    own = mapping(by_kind, "full_attention") or mapping(raw, "rope_scaling")
    theta = number(windowed, "rope_theta", number(raw, "rope_local_base_freq", 10000.0))
    return rope_parameters({"rope_parameters": own, "rope_theta": raw.get("rope_theta")}, 1_000_000.0), theta
