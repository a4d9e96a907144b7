"""A model's shape by name: from the catalogue, from a local config.json, or from a Hugging Face repository."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.request import Request, urlopen

from halfmoon.architectures.weight_format import FORMATS
from halfmoon.errors import InvalidRequest
from halfmoon.kv.kv_layout import row_items
from halfmoon.sim.latency_sources.config_shape import parse_shape, read_shape, shape_of_config
from halfmoon.sim.latency_sources.model_shape import ModelShape

_HUB_TIMEOUT_S = 5.0
_SUFFIXES = ("-hf", "-chat", "-instruct", "-it", "-base")


def _gated(name: str, layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocab: int, **more: Any) -> Any:
    return ModelShape(name, layers, hidden, heads, kv_heads, more.pop("head_dim", 128), inner, vocab, **more)


def _opt(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    inner = 4 * hidden
    return ModelShape(name, layers, hidden, heads, heads, hidden // heads, inner, 50272, 2, True, 2048)


def _parsed(name: str, family: str, layers: int, hidden: int, heads: int, inner: int, vocab: int, **more: Any) -> Any:
    """A model by what its config.json says."""
    config: dict[str, Any] = {
        "model_type": family,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        **more,
    }
    return shape_of_config(name, config)


def _deepseek(name: str, family: str, layers: int, hidden: int, heads: int, inner: int, vocab: int, **more: Any) -> Any:
    attention = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    known = {"max_position_embeddings": 163840, "num_key_value_heads": heads, **attention, **more}
    return _parsed(name, family, layers, hidden, heads, inner, vocab, **known)


def _mixture(num_experts: int, num_chosen: int, inner: int, **more: Any) -> dict[str, Any]:
    return {"num_experts": num_experts, "num_experts_per_tok": num_chosen, "moe_intermediate_size": inner, **more}


def _qwen3(kv_heads: int) -> dict[str, Any]:
    return {"num_key_value_heads": kv_heads, "head_dim": 128, "norm_topk_prob": True, "max_position_embeddings": 40960}


def _groups(num_groups: int, num_chosen: int, dense: int, shared: int) -> dict[str, Any]:
    method = "group_limited_greedy" if num_groups > 1 else "greedy"
    chosen = {"n_group": num_groups, "topk_group": num_chosen, "topk_method": method, "routed_scaling_factor": 1.0}
    return {**chosen, "first_k_dense_replace": dense, "n_shared_experts": shared}


_V3 = {
    **_mixture(256, 8, 2048, n_group=8, topk_group=4, first_k_dense_replace=3, n_shared_experts=1, q_lora_rank=1536),
    "num_nextn_predict_layers": 1,
    "rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096},
    "quantization_config": {"quant_method": "fp8"},
}
_SMOL = {"head_dim": 64, "tied_embeddings": True, "context_tokens": 8192}
_LONG = {"context_tokens": 131072}

_KV_BYTES: Mapping[str, Callable[[int], float]] = MappingProxyType(
    {
        "int8-kv": lambda head_dim: row_items(head_dim, "int8") / head_dim,
        "fp8-kv": lambda head_dim: row_items(head_dim, "fp8") / head_dim,
    }
)
"""Bytes of a value of KV: our engine's rows have a scale each. vLLM's fp8 has one for all, and is that much smaller."""

MODELS: MappingProxyType[str, ModelShape] = MappingProxyType(
    {
        one.name: one
        for one in (
            _opt("opt-13b", 40, 5120, 40),
            _opt("opt-30b", 48, 7168, 56),
            _opt("opt-66b", 64, 9216, 72),
            _opt("opt-175b", 96, 12288, 96),
            ModelShape("bloom-176b", 70, 14336, 112, 112, 128, 57344, 250880, 2, True, 2048),
            _gated("llama-2-7b", 32, 4096, 32, 32, 11008, 32000, context_tokens=4096),
            _gated("llama-2-13b", 40, 5120, 40, 40, 13824, 32000, context_tokens=4096),
            _gated("llama-2-70b", 80, 8192, 64, 8, 28672, 32000, context_tokens=4096),
            _gated("llama-3-8b", 32, 4096, 32, 8, 14336, 128256, context_tokens=8192),
            _gated("llama-3-70b", 80, 8192, 64, 8, 28672, 128256, context_tokens=8192),
            _gated("llama-3.1-8b", 32, 4096, 32, 8, 14336, 128256, **_LONG),
            _gated("llama-3.1-70b", 80, 8192, 64, 8, 28672, 128256, **_LONG),
            _gated("llama-3.1-405b", 126, 16384, 128, 8, 53248, 128256, **_LONG),
            _gated("llama-3.2-1b", 16, 2048, 32, 8, 8192, 128256, head_dim=64, tied_embeddings=True, **_LONG),
            _gated("llama-3.2-3b", 28, 3072, 24, 8, 8192, 128256, tied_embeddings=True, **_LONG),
            _gated("llama-3.3-70b", 80, 8192, 64, 8, 28672, 128256, **_LONG),
            _gated("mistral-7b-v0.3", 32, 4096, 32, 8, 14336, 32768, context_tokens=32768),
            _gated("qwen2.5-7b", 28, 3584, 28, 4, 18944, 152064, context_tokens=32768),
            _gated("qwen2.5-14b", 48, 5120, 40, 8, 13824, 152064, context_tokens=32768),
            _gated("qwen2.5-32b", 64, 5120, 40, 8, 27648, 152064, context_tokens=32768),
            _gated("qwen2.5-72b", 80, 8192, 64, 8, 29568, 152064, context_tokens=32768),
            _gated("qwen3-8b", 36, 4096, 32, 8, 12288, 151936, context_tokens=40960),
            _gated("qwen3-14b", 40, 5120, 40, 8, 17408, 151936, context_tokens=40960),
            _gated("qwen3-32b", 64, 5120, 64, 8, 25600, 151936, context_tokens=40960),
            _parsed(
                "mistral-7b-v0.1",
                "mistral",
                32,
                4096,
                32,
                14336,
                32000,
                num_key_value_heads=8,
                sliding_window=4096,
                max_position_embeddings=32768,
            ),
            _parsed("phi-3-mini", "phi3", 32, 3072, 32, 8192, 32064, sliding_window=2047),
            _parsed("phi-3-medium", "phi3", 40, 5120, 40, 17920, 32064, num_key_value_heads=10, sliding_window=2047),
            _parsed(
                "phi-4", "phi3", 40, 5120, 40, 17920, 100352, num_key_value_heads=10, max_position_embeddings=16384
            ),
            _parsed("gemma-2-2b", "gemma2", 26, 2304, 8, 9216, 256000, num_key_value_heads=4),
            _parsed("gemma-2-9b", "gemma2", 42, 3584, 16, 14336, 256000, num_key_value_heads=8),
            _parsed(
                "gemma-2-27b",
                "gemma2",
                46,
                4608,
                32,
                36864,
                256000,
                num_key_value_heads=16,
                head_dim=128,
                query_pre_attn_scalar=144,
            ),
            _parsed(
                "gemma-3-1b",
                "gemma3_text",
                26,
                1152,
                4,
                6912,
                262144,
                num_key_value_heads=1,
                sliding_window=512,
                max_position_embeddings=32768,
            ),
            _parsed("mixtral-8x7b", "mixtral", 32, 4096, 32, 14336, 32000, max_position_embeddings=32768),
            _parsed("mixtral-8x22b", "mixtral", 56, 6144, 48, 16384, 32768, max_position_embeddings=65536),
            _parsed(
                "qwen1.5-moe-a2.7b",
                "qwen2_moe",
                24,
                2048,
                16,
                5632,
                151936,
                **_mixture(60, 4, 1408),
                shared_expert_intermediate_size=5632,
                max_position_embeddings=8192,
            ),
            _parsed(
                "qwen2-57b-a14b",
                "qwen2_moe",
                28,
                3584,
                28,
                18944,
                151936,
                **_mixture(64, 8, 2560),
                shared_expert_intermediate_size=20480,
                num_key_value_heads=4,
                max_position_embeddings=32768,
            ),
            _parsed("qwen3-30b-a3b", "qwen3_moe", 48, 2048, 32, 6144, 151936, **_mixture(128, 8, 768), **_qwen3(4)),
            _parsed("qwen3-235b-a22b", "qwen3_moe", 94, 4096, 64, 12288, 151936, **_mixture(128, 8, 1536), **_qwen3(4)),
            _deepseek(
                "deepseek-v2-lite",
                "deepseek_v2",
                27,
                2048,
                16,
                10944,
                102400,
                **_mixture(64, 6, 1408),
                **_groups(1, 1, 1, 2),
                q_lora_rank=None,
            ),
            _deepseek(
                "deepseek-v2",
                "deepseek_v2",
                60,
                5120,
                128,
                12288,
                102400,
                **_mixture(160, 6, 1536),
                **_groups(8, 3, 1, 2),
                q_lora_rank=1536,
            ),
            _deepseek("deepseek-v3", "deepseek_v3", 61, 7168, 128, 18432, 129280, **_V3),
            _deepseek("deepseek-r1", "deepseek_v3", 61, 7168, 128, 18432, 129280, **_V3),
            _gated("smollm2-135m", 30, 576, 9, 3, 1536, 49152, **_SMOL),
            _gated("smollm2-360m", 32, 960, 15, 5, 2560, 49152, **_SMOL),
            _gated("smollm2-1.7b", 24, 2048, 32, 32, 8192, 49152, **_SMOL),
        )
    }
)
_ALIASES = MappingProxyType(
    {
        "demo": "smollm2-135m",
        "mixtral-8x7b-v0.1": "mixtral-8x7b",
        "mixtral-8x22b-v0.1": "mixtral-8x22b",
        "phi-3-mini-4k": "phi-3-mini",
        "phi-3-medium-4k": "phi-3-medium",
        "deepseek-v3-0324": "deepseek-v3",
        "deepseek-r1-0528": "deepseek-r1",
    }
)


def known_shape(name: str) -> ModelShape | None:
    """A shape of the catalogue. `llama-3.1-8b` and meta-llama/Llama-3.1-8B-Instruct are the same.

    See `model_shape` for what may follow the name. Raises InvalidRequest for a format that is unknown.
    """
    base, *marks = name.split("+")
    short = base.lower().rsplit("/", 1)[-1].removeprefix("meta-")
    for suffix in _SUFFIXES:
        short = short.replace(suffix, "") if base.count("/") == 1 else short
    known = MODELS.get(_ALIASES.get(short, short))
    return None if known is None else _written(known, marks)


def is_short_name(name: str) -> bool:
    """Whether only the catalogue knows a model by this name: nothing can be loaded or fetched by it."""
    base = name.partition("+")[0]
    is_elsewhere = base == "demo" or "/" in base or os.path.exists(os.path.expanduser(base))
    return not is_elsewhere and known_shape(name) is not None


def model_shape(name: str) -> ModelShape:
    """The shape of a known model, of a config.json (or the directory with one), or of a Hugging Face id.

    After a +, a name may say how weights (`+awq`) or KV (`+int8-kv`) are written instead. Fetches the config.json of an
    id, which blocks for a few seconds if the hub does not answer. Raises InvalidRequest, which names the known models.
    """
    # `Path.exists` raises for a name that is too long, `Path.expanduser` for a user that does not exist
    base, *marks = (name,) if os.path.exists(os.path.expanduser(name)) else name.split("+")
    path = Path(os.path.expanduser(base))
    if base and os.path.exists(path) and base.lower() not in (*MODELS, *_ALIASES):
        return _written(read_shape(path / "config.json" if path.is_dir() else path), marks)
    known = known_shape(name)
    if known is not None:
        return known
    if base.count("/") == 1 and not base.startswith((".", "~", "/")) and not base.endswith(".json"):
        return _written(parse_shape(_fetched(base), base, f"the config.json of {base}"), marks)
    raise InvalidRequest(f"unknown model {base!r}: {_choices()}", param="model")


def _written(shape: ModelShape, marks: list[str]) -> ModelShape:
    """The model with other weights or KV."""
    for mark in marks:
        name = f"{shape.name}+{mark}"
        if mark in _KV_BYTES:
            shape = replace(shape, name=name, bytes_per_kv=_KV_BYTES[mark](shape.head_dim))
        elif mark in FORMATS:
            shape = replace(shape, name=name, weights=FORMATS[mark])
        else:
            known = ", ".join((*FORMATS, *_KV_BYTES))
            raise InvalidRequest(f"{name}: unknown format {mark!r}; known are {known}", param="model")
    return shape


def _choices() -> str:
    return f"known are {', '.join((*_ALIASES, *MODELS))}; or give the path of a config.json, or a Hugging Face id"


def _fetched(name: str) -> str:
    """Makes one request, without the hub client's retries, because a user is waiting."""
    from huggingface_hub import hf_hub_url, try_to_load_from_cache
    from huggingface_hub.utils._headers import build_hf_headers

    try:
        kept = try_to_load_from_cache(name, "config.json")
        if isinstance(kept, str):
            return Path(kept).read_text()
        asked = Request(hf_hub_url(name, "config.json"), headers=build_hf_headers())
        with urlopen(asked, timeout=_HUB_TIMEOUT_S) as answer:
            return str(answer.read().decode())
    except (OSError, ValueError) as error:  # offline, absent, gated, or not an id
        raise InvalidRequest(
            f"Hugging Face did not give the config.json of {name!r} ({type(error).__name__}): {_choices()}",
            param="model",
        ) from error
