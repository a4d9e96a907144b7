"""A model's shape by name: from the catalogue, from a local config.json, or from a Hugging Face repository."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.request import Request, urlopen

from halfmoon.errors import InvalidRequest
from halfmoon.sim.latency_sources.model_shape import ModelShape

_HUB_TIMEOUT_S = 5.0
_SUFFIXES = ("-hf", "-chat", "-instruct", "-it", "-base")


def _gated(name: str, layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocab: int, **more: Any) -> Any:
    return ModelShape(name, layers, hidden, heads, kv_heads, more.pop("head_dim", 128), inner, vocab, **more)


def _opt(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    inner = 4 * hidden
    return ModelShape(name, layers, hidden, heads, heads, hidden // heads, inner, 50272, 2, True, 2048)


_SMOL = {"head_dim": 64, "tied_embeddings": True, "context_tokens": 8192}
_LONG = {"context_tokens": 131072}

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
            _gated("smollm2-135m", 30, 576, 9, 3, 1536, 49152, **_SMOL),
            _gated("smollm2-360m", 32, 960, 15, 5, 2560, 49152, **_SMOL),
            _gated("smollm2-1.7b", 24, 2048, 32, 32, 8192, 49152, **_SMOL),
        )
    }
)
_ALIASES = MappingProxyType({"demo": "smollm2-135m"})

SERVED = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "opt": "OPTForCausalLM",
    }
)
"""The served families, by `model_type`, with the architecture of their `config.json`."""


def known_shape(name: str) -> ModelShape | None:
    """A shape of the catalogue. `llama-3.1-8b` and meta-llama/Llama-3.1-8B-Instruct are the same."""
    short = name.lower().rsplit("/", 1)[-1].removeprefix("meta-")
    for suffix in _SUFFIXES:
        short = short.replace(suffix, "") if name.count("/") == 1 else short
    return MODELS.get(_ALIASES.get(short, short))


def model_shape(name: str) -> ModelShape:
    """The shape of a known model, of a config.json (or the directory with one), or of a Hugging Face id.

    Fetches the config.json of an id, which blocks for a few seconds if the hub does not answer. Raises InvalidRequest,
    which names the known models.
    """
    path = Path(name).expanduser()
    if name and path.exists() and name.lower() not in (*MODELS, *_ALIASES):
        return _read_file(path / "config.json" if path.is_dir() else path)
    known = known_shape(name)
    if known is not None:
        return known
    if name.count("/") == 1 and not name.startswith((".", "~", "/")) and not name.endswith(".json"):
        return _read(_fetched(name), name, f"the config.json of {name}")
    raise InvalidRequest(f"unknown model {name!r}: {_choices()}", param="model")


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


def _read_file(path: Path) -> ModelShape:
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}", param="model") from error
    return _read(text, path.resolve().parent.name, str(path))


def _read(text: str, name: str, where: str) -> ModelShape:
    try:
        document = json.loads(text)
        if not isinstance(document, dict):
            raise ValueError("it is not a JSON object")
        return _from_config(name, document)
    except KeyError as error:
        raise InvalidRequest(f"{where} describes no model that is served: {error} is missing", param="model") from error
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{where} describes no model that is served: {error}", param="model") from error


def _from_config(name: str, config: Mapping[str, Any]) -> ModelShape:
    is_opt = _architecture(config) == SERVED["opt"]
    for sign in ("num_experts", "num_local_experts", "n_routed_experts"):
        if config.get(sign):
            raise ValueError(f"it has {sign}, and mixtures of experts are not served")
    if config.get("kv_lora_rank"):
        raise ValueError("it has kv_lora_rank, and latent attention is not served")
    if config.get("quantization_config"):
        raise ValueError("its weights are quantised, which is not served")
    hidden, heads = _positive(config, "hidden_size"), _positive(config, "num_attention_heads")
    kv_heads = _positive(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"{heads} attention heads are not a multiple of {kv_heads} key-value heads")
    return ModelShape(
        name,
        _positive(config, "num_hidden_layers"),
        hidden,
        heads,
        kv_heads,
        _positive(config, "head_dim", max(hidden // heads, 1)),
        _positive(config, "ffn_dim" if is_opt else "intermediate_size"),
        _positive(config, "vocab_size"),
        2 if is_opt else 3,
        bool(config.get("tie_word_embeddings", is_opt)),
        _positive(config, "max_position_embeddings", 0) or None,
    )


def _architecture(config: Mapping[str, Any]) -> str | None:
    """The architecture, which must be one that is served; None if the file does not say."""
    model_type = config.get("model_type")
    result = next(iter(config.get("architectures") or ()), None) or SERVED.get(str(model_type), model_type)
    if result is not None and result not in SERVED.values():
        raise ValueError(f"it is of {result}; served are {', '.join(SERVED.values())}")
    return None if result is None else str(result)


def _positive(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A whole number above 0, or the default if the file has none."""
    value = config[name] if default is None else config.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} must be a whole number above 0, got {value!r}")
    return value
