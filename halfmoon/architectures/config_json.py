"""The part of a Hugging Face `config.json` that decides the computation; what we cannot compute exactly is refused.

Torch-free. Absent keys take the defaults of the architecture's transformers configuration class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

from halfmoon.architectures.config_fields import Raw, listed
from halfmoon.architectures.deepseek_config import DEEPSEEK_FAMILY, parse_deepseek
from halfmoon.architectures.gemma_config import GEMMA_FAMILY, parse_gemma
from halfmoon.architectures.llama_config import LLAMA_FAMILY, parse_llama_family
from halfmoon.architectures.model_config import ModelConfig
from halfmoon.architectures.opt_config import parse_opt
from halfmoon.errors import Incompatible

_PARSERS: Mapping[str, Callable[[Raw], ModelConfig]] = MappingProxyType(
    {
        **{name: partial(parse_llama_family, architecture=name) for name in LLAMA_FAMILY},
        **{name: partial(parse_gemma, architecture=name) for name in GEMMA_FAMILY},
        **{name: partial(parse_deepseek, architecture=name) for name in DEEPSEEK_FAMILY},
        "OPTForCausalLM": parse_opt,
    }
)
FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "llama": "LlamaForCausalLM",
        "mistral": "MistralForCausalLM",
        "qwen2": "Qwen2ForCausalLM",
        "qwen3": "Qwen3ForCausalLM",
        "phi3": "Phi3ForCausalLM",
        "mixtral": "MixtralForCausalLM",
        "qwen2_moe": "Qwen2MoeForCausalLM",
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "gemma2": "Gemma2ForCausalLM",
        "gemma3_text": "Gemma3ForCausalLM",
        "deepseek_v2": "DeepseekV2ForCausalLM",
        "deepseek_v3": "DeepseekV3ForCausalLM",
        "opt": "OPTForCausalLM",
    }
)
"""Architectures by `model_type`."""


def parse_model_config(raw: Raw) -> ModelConfig:
    """Parses and checks a `config.json`. Raises Incompatible, naming what it says and what is supported."""
    config = parse_architecture(raw)
    quantisation = raw.get("quantization_config")
    if quantisation:
        method = quantisation.get("quant_method", "unknown") if isinstance(quantisation, Mapping) else "unknown"
        raise Incompatible(
            f"the checkpoint is quantised ({method}); supported: float32, float16, bfloat16, GGUF",
            param="quantization_config",
        )
    return config


def parse_architecture(raw: Raw) -> ModelConfig:
    """What is computed, however weights are written: for plans, whose engine may be vLLM. Raises Incompatible."""
    return _PARSERS[_architecture(raw)](raw)


def _architecture(raw: Raw) -> str:
    named = listed(raw, "architectures", str)
    name = named[0] if named else FAMILIES.get(str(raw.get("model_type")), str(raw.get("model_type")))
    if name not in _PARSERS:
        raise Incompatible(
            f"architecture {name!r} is not supported; supported: {', '.join(_PARSERS)}", param="architectures"
        )
    return str(name)
