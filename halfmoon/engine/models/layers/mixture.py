"""A mixture of experts (Shazeer et al., 2017; Mixtral, 2024): a router sends each token to some perceptrons of many.

The tokens of a step are grouped by expert, so each expert multiplies once. The ranks of a stage share the experts out:
each computes its own ones for all tokens, and the contributions are summed as those of a row-parallel matrix are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn import functional

from halfmoon.architectures.model_config import Experts
from halfmoon.engine.models.layer_ops import LayerOps
from halfmoon.engine.models.layers.gated_mlp import GatedMlp
from halfmoon.engine.models.layers.routing import route, sigmoid
from halfmoon.engine.models.linear import FusedMatrix, Linear
from halfmoon.engine.models.model_part import ModelPart

_QWEN = ("gate_proj", "up_proj", "down_proj")
_MIXTRAL = ("w1", "w3", "w2")
_SHARED: Mapping[str, str] = MappingProxyType({"qwen2": "mlp.shared_expert", "deepseek": "mlp.shared_experts"})


class Mixture:
    """Owns the router, this part's experts, and the perceptron that computes every token if there is one.

    `exact`: the matrices that are on the device, and never rounded.
    """

    def __init__(self, part: ModelPart, experts: Experts, dtype: torch.dtype, device: str, ops: LayerOps) -> None:
        config = part.config
        self._experts_config, self._ops, self._eps = experts, ops, config.norm_eps
        self._all_reduce = part.all_reduce
        is_mixtral = experts.names == "mixtral"
        block, kinds = ("block_sparse_moe", _MIXTRAL) if is_mixtral else ("mlp", _QWEN)

        def expert(prefix: str, inner: int) -> GatedMlp:
            gate, up, down = (f"{prefix}.{kind}" for kind in kinds)
            return GatedMlp(part, inner, (gate, up, down), dtype, device, ops)

        def exact(outputs: int) -> Linear:
            return Linear.empty(outputs, config.hidden_size, False, dtype, device)

        self._router = exact(experts.num_experts)
        self.exact: tuple[FusedMatrix, ...] = ((self._router, {f"{block}.gate": experts.num_experts}),)
        self.tensors: dict[str, Tensor] = {}
        self._bias: Tensor | None = None
        if experts.is_biased:
            self._bias = torch.empty(experts.num_experts, dtype=torch.float32, device=device)
            self.tensors = {f"{block}.gate.e_score_correction_bias": self._bias}
        self._experts = {
            number: expert(f"{block}.experts.{number}", experts.intermediate_size) for number in part.experts
        }
        self._shared: GatedMlp | None = None
        if experts.shared_intermediate_size:
            self._shared = expert(_SHARED[experts.names], experts.shared_intermediate_size)
        self._shared_gate: Linear | None = None
        if experts.is_shared_gated:
            self._shared_gate = exact(1)
            self.exact += ((self._shared_gate, {"mlp.shared_expert_gate": 1}),)
        all_mlps = [*self._experts.values(), *([self._shared] if self._shared else [])]
        self.matrices: tuple[FusedMatrix, ...] = tuple(matrix for mlp in all_mlps for matrix in mlp.matrices)

    def after_norm(self, x: Tensor, residual: Tensor, norm: Tensor) -> tuple[Tensor, Tensor]:
        """See `DenseMlp.after_norm`."""
        normed, residual = self._ops.add_rms_norm(x, residual, norm, self._eps)
        weights, chosen = route(_scores(self._router, normed), self._experts_config, self._bias)
        out = grouped(normed, weights, chosen, self._experts)
        if self._shared is not None:
            always = self._shared(normed)
            if self._shared_gate is not None:
                always = sigmoid(_scores(self._shared_gate, normed)) * always
            out += always
        out = out.to(x.dtype)
        return out if self._all_reduce is None else self._all_reduce(out), residual


def _scores(matrix: Linear, x: Tensor) -> Tensor:
    """x [num_tokens, hidden_size] times a matrix that is never rounded, in float32."""
    return functional.linear(x.float(), matrix.weight.float()) if matrix.packed is None else matrix.sums(x)


def grouped(x: Tensor, weights: Tensor, chosen: Tensor, experts: Mapping[int, Callable[[Tensor], Tensor]]) -> Tensor:
    """The weighted sum of what each token's chosen `experts` make of it; [num_tokens, width] float32.

    x: [num_tokens, width]; weights, chosen: [num_tokens, num_chosen]. Experts that are elsewhere add nothing. A token's
    sum is over its experts in their order, whatever other tokens are there.
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    numbers, order = chosen.flatten().sort(stable=True)
    tokens, by_expert = order // chosen.shape[1], weights.flatten()[order].unsqueeze(-1)
    found, counts = torch.unique_consecutive(numbers, return_counts=True)
    start = 0
    for number, count in zip(found.tolist(), counts.tolist(), strict=True):
        rows, start = slice(start, start + count), start + count
        if number in experts:
            out.index_add_(0, tokens[rows], experts[number](x[tokens[rows]]) * by_expert[rows])
    return out
