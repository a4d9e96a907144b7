"""How much of a sequence's KV to compute again instead of loading it from host memory (KVPR, arXiv 2411.17089).

A decode step needs the K and V of all `n` tokens of a layer on the device. For some of them it may fetch less and
compute: for `l` from the layer's inputs X (half the size of K + V if every query head has its own KV head), or for `m`
from the tokens themselves, which takes no fetch and a whole layer's work. The rest is loaded. All figures are per
layer.

    the first layer    fetch * l + max(base + compute * l, load * (n - l))    inputs first, then KV beside computing
    every other one    max(fetch * l + load * (n - l), base + compute * l)    its fetch began with the layer before it

The first is KVPR's, which has one buffer: with base 0, fetch x and load 2x it bends at l* = 2 x n / (c + 2 x). With two
buffers the link does not wait for the device: a step takes the mean of the two, weighted by its layers. Both are convex
and piecewise linear with one bend each, so the best `l` is at a bend or at an end. Neither can gain more than load /
fetch, so at most twice if X is half of K and V. Weights on the host take the link for `weights` more, beside `load`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

Kind = Literal["load", "inputs", "tokens"]
Slowness = Mapping[Kind, float]  # time of steps of a kind, relative to their prediction
AS_PREDICTED: Slowness = MappingProxyType({"load": 1.0, "inputs": 1.0, "tokens": 1.0})

# Relative to the time of loading everything; a smaller gain is within the measurement error. Rows that run again cost
# more than their layers, and save no memory.
_MIN_GAINS: Mapping[Kind, float] = MappingProxyType({"load": 0.0, "inputs": 0.05, "tokens": 0.15})
_REPAID_STEPS = 16  # a step may be slower if this many of the following ones make up for it


@dataclass(frozen=True, slots=True)
class Recompute:
    """One way to get K and V of a token and layer without loading them."""

    fetch_s: float  # to fetch its input over the link
    compute_s: float
    begin_s: float = 0.0  # fixed cost of computing any at all, per layer


NEVER = Recompute(0.0, math.inf)
"""No split recomputes this way."""


@dataclass(frozen=True, slots=True)
class OffloadCosts:
    """Measured costs per token and layer; `base_s` is what a layer computes in any case, once."""

    load_s: float
    base_s: float
    inputs: Recompute | None  # None: the model does not compute K and V from inputs, or inputs are not smaller
    tokens: Recompute
    begin_fetch_s: float = 0.0  # fixed cost of each of a layer's fetches
    weights_s: float = 0.0  # of the link for weights, in the mean of the layers


@dataclass(frozen=True, slots=True)
class Split:
    """Computes the first `num_tokens` as `kind` says and loads the others; a layer takes `layer_s`."""

    kind: Kind
    num_tokens: int
    layer_s: float


def choose_split(costs: OffloadCosts, num_tokens: int, num_layers: int, slowness: Slowness = AS_PREDICTED) -> Split:
    """The fastest split for a batch whose sequences have `num_tokens` known tokens in total."""
    plain = Split("load", 0, layer_time(costs, num_tokens, num_layers))
    splits = [plain, best_tokens(costs, num_tokens, num_layers)]
    if costs.inputs is not None:
        splits.append(best_inputs(costs, num_tokens, num_layers))
    return min(splits, key=lambda split: split.layer_s * slowness[split.kind] / (1 - _MIN_GAINS[split.kind]))


def best_inputs(costs: OffloadCosts, num_tokens: int, num_layers: int) -> Split:
    """The number of tokens with fetched inputs that makes a step fastest; 0 if none helps."""
    assert costs.inputs is not None
    times = {
        number: layer_time(costs, num_tokens, num_layers, num_inputs=number)
        for number in _bends(costs, costs.inputs, num_tokens, costs.begin_fetch_s)
    }
    best = min(times, key=lambda number: (times[number], number))
    return Split("inputs", best, times[best])


def best_tokens(costs: OffloadCosts, num_tokens: int, num_layers: int) -> Split:
    """The number of tokens to run again that makes a step fastest; 0 if none helps."""
    times = {
        number: layer_time(costs, num_tokens, num_layers, num_again=number)
        for number in _bends(costs, costs.tokens, num_tokens, 0.0)
    }
    best = min(times, key=lambda number: (times[number], number))
    return Split("tokens", best, times[best])


def is_worth_less_inputs(costs: OffloadCosts, num_tokens: int, num_layers: int, num_inputs: int, best_s: float) -> bool:
    """Whether this many tokens kept as inputs cost notably more than the best split, i.e. measurements have changed."""
    return layer_time(costs, num_tokens, num_layers, num_inputs) > best_s * (1 + _MIN_GAINS["inputs"])


def blocks_to_run_again(
    costs: OffloadCosts,
    num_tokens: int,
    num_layers: int,
    num_inputs: int,
    more_blocks: int,
    block_tokens: int,
    steps_left: int,
) -> int:
    """How many of `more_blocks` to run again in this step to obtain their inputs, which were not kept.

    As many as are hidden behind loading, or else one, if the remaining steps repay it.
    """

    def extra_s(blocks: int) -> float:
        return layer_time(costs, num_tokens, num_layers, num_inputs, blocks * block_tokens) - now_s

    now_s = layer_time(costs, num_tokens, num_layers, num_inputs)
    hidden = [blocks for blocks in range(1, more_blocks + 1) if extra_s(blocks) <= 0]
    if hidden or not more_blocks:
        return max(hidden, default=0)
    gain_s = now_s - layer_time(costs, num_tokens, num_layers, num_inputs + block_tokens)
    return int(extra_s(1) < gain_s * min(steps_left, _REPAID_STEPS))


def layer_time(costs: OffloadCosts, num_tokens: int, num_layers: int, num_inputs: int = 0, num_again: int = 0) -> float:
    """Mean seconds per layer with `num_inputs` tokens computed from inputs and `num_again` from tokens."""
    fetch_s, load_s, compute_s = 0.0, costs.weights_s, costs.base_s
    if num_inputs:
        assert costs.inputs is not None
        fetch_s = costs.begin_fetch_s + costs.inputs.fetch_s * num_inputs
        compute_s += costs.inputs.begin_s + costs.inputs.compute_s * num_inputs
    if num_again:
        compute_s += costs.tokens.begin_s + costs.tokens.compute_s * num_again
    if num_inputs + num_again < num_tokens:
        load_s += costs.begin_fetch_s + costs.load_s * (num_tokens - num_inputs - num_again)
    first_s = fetch_s + max(compute_s, load_s)
    other_s = max(fetch_s + load_s, compute_s)
    return (first_s + (num_layers - 1) * other_s) / num_layers


def _bends(costs: OffloadCosts, way: Recompute, num_tokens: int, begin_s: float) -> set[int]:
    """Bends of either line, with the whole numbers around them, and the ends. `begin_s`: fixed cost of the fetch."""
    numbers = {0, num_tokens}
    if way.fetch_s >= costs.load_s:
        return numbers
    loaded_s = costs.weights_s + costs.begin_fetch_s + costs.load_s * num_tokens
    ahead_s = loaded_s - costs.base_s - way.begin_s
    for beyond_s, slope_s in (
        (ahead_s, way.compute_s + costs.load_s),
        (ahead_s + begin_s, way.compute_s + costs.load_s - way.fetch_s),
    ):
        bend = int(min(max(beyond_s / slope_s, 0), num_tokens))
        numbers |= {min(max(bend + step, 0), num_tokens) for step in (-1, 0, 1, 2)}
    return numbers | {min(1, num_tokens), max(num_tokens - 1, 0)}
