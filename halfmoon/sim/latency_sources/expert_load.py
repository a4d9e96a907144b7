"""How many experts a step reads, and how unevenly ranks share them: drawn routings of one mixture.

Engines differ in how ranks hold experts. Here, as in our engine and in vLLM with expert parallelism, each rank has some
experts whole and computes them for all tokens; a layer takes as long as its busiest rank.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

_DRAWS = 16  # routings whose mean counts
_DRAWN_TOKENS = 1024  # of each; beyond, loads grow in proportion
_SEED = 27
KNOTS = tuple(2**power for power in range(15))  # tokens of a step, from 1 to 16,384


class ExpertLoad(NamedTuple):
    """The busiest rank's part of one mixture, in a step of `num_tokens`."""

    num_tokens: int
    num_read: float  # experts that any token chose
    num_products: float  # pairs of a token and an expert that it chose


@lru_cache(maxsize=64)
def expert_loads(num_experts: int, num_chosen: int, ranks: int, skew: float) -> tuple[ExpertLoad, ...]:
    """Expected loads at `KNOTS`. Popularities fall as rank**-skew (Zipf; 0: all alike), in a new order for each draw.

    Tokens choose without replacement, in proportion to popularity, independently of each other.
    """
    random = np.random.default_rng(_SEED)
    logs = -skew * np.log(np.arange(1, num_experts + 1))
    of_rank = np.arange(num_experts) * ranks // num_experts
    drawn = [one for one in KNOTS if one <= _DRAWN_TOKENS]
    totals = np.zeros((len(drawn), 2))
    for _ in range(_DRAWS):
        scores = random.permutation(logs) + random.gumbel(size=(_DRAWN_TOKENS, num_experts))  # Gumbel top-k
        chosen = np.argpartition(-scores, num_chosen - 1, axis=1)[:, :num_chosen]
        for number, num_tokens in enumerate(drawn):
            counts = np.bincount(chosen[:num_tokens].ravel(), minlength=num_experts)
            read = np.bincount(of_rank, weights=counts > 0, minlength=ranks)
            products = np.bincount(of_rank, weights=counts, minlength=ranks)
            totals[number] += read.max(), products.max()
    means = totals / _DRAWS
    result = [ExpertLoad(tokens, *map(float, mean)) for tokens, mean in zip(drawn, means, strict=True)]
    last = result[-1]
    result += [ExpertLoad(one, last.num_read, last.num_products * one / last.num_tokens) for one in KNOTS[len(drawn) :]]
    return tuple(result)
