"""A `config.json` is read as transformers reads it, and what we cannot compute is refused by name."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from halfmoon.architectures.config_json import parse_model_config
from halfmoon.errors import Incompatible

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


@pytest.mark.parametrize(
    "config_class",
    [LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config, Phi3Config, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig],
)
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


@pytest.mark.parametrize("config_class", [Gemma2Config, Gemma3TextConfig])
def test_gemma_defaults_are_those_of_transformers(config_class: Any) -> None:
    full = config_class()
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    config = parse_model_config({name: getattr(full, name) for name in names} | {"model_type": full.model_type})
    assert (config.num_kv_heads, config.head_dim) == (full.num_key_value_heads, full.head_dim)
    assert config.max_positions == full.max_position_embeddings
    assert config.score_scale == full.query_pre_attn_scalar**-0.5
    assert config.attention_softcap == full.attn_logit_softcapping
    assert config.logit_softcap == full.final_logit_softcapping
    assert config.tie_word_embeddings == full.tie_word_embeddings
    sliding = [kind == "sliding_attention" for kind in full.layer_types]
    assert config.windows == tuple(full.sliding_window if one else None for one in sliding)


@pytest.mark.parametrize("config_class", [DeepseekV2Config, DeepseekV3Config])
def test_deepseek_defaults_are_those_of_transformers(config_class: Any) -> None:
    full = config_class(num_experts_per_tok=8)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    named = {name: getattr(full, name) for name in (*names, "num_experts_per_tok")}
    config = parse_model_config(named | {"model_type": full.model_type})
    latent, experts = config.latent, config.experts
    assert latent is not None
    assert experts is not None
    assert (latent.size, latent.rotary_size) == (full.kv_lora_rank, full.qk_rope_head_dim)
    assert (latent.plain_size, latent.value_size) == (full.qk_nope_head_dim, full.v_head_dim)
    assert latent.query_size == full.q_lora_rank
    assert (config.num_kv_heads, 2 * config.head_dim) == (1, 512 + 64)
    assert experts.num_experts == full.n_routed_experts
    assert experts.intermediate_size == full.moe_intermediate_size
    assert experts.shared_intermediate_size == full.n_shared_experts * full.moe_intermediate_size
    assert experts.in_layer.count(False) == full.first_k_dense_replace
    assert (experts.num_groups, experts.num_chosen_groups) == (full.n_group or 1, full.topk_group or 1)
    assert experts.weight_scale == full.routed_scaling_factor
    assert config.max_positions == full.max_position_embeddings


def test_gemma_3_has_two_rotations_in_either_spelling() -> None:
    raw = {**LLAMA, "architectures": ["Gemma3ForCausalLM"]}
    hub = {"rope_theta": 5000.0, "rope_local_base_freq": 300.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    own = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        }
    }
    for spelling in (hub, own):
        config = parse_model_config({**raw, **spelling})
        assert (config.rope_type, config.rope_theta, config.window_rope_theta) == ("linear", 5000.0, 300.0)


def test_the_context_of_longrope_ends_where_its_factors_change() -> None:
    scaling = {"type": "su", "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    raw = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "rope_scaling": scaling}
    long = {"max_position_embeddings": 131072, "original_max_position_embeddings": 4096}
    config = parse_model_config({**raw, **long})
    assert (config.rope_type, config.context_tokens, config.rope_parameters["factor"]) == ("longrope", 4096, 32.0)


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
    ("change", "context_tokens", "windows"),
    [
        ({"max_position_embeddings": 1000}, 1000, ()),
        ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 9000}, 9000, (4096, 4096)),
        ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 4096}, 4096, ()),
        ({"architectures": ["MistralForCausalLM"], "max_position_embeddings": 9000, "sliding_window": None}, 9000, ()),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 50}, 32768, ()),
        ({"architectures": ["Qwen2ForCausalLM"], "sliding_window": 50, "use_sliding_window": True}, 32768, ()),
        ({"architectures": ["Phi3ForCausalLM"], "sliding_window": 50}, 4096, (50, 50)),
        ({"architectures": ["Gemma2ForCausalLM"], "sliding_window": 50}, 8192, (50, None)),
        ({"architectures": ["Gemma3ForCausalLM"], "sliding_window_pattern": 2}, 131072, (4096, None)),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "sliding_window": 50,
                "use_sliding_window": True,
                "max_window_layers": 1,
            },
            32768,
            (None, 50),
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}},
            4000,
            (),
        ),
    ],
)
def test_context_and_windows(change: dict[str, Any], context_tokens: int, windows: tuple[int | None, ...]) -> None:
    if change.get("architectures", [""])[0] != "LlamaForCausalLM":
        change = {"num_key_value_heads": 2, **change}
    config = parse_model_config({**LLAMA, **change})
    assert (config.context_tokens, config.windows) == (context_tokens, windows)


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
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "num_key_value_heads": 2,
                "layer_types": ["full_attention", "linear_attention"],
                "use_sliding_window": True,
            },
            "linear_attention.*supported: full_attention and sliding_attention",
        ),
        ({"architectures": ["DeepseekV3ForCausalLM"], "attention_bias": True}, "attention_bias=True is not supported"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 32}, "a latent of 32 numbers with 64 rotated"),
        ({"architectures": ["DeepseekV3ForCausalLM"], "n_group": 7}, "4 of 7 groups cannot be chosen of 256 experts"),
        (
            {"architectures": ["MixtralForCausalLM"], "num_key_value_heads": 2, "num_experts_per_tok": 9},
            "9 experts cannot be chosen of 8",
        ),
        ({"architectures": ["Gemma3ForConditionalGeneration"]}, "not supported; supported: .*Gemma3ForCausalLM"),
        ({"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "gelu"}, "hidden_activation='gelu' is not"),
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


CONFIG_CLASSES = [
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
    Phi3Config,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    Gemma2Config,
    Gemma3TextConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    OPTConfig,
]
ROPES: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128, "attention_factor": 1.0}
    | {"beta_fast": 32, "beta_slow": 1, "mscale": 0.7, "mscale_all_dim": 0.9},
    {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 64},
    {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [4.0] * 48, "factor": 2.0},
]
NO_KEY_TAKES_THESE: list[Any] = [-1.5, -7, math.nan, math.inf, 10**400, "4096", ["x"], [None], {"a": 1}]
# A key that takes any object, or the name of something, has other words for what it does not take.
NAMES_AND_OBJECTS = {"architectures", "model_type", "quantization_config", "rope_parameters", "rope_scaling"}


class _Read(dict[str, Any]):
    """Remembers which keys are looked up."""

    def __init__(self, raw: dict[str, Any]) -> None:
        super().__init__(raw)
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return super().get(name, default)


def _complete(config_class: Any) -> dict[str, Any]:
    raw: dict[str, Any] = config_class(num_experts_per_tok=6).to_dict()
    return {**raw, "architectures": None}


def _broken(config_class: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """A key, and a configuration where it has a value that no key takes."""
    raw = _complete(config_class)
    read = _Read(raw)
    parse_model_config(read)
    for name in sorted(read.names - NAMES_AND_OBJECTS):
        yield from ((name, {**raw, name: value}) for value in NO_KEY_TAKES_THESE)
    if config_class is OPTConfig:
        return
    plain = {name: value for name, value in raw.items() if name != "rope_parameters"}
    for rope in ROPES:
        if rope["rope_type"] == "longrope" and config_class is not Phi3Config:
            continue
        if rope["rope_type"] == "yarn" and config_class is Phi3Config:
            continue
        for name in rope:
            yield from ((name, {**plain, "rope_scaling": {**rope, name: value}}) for value in NO_KEY_TAKES_THESE)


@pytest.mark.parametrize("config_class", CONFIG_CLASSES)
def test_a_value_of_the_wrong_kind_is_refused_by_its_key(config_class: Any) -> None:
    for name, raw in _broken(config_class):
        with pytest.raises(Incompatible, match=name):
            parse_model_config(raw)


@pytest.mark.parametrize("config_class", CONFIG_CLASSES)
@pytest.mark.parametrize("name", sorted(NAMES_AND_OBJECTS))
def test_names_and_objects_of_the_wrong_kind_are_refused(config_class: Any, name: str) -> None:
    for value in (-1.5, "4096", ["x"], [None], math.nan):
        raw = _complete(config_class)
        read = _Read(raw)
        parse_model_config(read)
        if name not in read.names or name == "rope_scaling":
            continue
        with pytest.raises(Incompatible):
            parse_model_config({**raw, name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 0}, "num_key_value_heads must be a positive integer, got 0"),
        ({"hidden_size": 2}, "hidden_size leaves nothing for each of 4 attention heads"),
        ({"head_dim": -16}, "head_dim"),
        ({"head_dim": 0}, "head_dim must be a positive integer, got 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be at most 65536"),
        ({"vocab_size": 1 << 40}, "vocab_size must be a positive integer, at most 2147483647"),
        ({"rope_theta": 0}, "rope_theta must be a positive number, got 0"),
        ({"rope_theta": 1}, "rope_theta must be above 1"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 4.0, "low_freq_factor": 4.0, "high_freq_factor": 1.0}},
            "low_freq_factor must be below high_freq_factor, 1.0, got 4.0",
        ),
        ({"rope_theta": "x" * 1000}, "rope_theta must be a positive number, got 'x{79}…"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object, got 'linear'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type linear needs factor"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor must be a positive number, got 0"),
        ({"rope_scaling": {"type": "yarn", "factor": 1e9}}, "factor must be at most 2147483647 by original_max"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
        ({"architectures": "LlamaForCausalLM"}, "architectures must be a list of texts, got 'LlamaForCausalLM'"),
        ({"architectures": [["LlamaForCausalLM"]]}, "architectures must be a list of texts"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "mlp_only_layers": "1"}, "mlp_only_layers must be a list of int"),
        (
            {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2, "sliding_window": -1},
            "sliding_window must be an integer from 0 on, got -1",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2, "use_sliding_window": True}
            | {"layer_types": "full_attention"},
            "layer_types must be a list of texts",
        ),
        ({"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": -4}, "query_pre_attn_scalar must be a pos"),
        (
            {"architectures": ["Phi3ForCausalLM"]}
            | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 7, "long_factor": [1.0] * 8}},
            "short_factor must have 8 positive numbers, one for two of the 16 rotated ones, got 7",
        ),
        ({"architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.01}, "partial_rotary_factor must leave"),
    ],
)
def test_what_cannot_be_is_not_taken_for_something_else(change: dict[str, Any], message: str) -> None:
    with pytest.raises(Incompatible, match=message):
        parse_model_config({**LLAMA, **change})


@pytest.mark.parametrize("rope", [rope for rope in ROPES if rope["rope_type"] != "longrope"])
def test_null_is_what_an_absent_number_of_a_rotary_embedding_is(rope: dict[str, Any]) -> None:
    given = {name: value for name, value in rope.items() if name != "original_max_position_embeddings"}
    nulls = {"original_max_position_embeddings": None, "partial_rotary_factor": None, "attention_factor": None}
    parsed = parse_model_config({**LLAMA, "rope_scaling": {**nulls, **given}})
    assert parsed == parse_model_config({**LLAMA, "rope_scaling": given})
    assert None not in parsed.rope_parameters.values()


def test_null_is_what_an_absent_key_is_unless_it_means_none() -> None:
    nulls = ("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling")
    assert parse_model_config({**LLAMA, **dict.fromkeys(nulls)}) == parse_model_config(LLAMA)
    assert parse_model_config({**LLAMA, "max_position_embeddings": 2048.0}) == parse_model_config(LLAMA)
    raw = {**LLAMA, "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": None}
    assert parse_model_config(raw).attention_softcap is None
