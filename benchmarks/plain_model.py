"""A Llama-like model in plain torch, layer by layer, over KV of our choice: what is reused, or kept, of a prompt's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from halfmoon.engine.checkpoint.checkpoint import Checkpoint


class KV(NamedTuple):
    """Of one layer."""

    positions: Tensor  # [tokens]
    keys: Tensor  # [heads, tokens, head_dim], rotated
    values: Tensor  # likewise


class Model:
    """A Llama-like model in plain torch, layer by layer, over KV of our choice."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=torch.float32).eval()
        self.num_layers = len(self._model.model.layers)

    def embedded(self, token_ids: Sequence[int]) -> Tensor:
        """Hidden states [tokens, width] before the first layer."""
        result: Tensor = self._model.model.embed_tokens(torch.tensor(token_ids))
        return result

    def kv(self, index: int, hidden: Tensor, positions: Tensor) -> KV:
        """Keys and values of a layer."""
        layer = self._model.model.layers[index]
        normed = layer.input_layernorm(hidden)
        keys, values = layer.self_attn.k_proj(normed), layer.self_attn.v_proj(normed)
        return KV(positions, self._rotated(self._heads(keys), positions), self._heads(values))

    def queries(self, index: int, hidden: Tensor, positions: Tensor) -> Tensor:
        """Rotated queries [heads, tokens, head_dim] of a layer."""
        layer = self._model.model.layers[index]
        return self._rotated(self._heads(layer.self_attn.q_proj(layer.input_layernorm(hidden))), positions)

    def behind(self, index: int, hidden: Tensor, positions: Tensor, kv: KV, sees: Tensor | None = None) -> Tensor:
        """The hidden states of some tokens behind a layer; `sees` [tokens, keys]: which keys, None: all before."""
        layer = self._model.model.layers[index]
        queries = self.queries(index, hidden, positions)
        keys, values = (part.repeat_interleave(len(queries) // len(part), 0) for part in (kv.keys, kv.values))
        sees = kv.positions[None] <= positions[:, None] if sees is None else sees
        mixed = torch.nn.functional.scaled_dot_product_attention(queries[None], keys[None], values[None], sees)[0]
        hidden = hidden + layer.self_attn.o_proj(mixed.transpose(0, 1).flatten(1))
        result: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return result

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Log-probabilities [tokens, vocabulary] behind the last layer."""
        return torch.log_softmax(self._model.lm_head(self._model.model.norm(hidden)), -1)

    def _heads(self, states: Tensor) -> Tensor:
        return states.view(len(states), -1, int(self._model.config.head_dim)).transpose(0, 1)

    def _rotated(self, states: Tensor, positions: Tensor) -> Tensor:
        cos, sin = self._model.model.rotary_emb(states, positions[None])
        result: Tensor = apply_rotary_pos_emb(states[None], states[None], cos, sin)[0][0]
        return result


def computed(model: Model, token_ids: Sequence[int], first: int, before: Sequence[KV] | None = None) -> list[KV]:
    """KV by layer of tokens from position `first` on, which see each other and what is `before` them."""
    positions = torch.arange(first, first + len(token_ids))
    hidden, result = model.embedded(token_ids), []
    for index in range(model.num_layers):
        kv = model.kv(index, hidden, positions)
        hidden = model.behind(index, hidden, positions, kv if before is None else joined([before[index], kv]))
        result.append(kv)
    return result


def joined(parts: Sequence[KV]) -> KV:
    """KV of several ranges of positions."""
    positions, keys, values = zip(*parts, strict=True)
    return KV(torch.cat(positions), torch.cat(keys, 1), torch.cat(values, 1))


def answered(model: Model, kv: Sequence[KV], first: int, token_ids: Sequence[int]) -> Tensor:
    """Log-probabilities [tokens, vocabulary] after each of `token_ids`, which follow the KV from `first` on."""
    positions = torch.arange(first, first + len(token_ids))
    hidden = model.embedded(token_ids)
    for index in range(model.num_layers):
        hidden = model.behind(index, hidden, positions, joined([kv[index], model.kv(index, hidden, positions)]))
    return model.log_probs(hidden)
