"""What of a model decides its cost: sizes, from a small catalogue or from a Hugging Face config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from halfmoon.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense transformer."""

    name: str
    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    mlp_matrices: int = 3  # 2 without a gate
    tied_embeddings: bool = False
    bytes_per_weight: float = 2.0
    bytes_per_kv: float = 2.0

    @property
    def layer_params(self) -> float:
        """Weights of all layers: what each token is multiplied with."""
        attention = 2 * self.hidden * self.head_dim * (self.num_heads + self.num_kv_heads)
        return float(self.num_layers * (attention + self.mlp_matrices * self.hidden * self.intermediate))

    @property
    def head_params(self) -> float:
        """Weights of the output head: what each sampled token is multiplied with."""
        return float(self.vocab * self.hidden)

    @property
    def weight_bytes(self) -> float:
        """All weights."""
        heads = self.head_params * (1 if self.tied_embeddings else 2)
        return (self.layer_params + heads) * self.bytes_per_weight

    @property
    def kv_bytes_per_token(self) -> float:
        """K and V of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_kv


MODELS: MappingProxyType[str, ModelShape] = MappingProxyType(
    {
        one.name: one
        for one in (
            ModelShape("opt-13b", 40, 5120, 40, 40, 128, 20480, 50272, 2, tied_embeddings=True),
            ModelShape("opt-66b", 64, 9216, 72, 72, 128, 36864, 50272, 2, tied_embeddings=True),
            ModelShape("opt-175b", 96, 12288, 96, 96, 128, 49152, 50272, 2, tied_embeddings=True),
            ModelShape("bloom-176b", 70, 14336, 112, 112, 128, 57344, 250880, 2, tied_embeddings=True),
            ModelShape("llama-2-70b", 80, 8192, 64, 8, 128, 28672, 32000),
            ModelShape("llama-3-8b", 32, 4096, 32, 8, 128, 14336, 128256),
            ModelShape("llama-3-70b", 80, 8192, 64, 8, 128, 28672, 128256),
            ModelShape("smollm2-135m", 30, 576, 9, 3, 64, 1536, 49152, tied_embeddings=True),
        )
    }
)


def model_shape(name: str) -> ModelShape:
    """Of a known model, or of the config.json at (or in) a path. Raises InvalidRequest naming the known ones."""
    if name.lower() in MODELS:
        return MODELS[name.lower()]
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise InvalidRequest(
            f"unknown model {name!r}: known are {', '.join(MODELS)}, or the path of a config.json", param="model"
        )
    try:
        return _from_config(path.parent.name, json.loads(path.read_text()))
    except (OSError, KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise InvalidRequest(f"{path} does not describe a transformer: {error!r}", param="model") from error


def _from_config(name: str, config: dict[str, Any]) -> ModelShape:
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    is_opt = config.get("model_type") == "opt"
    return ModelShape(
        name,
        int(config["num_hidden_layers"]),
        hidden,
        heads,
        int(config.get("num_key_value_heads") or heads),
        int(config.get("head_dim") or hidden // heads),
        int(config["ffn_dim" if is_opt else "intermediate_size"]),
        int(config["vocab_size"]),
        2 if is_opt else 3,
        bool(config.get("tie_word_embeddings", is_opt)),
    )
