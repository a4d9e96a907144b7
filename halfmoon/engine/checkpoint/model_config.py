"""The part of a Hugging Face `config.json` that decides the computation; what we cannot compute exactly is refused.

Torch-free. Absent keys take the defaults of the architecture's transformers configuration class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from halfmoon.errors import Incompatible

Activation = Literal["silu", "relu", "gelu", "gelu_new"]
RopeType = Literal["default", "linear", "dynamic", "yarn", "llama3"]

_ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
_OPT_ACTIVATIONS = ("relu", "gelu", "gelu_new")


@dataclass(frozen=True, slots=True)
class _Defaults:
    """Defaults of an architecture's configuration class for keys absent from `config.json`."""

    max_positions: int
    num_kv_heads: int | None = None  # None: as many as query heads
    qkv_bias: bool = False
    output_bias_follows_qkv: bool = True
    qk_norm: bool = False


_LLAMA_FAMILY: Mapping[str, _Defaults] = MappingProxyType(
    {
        "LlamaForCausalLM": _Defaults(2048),
        "MistralForCausalLM": _Defaults(131072, num_kv_heads=8),
        "Qwen2ForCausalLM": _Defaults(32768, num_kv_heads=32, qkv_bias=True, output_bias_follows_qkv=False),
        "Qwen3ForCausalLM": _Defaults(32768, num_kv_heads=32, qk_norm=True),
    }
)
_BY_MODEL_TYPE: Mapping[str, str] = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "opt": "OPTForCausalLM",
    }
)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer of the Llama or the OPT family. Sizes count elements, not bytes."""

    architecture: str
    family: Literal["llama", "opt"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    context_tokens: int  # longest sequence for which our attention is exact
    activation: Activation
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    rope_type: RopeType = "default"
    rope_theta: float = 10000.0
    rope_parameters: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    embed_proj_dim: int = 0  # OPT: width of the embedding when it is projected to `hidden_size`
    norm_before: bool = True  # OPT: layer norm before (True) or after each half of a layer
    final_norm: bool = True
    norm_affine: bool = True

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key (or value) heads."""
        return self.num_kv_heads * self.head_dim


