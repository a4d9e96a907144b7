"""The part of a transformer that one rank computes: some of the layers, and in each of them some of the heads.

The cut is Megatron-LM's (Shoeybi et al., 2019, section 3). Q, K, V, gate and up are column-parallel: each rank has some
of the outputs. O and down are row-parallel: each rank has some of the inputs, and the outputs are summed over the
ranks. Experts are not cut but shared out. The head is cut by vocabulary, because all of it is read for every token; the
embedding is whole on the first stage, because a look-up reads one row. Knows nothing of processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halfmoon.architectures.model_config import ModelConfig
from halfmoon.engine.models.linear import Linear, PackWeight
from halfmoon.kv.kv_layout import Shard

AllReduce = Callable[[Tensor], Tensor]  # the sum over the ranks of one stage

_HEADS = ("q_proj", "o_proj", "out_proj")
_LATENT_HEADS = ("q_b_proj", "kv_b_proj")
_KV_HEADS = ("k_proj", "v_proj")
_INNER = ("gate_proj", "up_proj", "fc1", "down_proj", "fc2")
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_ROW_PARALLEL = ("o_proj", "out_proj", "down_proj", "fc2")


@dataclass(frozen=True, slots=True)
class ModelPart:
    """One rank's layers and KV heads (`shard`) of the model `whole`, and its place among the ranks of its stage."""

    whole: ModelConfig
    shard: Shard
    tensor_rank: int = 0
    tensor_size: int = 1
    all_reduce: AllReduce | None = None  # needed if and only if tensor_size > 1
    host_layers: frozenset[int] = frozenset()  # of the part, whose matrices are in host memory (`offload/weights.py`)
    is_on_host: bool = False  # whether the layer that is built of it is one of them

    @property
    def config(self) -> ModelConfig:
        """The configuration of the part alone: its own counts of layers, heads and inner units.

        Experts are whole, and counted as in the model.
        """
        layers, experts = slice(self.shard.layer_start, self.shard.layer_end), self.whole.experts
        if experts is not None:
            shared = experts.shared_intermediate_size // self.tensor_size
            experts = replace(experts, in_layer=experts.in_layer[layers], shared_intermediate_size=shared)
        return replace(
            self.whole,
            num_layers=self.shard.layer_end - self.shard.layer_start,
            num_heads=self.whole.num_heads // self.tensor_size,
            num_kv_heads=self.shard.head_end - self.shard.head_start,
            windows=self.whole.windows[layers],
            experts=experts,
            intermediate_size=self.whole.intermediate_size // self.tensor_size,
        )

    @property
    def is_first(self) -> bool:
        """Whether it embeds tokens; other parts are given the hidden states of the part before."""
        return self.shard.layer_start == 0

    @property
    def is_last(self) -> bool:
        """Whether it computes logits; other parts return hidden states."""
        return self.shard.layer_end == self.whole.num_layers

    @property
    def vocab_rows(self) -> range:
        """Token ids whose logits this part computes; the ranks' ranges differ in length by at most one."""
        if not self.is_last:
            return range(0)
        vocab, size = self.whole.vocab_size, self.tensor_size
        return range(self.tensor_rank * vocab // size, (self.tensor_rank + 1) * vocab // size)

    @property
    def experts(self) -> range:
        """Experts that this part computes in each of its layers; the ranks' ranges differ in length by at most one."""
        count = 0 if self.whole.experts is None else self.whole.experts.num_experts
        return range(self.tensor_rank * count // self.tensor_size, (self.tensor_rank + 1) * count // self.tensor_size)

    def of_layer(self, index: int) -> ModelPart:
        """The part as one of its layers is built of it."""
        return replace(self, is_on_host=index in self.host_layers)

    def linear(self, out_features: int, in_features: int, bias: bool, dtype: torch.dtype, device: str) -> Linear:
        """An uninitialised matrix of a layer, on the device or the host; its bias is on the device."""
        linear = Linear.empty(out_features, 0 if self.is_on_host else in_features, bias, dtype, device)
        if self.is_on_host:
            pinned = torch.device(device).type == "cuda"
            linear.weight = torch.empty(out_features, in_features, dtype=dtype, pin_memory=pinned)
        return linear

    def summed(self, linear: Linear) -> Linear:
        """Makes a matrix row-parallel: its output is summed over the ranks of the stage."""
        return linear if self.all_reduce is None else SummedLinear(linear.weight, linear.bias, self.all_reduce)

    def slices(self, name: str) -> tuple[slice, ...] | None:
        """This part's slice of the checkpoint's tensor `name`; None: it has none, and is zero.

        Only one rank has a row-parallel bias, or the sum would contain it several times.
        """
        module, kind = name.split(".")[-2:]
        rows = None if ".experts." in name else self._range(module, is_shared=".shared_expert" in name)
        if rows is None:
            return (slice(None),)
        cut = slice(rows.start, rows.stop)
        if module not in _ROW_PARALLEL:
            return (cut,)
        if kind == "weight":
            return (slice(None), cut)
        return (slice(None),) if self.tensor_rank == 0 else None

    def pieces(self, name: str) -> tuple[tuple[slice, ...], ...]:
        """The slices of `name` whose rows, one below the other, this part has; none: see `slices`."""
        fused = _FUSED.get(name.split(".")[-2])
        if fused is None:
            where = self.slices(name)
            return () if where is None else (where,)
        start, pieces = 0, []
        for module in fused:
            rows = self._range(module)
            assert rows is not None
            pieces.append((slice(start + rows.start, start + rows.stop),))
            start += self._whole_rows(module)
        return tuple(pieces)

    def _whole_rows(self, module: str) -> int:
        whole = self.whole
        if module in _KV_HEADS:
            return whole.kv_size
        return whole.q_size if module in _HEADS else whole.intermediate_size

    def _range(self, module: str, is_shared: bool = False) -> range | None:
        """Outputs (column-parallel) or inputs (row-parallel) of `module` in this part; None: all.

        is_shared: it is of the perceptron beside the experts.
        """
        latent = self.whole.latent
        if latent is not None and (module in _LATENT_HEADS or module in _HEADS):
            sizes = {"o_proj": latent.value_size, "kv_b_proj": latent.plain_size + latent.value_size}
            width = self.config.num_heads * sizes.get(module, latent.plain_size + latent.rotary_size)
            return range(self.tensor_rank * width, (self.tensor_rank + 1) * width)
        if module in _KV_HEADS:
            head_dim = self.whole.head_dim
            return range(self.shard.head_start * head_dim, self.shard.head_end * head_dim)
        if module == "lm_head" or (module == "embed_tokens" and not self.is_first):
            return self.vocab_rows
        if module not in _HEADS and module not in _INNER:
            return None
        width = self.config.q_size if module in _HEADS else self.config.intermediate_size
        if is_shared:
            assert self.config.experts is not None
            width = self.config.experts.shared_intermediate_size
        return range(self.tensor_rank * width, (self.tensor_rank + 1) * width)


def whole_model(config: ModelConfig) -> ModelPart:
    """The part that is the whole model."""
    return ModelPart(config, Shard(0, config.num_layers, 0, config.num_kv_heads))


class SummedLinear(Linear):
    """A matrix with some of the input features; its output is summed with that of the ranks that have the others."""

    def __init__(self, weight: Tensor, bias: Tensor | None, all_reduce: AllReduce) -> None:
        super().__init__(weight, bias)
        self._all_reduce = all_reduce

    def pack(self, pack_weight: PackWeight) -> None:
        """See `Linear.pack`. What a fused product gives would lack the other ranks' part."""
        super().pack(pack_weight)
        self.fused = None

    def __call__(self, x: Tensor) -> Tensor:
        """x: [num_tokens, in_features of this rank] -> [num_tokens, out_features]."""
        return self._all_reduce(super().__call__(x))

    def sums(self, x: Tensor) -> Tensor:
        """See `Linear.sums`."""
        return self._all_reduce(super().sums(x))
