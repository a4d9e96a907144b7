"""How a group's KV comes to the device: the fastest way (`policy/offload/recompute.py`) by times measured so far."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, replace

from halfmoon.engine.offload.link import LinkWork
from halfmoon.policy.offload.recompute import (
    AS_PREDICTED,
    Kind,
    OffloadCosts,
    Recompute,
    Split,
    best_inputs,
    blocks_to_run_again,
    choose_split,
    is_worth_less_inputs,
    layer_time,
)

logger = logging.getLogger(__name__)

_NEWEST_SHARE = 0.2  # weight of the last pass in the estimates of the device's and the link's speed
_FORGOTTEN_SHARE = 0.01  # per step, the excess slowness that an unused kind is forgiven: so it is tried again
_MOST_REPLACED = 4  # blocks per step whose content is replaced


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that are staged together."""

    num_tokens: int  # before the rows of this step
    num_inputs: int  # of those, how many are kept as inputs
    num_plain_blocks: int  # whole blocks of K and V on the host, of sequences that decode
    steps_left: int  # of the sequence with the most steps left


@dataclass(frozen=True, slots=True)
class RecomputeChoice:
    """What one step does with a group, apart from loading the rest of it."""

    kind: Kind
    num_again: int = 0  # first tokens that run once more instead of being loaded
    num_to_inputs: int = 0  # blocks of K and V that run once more, so that their inputs can replace them
    num_to_kv: int = 0  # blocks whose inputs are replaced by K and V computed from them