def parse_model_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Parses and checks a `config.json`. Raises Incompatible, naming what it says and what is supported."""
    architecture = _architecture(raw)
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise Incompatible(f"the checkpoint is quantised ({method}); supported: float32, float16, bfloat16, GGUF")
    if architecture == "OPTForCausalLM":
        return _parse_opt(raw)
    return _parse_llama_family(raw, architecture, _LLAMA_FAMILY[architecture])


def _architecture(raw: Mapping[str, Any]) -> str:
    named = list(raw.get("architectures") or [])
    supported = (*_LLAMA_FAMILY, "OPTForCausalLM")
    name = named[0] if named else _BY_MODEL_TYPE.get(str(raw.get("model_type")), str(raw.get("model_type")))
    if name not in supported:
        raise Incompatible(f"architecture {name!r} is not supported; supported: {', '.join(supported)}")
    return str(name)


def _required(raw: Mapping[str, Any], name: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or value < 1:
        raise Incompatible(f"config.json: {name} must be a positive integer, got {value!r}", param=name)
    return value


def _refuse(raw: Mapping[str, Any], name: str, allowed: tuple[object, ...]) -> None:
    if name in raw and raw[name] not in allowed:
        raise Incompatible(f"config.json: {name}={raw[name]!r} is not supported; supported: {allowed}", param=name)


def _parse_llama_family(raw: Mapping[str, Any], architecture: str, defaults: _Defaults) -> ModelConfig:
    _refuse(raw, "hidden_act", ("silu",))
    _refuse(raw, "partial_rotary_factor", (1, 1.0, None))
    hidden, heads = _required(raw, "hidden_size"), _required(raw, "num_attention_heads")
    kv_heads = raw.get("num_key_value_heads") or defaults.num_kv_heads or heads
    head_dim = raw.get("head_dim") or (128 if defaults.qk_norm else hidden // heads)
    if heads % kv_heads:
        raise Incompatible(f"config.json: {heads} attention heads are not a multiple of {kv_heads} key-value heads")
    if head_dim % 2:
        raise Incompatible(f"config.json: rotary embedding needs an even head_dim, got {head_dim}", param="head_dim")
    attention_bias = bool(raw.get("attention_bias", False)) and architecture != "MistralForCausalLM"
    rope = _rope_parameters(raw)
    max_positions = int(raw.get("max_position_embeddings") or defaults.max_positions)
    return ModelConfig(
        architecture=architecture,
        family="llama",
        vocab_size=_required(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_required(raw, "intermediate_size"),
        num_layers=_required(raw, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=max_positions,
        context_tokens=_context_tokens(raw, architecture, max_positions, rope),
        activation="silu",
        norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=defaults.qkv_bias or attention_bias,
        output_bias=attention_bias and defaults.output_bias_follows_qkv,
        mlp_bias=bool(raw.get("mlp_bias", False)) and architecture == "LlamaForCausalLM",
        qk_norm=defaults.qk_norm,
        rope_type=rope["rope_type"],
        rope_theta=float(rope["rope_theta"]),
        rope_parameters=MappingProxyType(rope),
    )


def _rope_parameters(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Unifies three spellings: `rope_parameters` (transformers 5), `rope_scaling` with `rope_type` or with `type`."""
    rope = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", None) or "default"
    rope.pop("type", None)
    rope["rope_theta"] = rope.get("rope_theta") or raw.get("rope_theta") or 10000.0
    if rope["rope_type"] not in _ROPE_TYPES:
        raise Incompatible(f"rope type {rope['rope_type']!r} is not supported; supported: {', '.join(_ROPE_TYPES)}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise Incompatible("partial rotary embedding is not supported; supported: partial_rotary_factor 1")
    return rope


def _context_tokens(raw: Mapping[str, Any], architecture: str, max_positions: int, rope: Mapping[str, Any]) -> int:
    """Positions that the rotary embedding serves, cut at the sliding window, inside which full attention is equal."""
    if rope["rope_type"] == "yarn":
        original = int(rope.get("original_max_position_embeddings") or max_positions)
        max_positions = max(max_positions, int(original * float(rope.get("factor", 1.0))))
    window = raw.get("sliding_window", None if architecture == "LlamaForCausalLM" else 4096)
    return min(max_positions, int(window)) if window and _window_in_force(raw, architecture) else max_positions


def _window_in_force(raw: Mapping[str, Any], architecture: str) -> bool:
    if architecture == "MistralForCausalLM":
        return True
    if not raw.get("use_sliding_window", False):
        return False
    if raw.get("layer_types"):
        return "sliding_attention" in raw["layer_types"]
    return int(raw.get("max_window_layers", 28)) < _required(raw, "num_hidden_layers")


def _parse_opt(raw: Mapping[str, Any]) -> ModelConfig:
    hidden, heads = _required(raw, "hidden_size"), _required(raw, "num_attention_heads")
    activation = raw.get("activation_function", "relu")
    if activation not in _OPT_ACTIVATIONS:
        raise Incompatible(f"activation {activation!r} is not supported; supported: {', '.join(_OPT_ACTIVATIONS)}")
    if hidden % heads:
        raise Incompatible(f"config.json: hidden_size {hidden} is not a multiple of {heads} attention heads")
    bias = bool(raw.get("enable_bias", True))
    norm_before = bool(raw.get("do_layer_norm_before", True))
    max_positions = int(raw.get("max_position_embeddings", 2048))
    return ModelConfig(
        architecture="OPTForCausalLM",
        family="opt",
        vocab_size=_required(raw, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_required(raw, "ffn_dim"),
        num_layers=_required(raw, "num_hidden_layers"),
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
