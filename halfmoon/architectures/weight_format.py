"""How weights in the layers of a checkpoint are written: a `quantization_config`, as bytes and arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from halfmoon.errors import Incompatible

Arithmetic = Literal["bfloat16", "fp8", "int8"]


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """Of the matrices in layers. Embedding, output head and routers stay in 16 bits."""

    name: str
    bytes_per_weight: float  # scales and zero points included
    arithmetic: Arithmetic = "bfloat16"  # of products; weights of fewer bits are widened first


BFLOAT16 = WeightFormat("bfloat16", 2.0)


def _grouped(name: str, bits: int, group: int, zero_bits: int = 0) -> WeightFormat:
    """Each group of a row has a scale in 16 bits, and a zero point in `zero_bits`. `group` -1: a whole row is one."""
    return WeightFormat(name, (bits + ((16 + zero_bits) / group if group > 0 else 0.0)) / 8)


FORMATS: Mapping[str, WeightFormat] = MappingProxyType(
    {
        one.name: one
        for one in (
            BFLOAT16,
            WeightFormat("fp8", 1.0, "fp8"),
            WeightFormat("w8a8", 1.0, "int8"),
            _grouped("int8", 8, -1),  # our engine's, a scale a row
            _grouped("int4", 4, 32),  # our engine's, GGUF's Q4_0: 18 bytes for 32 weights
            _grouped("q8_0", 8, 32),
            WeightFormat("q4_k", 144 / 256),
            WeightFormat("q5_k", 176 / 256),
            WeightFormat("q6_k", 210 / 256),
            _grouped("awq", 4, 128, 4),
            _grouped("gptq", 4, 128, 4),
        )
    }
)
"""Usual formats by name. GGUF's: bytes of a block over its weights; mixed files (Q4_K_M) lie between two."""


def weight_format(config: Any) -> WeightFormat:
    """The format that a `quantization_config` describes; none means bfloat16. Raises Incompatible for unknown ones."""
    if not config:
        return BFLOAT16
    if not isinstance(config, Mapping):
        raise Incompatible(f"config.json: quantization_config must be an object, got {config!r}")
    method = str(config.get("quant_method", "unknown")).lower()
    if method in ("fp8", "fbgemm_fp8"):
        return FORMATS["fp8"]
    if method in ("awq", "gptq"):
        bits = _number(config, "bits", 4)
        return _grouped(method, bits, _number(config, "group_size", 128, least=-1), bits)
    if method == "bitsandbytes":
        is_four = bool(config.get("load_in_4bit", config.get("_load_in_4bit", False)))
        # NF4 has a float32 scale for each 64 weights, or one in 8 bits of which 256 share a float32 (QLoRA, section 3)
        scale_bits = (8 + 32 / 256) / 64 if config.get("bnb_4bit_use_double_quant") else 32 / 64
        return WeightFormat("bitsandbytes", (4 + scale_bits) / 8 if is_four else 1.0)
    if method == "compressed-tensors":
        return _compressed(config)
    raise Incompatible(
        f"config.json: weights quantised by {method!r} are not known; known: fp8, fbgemm_fp8, awq, gptq, bitsandbytes, "
        "compressed-tensors"
    )


def _compressed(config: Mapping[str, Any]) -> WeightFormat:
    """Of several groups of layers the widest counts."""
    groups = config.get("config_groups")
    found = []
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights, inputs = (_object(_object(group).get(name)) for name in ("weights", "input_activations"))
        bits, size = _number(weights, "num_bits", 8), _number(weights, "group_size", -1, least=-1)
        scaled = _grouped("compressed-tensors", bits, size, 0 if weights.get("symmetric", True) else bits)
        if bits != 8 or _number(inputs, "num_bits", 16) != 8:
            found.append(scaled)
        else:
            is_float = weights.get("type") == "float"
            found.append(WeightFormat(scaled.name, scaled.bytes_per_weight, "fp8" if is_float else "int8"))
    if not found:
        raise Incompatible("config.json: quantization_config of compressed-tensors has no config_groups")
    return max(found, key=lambda one: one.bytes_per_weight)


def _object(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(config: Mapping[str, Any], name: str, default: int, least: int = 1) -> int:
    value = config.get(name, default)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 65536 or value == 0:
        raise Incompatible(f"config.json: {name} of quantization_config must be a positive integer, got {value!r}")
    return value
