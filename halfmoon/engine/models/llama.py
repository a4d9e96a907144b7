"""The Llama family: embedding, layers (`layers/`), head. Its members differ in what their `ModelConfig` says.

Knows nothing of requests or blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from halfmoon.architectures.model_config import ModelConfig
from halfmoon.engine.models.blocks import Blocks
from halfmoon.engine.models.embedding import Embedding
from halfmoon.engine.models.forward_batch import ForwardBatch
from halfmoon.engine.models.layer_ops import LayerOps, RunLayers, suited_ops
from halfmoon.engine.models.layers.decoder_layer import DecoderLayer
from halfmoon.engine.models.linear import Linear, PackLayer, PackWeight, alike
from halfmoon.engine.models.model_part import ModelPart, whole_model
from halfmoon.engine.models.rotary import Rotary


class LlamaModel:
    """Owns the weights of a Llama-family transformer, or of one rank's part of it."""

    def __init__(
        self, config: ModelConfig, dtype: torch.dtype, device: str, ops: LayerOps, part: ModelPart | None = None
    ) -> None:
        self._part = part = part or whole_model(config)
        self._config = config = part.config
        self._ops = ops = suited_ops(ops, config, dtype)
        self.hidden_dtype = torch.float32 if ops.wide_residual else dtype
        num_embedded = config.vocab_size if part.is_first else 0
        self._embedding = Embedding(num_embedded, config.hidden_size, dtype, device)
        self._layers = [
            DecoderLayer(part.of_layer(index), index, dtype, device, ops) for index in range(config.num_layers)
        ]
        self._embedding_scale = float(torch.tensor(config.embedding_scale, dtype=dtype))  # as transformers rounds it
        wide = torch.float32 if config.norm_offset else dtype
        self._norm = torch.empty(config.hidden_size, dtype=wide, device=device)
        rows = part.vocab_rows
        self._is_tied = config.tie_word_embeddings and part.is_first
        self._head = Linear(
            self._embedding.weight[rows.start : rows.stop]
            if self._is_tied
            else self._embedding.weight.new_empty(len(rows), config.hidden_size)
        )
        self._rotary = Rotary(config, dtype, device)
        self._window_rotary = self._rotary  # of layers with a window
        if config.window_rope_theta is not None:
            self._window_rotary = Rotary(
                replace(config, rope_type="default", rope_theta=config.window_rope_theta), dtype, device
            )
        self._all_layers: RunLayers | None = None  # once packed

    def parameters(self) -> Mapping[str, Tensor]:
        """Views of the weights under their checkpoint names."""
        named: dict[str, Tensor] = {}
        if self._part.is_first:
            named["model.embed_tokens.weight"] = self._embedding.weight
        if self._part.is_last:
            named["model.norm.weight"] = self._norm
            if not self._config.tie_word_embeddings:
                named["lm_head.weight"] = self._head.weight
            elif not self._part.is_first:
                named["model.embed_tokens.weight"] = self._head.weight
        for index, layer in enumerate(self._layers, self._part.shard.layer_start):
            named |= {f"model.layers.{index}.{name}": view for name, view in layer.parameters().items()}
        return named

    def ignores(self, name: str) -> bool:
        """See `Model.ignores`."""
        whole = self._part.whole
        further = range(whole.num_layers, whole.num_layers + whole.num_prediction_layers)
        return any(name.startswith(f"model.layers.{layer}.") for layer in further)

    def put_blocks(self, name: str, blocks: Blocks) -> bool:
        """See `Model.put_blocks`."""
        if name == "model.embed_tokens.weight" and self._part.is_first:
            self._embedding.put_blocks(blocks)
            if self._is_tied and self._part.is_last:
                rows = self._part.vocab_rows
                self._head.put_blocks(0, blocks.cut(name, (slice(rows.start, rows.stop),)))
            return True
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            self._head.put_blocks(0, blocks)
            return True
        parts = name.split(".", 3)
        if parts[:2] != ["model", "layers"]:
            return False
        return self._layers[int(parts[2]) - self._part.shard.layer_start].put_blocks(parts[3], blocks)

    def pack(
        self,
        pack_weight: PackWeight,
        pack_head: PackWeight | None = None,
        pack_layer: PackLayer = alike,
        pack_exact: PackWeight | None = None,
    ) -> None:
        """See `Model.pack`."""
        if self._part.is_last:
            self._head.pack(pack_head or pack_weight)
        if self._part.is_first:
            has_all = self._is_tied and len(self._part.vocab_rows) == self._config.vocab_size
            self._embedding.pack(pack_weight, self._head.row_source if has_all else None)
        for index, layer in enumerate(self._layers):
            layer.pack(pack_layer(pack_weight, index), pack_exact)
        if self._config.norm_offset:
            self._norm += 1
        weights = [one for one in (layer.weights() for layer in self._layers) if one is not None]
        has_all_here = self._part.all_reduce is None and not self._part.host_layers
        if has_all_here and len(weights) == len(self._layers) > 0:
            self._all_layers = self._ops.join(weights, self._config, self._rotary)

    def forward(self, batch: ForwardBatch, kv: Tensor, hidden: Tensor | None = None) -> Tensor:
        """See `Model.forward`."""
        if hidden is None:
            hidden = self._embedding(batch.token_ids)  # [num_tokens, hidden_size]
            if self._embedding_scale != 1.0:
                hidden = hidden * self._embedding_scale
            hidden = hidden.to(self.hidden_dtype)
        hidden, delta = self._through_layers(hidden, batch, kv)
        if not self._part.is_last:
            return hidden + delta
        rows = batch.logit_rows
        if rows.shape[0] < hidden.shape[0]:
            hidden, delta = hidden[rows], delta[rows]
        normed = self._ops.add_rms_norm(delta, hidden, self._norm, self._config.norm_eps)[0]
        if batch.on_outputs is not None:
            batch.on_outputs(normed)
        logits, softcap = self._head.sums(normed), self._config.logit_softcap
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap

    def _through_layers(self, hidden: Tensor, batch: ForwardBatch, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the last layer's contribution apart: its addition is fused with the next norm."""
        if self._all_layers is not None and self._all_layers.takes(batch.attention):
            return self._all_layers.run(hidden, batch.positions, batch.attention, kv)
        rotation = windowed = self._ops.rotation(self._rotary, batch.positions)
        if self._window_rotary is not self._rotary:
            windowed = self._ops.rotation(self._window_rotary, batch.positions)
        delta = torch.zeros_like(hidden) if self._ops.wide_residual else None
        for index, (layer, layer_kv) in enumerate(zip(self._layers, kv.unbind(0), strict=True)):
            own = rotation if self._config.window(index) is None else windowed
            hidden, delta = layer.forward(hidden, delta, own, layer_kv, batch.attention)
        assert delta is not None, "a model without layers"
        return hidden, delta
