"""A `config.json` is read as transformers reads it, and what we cannot compute is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import LlamaConfig, MistralConfig, OPTConfig, Qwen2Config, Qwen3Config

from halfmoon.engine.checkpoint.model_config import parse_model_config
from halfmoon.errors import Incompatible

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize("config_class", [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config])
def test_silent_keys_take_the_defaults_of_transformers(config_class: Any) -> None:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    full = config_class()
    raw = {name: getattr(full, name) for name in names} | {"model_type": full.model_type}
    config = parse_model_config(raw)
    assert config.num_kv_heads == full.num_key_value_heads
    assert config.head_dim == (getattr(full, "head_dim", None) or full.hidden_size // full.num_attention_heads)
    assert config.max_positions == full.max_position_embeddings
    assert config.norm_eps == full.rms_norm_eps
    assert config.tie_word_embeddings == full.tie_word_embeddings
    assert config.rope_theta == full.rope_parameters["rope_theta"]


def test_opt_defaults_are_those_of_transformers() -> None:
    full = OPTConfig()
    names = ("vocab_size", "hidden_size", "ffn_dim", "num_hidden_layers", "num_attention_heads")
    config = parse_model_config({name: getattr(full, name) for name in names} | {"model_type": "opt"})
    assert config.embed_proj_dim == full.word_embed_proj_dim
    assert config.activation == full.activation_function
    assert config.norm_before == full.do_layer_norm_before
    assert config.tie_word_embeddings == full.tie_word_embeddings
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (True, True, True)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}, "rope_theta": 500.0},
        {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 500.0},
    ],
)
def test_every_spelling_of_rope(spelling: dict[str, Any]) -> None:
    config = parse_model_config({**LLAMA, **spelling})
    assert (config.rope_type, config.rope_theta, config.rope_parameters["factor"]) == ("linear", 500.0, 2.0)


@pytest.mark.parametrize(
    ("change", "context_tokens"),
    [
        ({"max_position_embeddings": 1000}, 1000),
        ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 9000}, 4096),
        ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 9000, "sliding_window": None}, 9000),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 50}, 32768),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 50, "use_sliding_window": True}, 32768),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 50,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            50,
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}},
            4000,
        ),
    ],
)
def test_context_is_what_full_attention_computes_exactly(change: dict[str, Any], context_tokens: int) -> None:
    if change.get("architectures", [""])[0] != "LlamaForCausalLM":
        change = {"num_key_value_heads": 2, **change}
    assert parse_model_config({**LLAMA, **change}).context_tokens == context_tokens


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel' is not supported; supported: Llama"),
        ({"architectures": None, "model_type": "mamba"}, "'mamba' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised .awq.*supported: float32"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope' is not supported; supported: default, linear"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
        ({"num_key_value_heads": 3}, "4 attention heads are not a multiple of 3"),
        ({"head_dim": 15}, "even head_dim"),
        ({"vocab_size": None}, "vocab_size must be a positive integer"),
    ],
)
def test_what_is_not_supported_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(Incompatible, match=message):
        parse_model_config({**LLAMA, **change})


def test_opt_refuses_an_activation_it_does_not_know() -> None:
    raw = {"model_type": "opt", "vocab_size": 9, "hidden_size": 8, "num_attention_heads": 2, "activation_function": "x"}
    with pytest.raises(Incompatible, match="activation 'x'"):
        parse_model_config(raw)
