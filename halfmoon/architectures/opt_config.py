"""The configuration of OPT. Torch-free."""

from __future__ import annotations

from halfmoon.architectures.config_fields import Raw, required
from halfmoon.architectures.model_config import ModelConfig
from halfmoon.errors import Incompatible

_ACTIVATIONS = ("relu", "gelu", "gelu_new")


def parse_opt(raw: Raw) -> ModelConfig:
    """Raises Incompatible for what we do not compute."""
    hidden, heads = required(raw, "hidden_size"), required(raw, "num_attention_heads")
    activation = raw.get("activation_function", "relu")
    if activation not in _ACTIVATIONS:
        raise Incompatible(f"activation {activation!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    if hidden % heads:
        raise Incompatible(f"config.json: hidden_size {hidden} is not a multiple of {heads} attention heads")
    bias = bool(raw.get("enable_bias", True))
    norm_before = bool(raw.get("do_layer_norm_before", True))
    max_positions = int(raw.get("max_position_embeddings", 2048))
    return ModelConfig(
        architecture="OPTForCausalLM",
        family="opt",
        vocab_size=required(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=required(raw, "ffn_dim"),
        num_layers=required(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_positions=max_positions,
        context_tokens=max_positions,
        activation=activation,
        norm_eps=1e-5,
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", True)),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        embed_proj_dim=int(raw.get("word_embed_proj_dim") or hidden),
        norm_before=norm_before,
        final_norm=norm_before and not bool(raw.get("_remove_final_layer_norm", False)),
        norm_affine=bool(raw.get("layer_norm_elementwise_affine", True)),
    )
