"""The configuration of OPT. Torch-free."""

from __future__ import annotations

from halfmoon.architectures.config_fields import Raw, count, flag, num_layers_of, required
from halfmoon.architectures.model_config import ModelConfig
from halfmoon.errors import Incompatible

_ACTIVATIONS = ("relu", "gelu", "gelu_new")


def parse_opt(raw: Raw) -> ModelConfig:
    """Raises Incompatible for what we do not compute."""
    hidden, heads = required(raw, "hidden_size"), required(raw, "num_attention_heads")
    activation = raw.get("activation_function", "relu")
    if activation not in _ACTIVATIONS:
        raise Incompatible(
            f"config.json: activation_function: activation {activation!r} is not supported; "
            f"supported: {', '.join(_ACTIVATIONS)}",
            param="activation_function",
        )
    if hidden % heads:
        raise Incompatible(
            f"config.json: hidden_size {hidden} is not a multiple of {heads} attention heads (num_attention_heads)",
            param="hidden_size",
        )
    bias = flag(raw, "enable_bias", True)
    norm_before = flag(raw, "do_layer_norm_before", True)
    max_positions = count(raw, "max_position_embeddings", 2048)
    return ModelConfig(
        architecture="OPTForCausalLM",
        family="opt",
        vocab_size=required(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=required(raw, "ffn_dim"),
        num_layers=num_layers_of(raw),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        max_positions=max_positions,
        context_tokens=max_positions,
        activation=activation,
        norm_eps=1e-5,
        tie_word_embeddings=flag(raw, "tie_word_embeddings", True),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        embed_proj_dim=count(raw, "word_embed_proj_dim", hidden),
        norm_before=norm_before,
        final_norm=norm_before and not flag(raw, "_remove_final_layer_norm", False),
        norm_affine=flag(raw, "layer_norm_elementwise_affine", True),
    )
