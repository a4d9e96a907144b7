"""Rotary position embedding (Su et al., RoFormer), with transformers' frequencies so that scaling variants match.

`dynamic` scaling starts only past `max_positions`, where our context ends: below, it equals the default.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfmoon.architectures.model_config import ModelConfig


class Rotary:
    """Owns the cosine and sine tables, whose angles are float32; rounded to that, then to the model's dtype."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        inv_freq, scaling = _frequencies(config)
        computed_on = "meta" if device == "meta" else "cpu"
        positions = torch.arange(config.context_tokens, dtype=torch.float32, device=computed_on)
        # In float32 the last bit depends on the processor, and on ARM on the number of torch's threads.
        angles = torch.outer(positions, inv_freq.float().to(computed_on)).double()  # [context_tokens, rotary_size / 2]
        self._cos = (angles.cos().float() * scaling).repeat(1, 2).to(device, dtype)  # [context_tokens, rotary_size]
        # The first half is negated here, so that a row needs no negation: x * cos + swap_halves(x) * sin.
        sin = angles.sin().float() * scaling
        self._sin = torch.cat((-sin, sin), dim=1).to(device, dtype)  # [context_tokens, rotary_size]

    def rows(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine for `rotate`, each [num_tokens, 1, rotary_size]; once per forward pass."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)

    def halves(self) -> tuple[Tensor, Tensor]:
        """Cosine and sine of every position for the kernel, each [context_tokens, rotary_size / 2]."""
        half = self._cos.shape[1] // 2
        return self._cos[:, :half], self._sin[:, half:]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x: [num_tokens, num_heads, rotary_size] by halves (the layout of transformers' Llama)."""
    half = x.shape[-1] // 2
    swapped = torch.cat((x[..., half:], x[..., :half]), dim=-1)
    return torch.addcmul(x * cos, swapped, sin)


def _frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Inverse frequencies [rotary_size / 2] and the factor on cosine and sine."""
    size = config.rotary_size
    if config.rope_type in ("default", "dynamic"):
        exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
        return 1.0 / (config.rope_theta**exponents), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RotaryEmbeddingConfigMixin

    described: Any = RotaryEmbeddingConfigMixin()  # all that they read; a LlamaConfig takes seconds to import
    described.hidden_size, described.num_attention_heads = config.hidden_size, config.num_heads
    described.head_dim = size
    described.max_position_embeddings = config.max_positions
    described.rope_parameters = {**config.rope_parameters, "partial_rotary_factor": 1.0}  # of `size`
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[config.rope_type](described, torch.device("cpu"))
    return inv_freq, float(scaling)