class Chooser:
    """Owns the estimates of the device's and the link's speed."""

    def __init__(self, block_tokens: int, num_layers: int) -> None:
        self._block_tokens = block_tokens
        self._num_layers = num_layers  # of the model
        self._slowness: dict[Kind, float] = dict(AS_PREDICTED)
        self._tried: set[Kind] = set()
        self._predicted_s = 0.0  # over the groups of this step
        self._costs: OffloadCosts | None = None  # None: everything is loaded
        self._learns = False
        self._knows_base = True  # whether `base_s` was measured on a pass like the coming ones
        self._last_kind: Kind | None = None
        self._num_staged: Counter[Kind] = Counter()

    def use(self, costs: OffloadCosts, learns: bool = True) -> None:
        """Recomputes whatever pays from now on; with `learns`, the times of steps refine the costs."""
        self._costs = costs
        self._learns = learns
        self._knows_base = not learns

    def inputs_share(self, num_tokens: int, num_layers: int) -> float:
        """The share of `num_tokens` tokens about to be computed to keep as inputs."""
        if self._costs is None or not num_tokens:
            return 0.0
        split = choose_split(self._costs, num_tokens, num_layers, self._slowness)
        return split.num_tokens / num_tokens if split.kind == "inputs" else 0.0

    def choose(self, group: Group, num_layers: int) -> RecomputeChoice:
        """Chooses for a group; num_layers: of all groups and passes in a row, between which the link does not wait."""
        choice = RecomputeChoice("load")
        if self._costs is not None and group.num_tokens:
            split = choose_split(self._costs, group.num_tokens, num_layers, self._slowness)
            choice = self._choice(self._costs, group, num_layers, split)
            num_again = choice.num_again + choice.num_to_inputs * self._block_tokens
            num_inputs = min(group.num_inputs, group.num_tokens - num_again)
            layer_s = layer_time(self._costs, group.num_tokens, num_layers, num_inputs, num_again)
            self._predicted_s += layer_s * self._num_layers
            self._log(self._costs, group, num_layers, choice, layer_s)
        self._num_staged[choice.kind] += 1
        return choice

    def learn_pass(self, base_s: float, inputs_s: float, num_inputs: float, num_rows_again: float) -> None:
        """Learns from the time of a layer of a pass: initial costs are those of one token on an otherwise idle device.

        Nothing runs again before a pass without such rows has measured what a layer takes in any case.

        num_rows_again: rows of prompts, and of tokens that ran again, in addition to those that decode.
        """
        costs = self._costs
        if costs is None or not self._learns:
            return
        if not self._knows_base:
            if num_rows_again:
                return
            costs = replace(costs, base_s=base_s)
            self._knows_base = True
        elif num_rows_again:
            costs = replace(costs, base_s=min(costs.base_s, _mixed(costs.base_s, base_s)))
            tokens_s = max(0.0, base_s - costs.base_s) / num_rows_again
            costs = replace(costs, tokens=replace(costs.tokens, compute_s=_mixed(costs.tokens.compute_s, tokens_s)))
        else:
            costs = replace(costs, base_s=_mixed(costs.base_s, base_s))
        if costs.inputs is not None and num_inputs:
            token_s = max(0.0, inputs_s - costs.inputs.begin_s) / num_inputs
            costs = replace(costs, inputs=replace(costs.inputs, compute_s=_mixed(costs.inputs.compute_s, token_s)))
        self._costs = costs

    def learn_link(self, work: LinkWork, token_bytes: int) -> None:
        """Learns from the link's work; token_bytes: K and V of one token in one layer."""
        costs = self._costs
        if costs is None or not self._learns or not work.num_bytes:
            return
        busy_s = max(0.0, work.busy_s - costs.begin_fetch_s * work.num_fetches)
        load_s = _mixed(costs.load_s, busy_s * token_bytes / work.num_bytes)
        inputs = costs.inputs
        if inputs is not None:
            inputs = Recompute(load_s / 2, inputs.compute_s, inputs.begin_s)
        self._costs = replace(costs, load_s=load_s, inputs=inputs)

    def learn_step(self, took_s: float | None) -> dict[str, int]:
        """Ends a step; took_s: None if it did more than decode. Returns the number of staged groups by kind.

        Each kind of step has its own ratio to the predicted time of its layers: it covers work outside the layers, and
        the interference of link and device.
        """
        staged, predicted_s = dict(self._num_staged), self._predicted_s
        self._num_staged.clear()
        self._predicted_s = 0.0
        if self._learns and took_s is not None and predicted_s:
            self._learn_slowness(set(staged), took_s / predicted_s)
        return {str(kind): num_groups for kind, num_groups in staged.items()}

    def _learn_slowness(self, used: set[Kind], took: float) -> None:
        for kind, slowness in self._slowness.items():
            if kind not in used:
                self._slowness[kind] = slowness + _FORGOTTEN_SHARE * (1.0 - slowness)
            else:
                self._slowness[kind] = _mixed(slowness, took) if kind in self._tried else took
        self._tried |= used

    def _choice(self, costs: OffloadCosts, group: Group, num_layers: int, split: Split) -> RecomputeChoice:
        kind: Kind = "inputs" if group.num_inputs else "load"
        if not self._knows_base:
            return RecomputeChoice(kind)
        if split.kind == "tokens":
            return RecomputeChoice("tokens", num_again=split.num_tokens)
        wanted = split.num_tokens if split.kind == "inputs" else 0
        more_blocks = min((wanted - group.num_inputs) // self._block_tokens, group.num_plain_blocks, _MOST_REPLACED)
        if more_blocks > 0:
            blocks = blocks_to_run_again(
                costs, group.num_tokens, num_layers, group.num_inputs, more_blocks, self._block_tokens, group.steps_left
            )
            return RecomputeChoice(kind, num_to_inputs=blocks)
        fewer_blocks = min((group.num_inputs - wanted) // self._block_tokens, _MOST_REPLACED)
        if fewer_blocks > 0:
            best_s = best_inputs(costs, group.num_tokens, num_layers).layer_s
            if is_worth_less_inputs(costs, group.num_tokens, num_layers, group.num_inputs, best_s):
                return RecomputeChoice(kind, num_to_kv=fewer_blocks)
        return RecomputeChoice(kind)

    def _log(self, costs: OffloadCosts, group: Group, num_layers: int, choice: RecomputeChoice, layer_s: float) -> None:
        if choice.kind == self._last_kind:
            return
        self._last_kind = choice.kind
        logger.info(
            "offload.chosen",
            extra={
                "kind": choice.kind,
                "num_tokens": group.num_tokens,
                "num_computed_again": choice.num_again or group.num_inputs,
                "layer_s": layer_s,
                "all_loaded_layer_s": layer_time(costs, group.num_tokens, num_layers),
                "slowness": dict(self._slowness),
            },
        )


def _mixed(before_s: float, last_s: float) -> float:
    return (1 - _NEWEST_SHARE) * before_s + _NEWEST_SHARE * last_s
