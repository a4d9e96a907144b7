"""Which experts a token goes to, and with which weights; the rules of Mixtral, Qwen and DeepSeek-V2 and V3."""

from __future__ import annotations

import torch
from torch import Tensor

from halfmoon.architectures.model_config import Experts


def route(logits: Tensor, experts: Experts, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights and numbers of each token's experts, both [num_tokens, num_chosen].

    logits: [num_tokens, num_experts] float32; bias: [num_experts], added while experts are chosen (DeepSeek-V3, section
    2.1.2).
    """
    scores = sigmoid(logits) if experts.scoring == "sigmoid" else logits.softmax(dim=-1)
    choice = scores if bias is None else scores + bias
    if experts.num_groups > experts.num_chosen_groups:
        choice = _in_best_groups(choice, experts)
    chosen = choice.topk(experts.num_chosen, dim=-1).indices
    weights = scores.gather(1, chosen)
    if experts.normalised:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return weights * experts.weight_scale, chosen


def sigmoid(x: Tensor) -> Tensor:
    """Of each number, whichever others are there: torch's own computes the last few of a tensor by another formula."""
    return torch.stack((x, torch.zeros_like(x)), dim=-1).softmax(dim=-1)[..., 0]


def _in_best_groups(scores: Tensor, experts: Experts) -> Tensor:
    """`scores`, but -inf outside each token's best groups: by the best expert (V2), or by the sum of the best two."""
    groups = scores.view(scores.shape[0], experts.num_groups, -1)  # [num_tokens, num_groups, experts of each]
    of_group = groups.topk(2 if experts.scoring == "sigmoid" else 1, dim=-1).values.sum(dim=-1)
    best = of_group.topk(experts.num_chosen_groups, dim=-1).indices
    is_out = torch.ones_like(of_group, dtype=torch.bool).scatter_(1, best, False)
    return groups.masked_fill(is_out.unsqueeze(-1), float("-inf")).flatten(1)
