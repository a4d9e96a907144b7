"""How much of a sequence's KV to compute again instead of loading it from host memory (KVPR, arXiv 2411.17089).

A decode step needs the K and V of all `n` tokens of a layer on the device. Of the first `l` it may fetch less and
compute the rest: from the layer's inputs X (half the size of K + V where every query head has its own KV head), or from
the tokens themselves, which need no fetch and a whole layer's work. All figures are of one layer and one token.

    within a layer   T(l) = fetch * l + max(base + compute * l, load * (n - l))   inputs first, then KV beside computing
    across layers    T(l) = max(fetch * l + load * (n - l), base + compute * l)   the link goes on with the next layer

Both are convex and piecewise linear with one bend. With base 0, fetch x and load 2x the first is KVPR's, whose bend is
l* = 2 x n / (c + 2 x); neither can gain more than fetch / load saves, so at most twice where X is half of KV.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["load", "inputs", "tokens"]
Overlap = Literal["within", "across"]

_MIN_GAIN = 0.05  # of the time of loading everything; a smaller one is within what was measured wrongly


@dataclass(frozen=True, slots=True)
class Recompute:
    """One way to have K and V of a token and layer without loading them."""

    fetch_s: float  # what has to come over the link for it
    compute_s: float


@dataclass(frozen=True, slots=True)
class OffloadCosts:
    """Of one token and one layer, measured; `base_s` is what a layer computes in any case, once."""

    load_s: float
    base_s: float
    inputs: Recompute | None  # None: X is not kept, or not smaller than K and V
    tokens: Recompute


@dataclass(frozen=True, slots=True)
class Split:
    """The first `num_tokens` are computed in the way that `kind` says, the others loaded; a layer takes `layer_s`."""

    kind: Kind
    num_tokens: int
    layer_s: float


def choose_split(costs: OffloadCosts, num_tokens: int, overlap: Overlap) -> Split:
    """The fastest way for a batch whose sequences have `num_tokens` known tokens each."""
    plain = Split("load", 0, layer_time(costs, None, num_tokens, 0, overlap))
    found = [plain]
    for kind, way in (("inputs", costs.inputs), ("tokens", costs.tokens)):
        if way is not None:
            best = best_num_tokens(costs, way, num_tokens, overlap)
            found.append(Split(kind, best, layer_time(costs, way, num_tokens, best, overlap)))  # type: ignore[arg-type]
    fastest = min(found, key=lambda split: split.layer_s)
    return fastest if fastest.layer_s <= (1 - _MIN_GAIN) * plain.layer_s else plain


def best_num_tokens(costs: OffloadCosts, way: Recompute, num_tokens: int, overlap: Overlap) -> int:
    """The number of tokens to compute again that makes a layer fastest; 0 where none helps."""
    if way.fetch_s >= costs.load_s:
        return 0
    saved_s = costs.load_s if overlap == "within" else costs.load_s - way.fetch_s
    bend = (costs.load_s * num_tokens - costs.base_s) / (way.compute_s + saved_s)
    near = {min(max(int(bend) + step, 0), num_tokens) for step in (0, 1)}
    return min(near, key=lambda number: (layer_time(costs, way, num_tokens, number, overlap), number))


def layer_time(costs: OffloadCosts, way: Recompute | None, num_tokens: int, computed: int, overlap: Overlap) -> float:
    """Seconds of one layer if the first `computed` tokens are computed in that way (None: there are none such)."""
    fetch_s = 0.0 if way is None else way.fetch_s * computed
    compute_s = costs.base_s + (0.0 if way is None else way.compute_s * computed)
    load_s = costs.load_s * (num_tokens - computed)
    if overlap == "within":
        return fetch_s + max(compute_s, load_s)
    return max(fetch_s + load_s, compute_s)
