"""Tokens go to the experts that transformers' routers choose, and each sum is independent of its company."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from halfmoon.architectures.model_config import Experts
from halfmoon.engine.models.layers.mixture import grouped
from halfmoon.engine.models.layers.routing import route

EXPERTS = Experts(8, 3, 16, (True,))


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def as_table(weights: Tensor, chosen: Tensor) -> Tensor:
    """[num_tokens, num_experts]: the weights of experts, 0 for those that are not chosen."""
    return torch.zeros(len(weights), 8).scatter_(1, chosen, weights)


def test_weights_are_probabilities_unless_they_are_divided_by_their_sum() -> None:
    logits = random(20, 8)
    weights, chosen = route(logits, EXPERTS, None)
    best = logits.softmax(-1).topk(3)
    torch.testing.assert_close(as_table(weights, chosen), as_table(best.values, best.indices))
    weights, _ = route(logits, replace(EXPERTS, normalised=True, weight_scale=2.5), None)
    torch.testing.assert_close(weights.sum(-1), torch.full((20,), 2.5))


def test_groups_and_biases_are_those_of_deepseek_v3() -> None:
    config: Any = DeepseekV3Config(
        hidden_size=12, n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3, routed_scaling_factor=1.7
    )
    router = DeepseekV3TopkRouter(config)
    router.weight.data.copy_(random(8, 12))
    router.e_score_correction_bias.copy_(random(8, seed=2))
    x = random(50, 12, seed=3)
    logits, weights, chosen = router(x)
    rule = replace(
        EXPERTS, scoring="sigmoid", normalised=True, num_groups=4, num_chosen_groups=2, weight_scale=1.7, is_biased=True
    )
    got = route(logits, rule, router.e_score_correction_bias)
    torch.testing.assert_close(as_table(*got), as_table(weights, chosen))


@pytest.mark.parametrize("here", [range(8), range(2, 5), range(0)])
def test_grouped_products_are_those_of_each_token(here: range) -> None:
    matrices = random(8, 6, 6)
    x, (weights, chosen) = random(20, 6, seed=2), route(random(20, 8, seed=3), EXPERTS, None)
    experts = {number: (lambda rows, matrix=matrices[number]: (rows.unsqueeze(1) * matrix).sum(-1)) for number in here}
    got = grouped(x, weights, chosen, experts)
    for token in range(20):
        alone = grouped(x[token : token + 1], weights[token : token + 1], chosen[token : token + 1], experts)
        assert torch.equal(got[token], alone[0])
        pairs = zip(weights[token], chosen[token].tolist(), strict=True)
        expected = sum((w * (matrices[number] @ x[token]) for w, number in pairs if number in here), torch.zeros(6))
        torch.testing.assert_close(got[token], expected)
