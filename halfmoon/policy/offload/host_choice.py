"""Where a worker's weights and KV lie, on the device or the host, and how many sequences decode together.

FlexGen (arXiv 2303.06865, section 4.3) searches shares of weights and KV by a linear programme over a cost model, KVPR
(arXiv 2411.17089) splits loading and recomputing by measured rates. Here layers are whole and few, so that every number
of layers on the host is tried; for each, KV fills what is left of the device, and the split of the rest is known.

A step reads the weights on the host once, whatever its rows: the schedule "throughput", groups by column. KV that a
step writes back is a token a sequence, and the link's other direction carries it: it is not counted.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from halfmoon.errors import Incompatible
from halfmoon.policy.offload.recompute import OffloadCosts, Split, choose_split

Objective = Literal["latency", "throughput"]

STAGING_SHARE = 4  # divisor of the device's KV memory: the most for staging buffers, unless one sequence needs more
STAGING_BUFFERS = 2
WEIGHT_BUFFERS = 2  # each of one layer


class Rates(NamedTuple):
    """Measured seconds. `costs`: per token and layer, of a step with one row."""

    costs: OffloadCosts
    layer_load_s: float  # of one layer's weights over the link
    row_s: float  # each row more, per layer
    context_s: float = 0.0  # each token of context, per layer


class ModelSizes(NamedTuple):
    """Bytes of a model in a worker's memory."""

    num_layers: int
    layer_bytes: float  # weights of one layer that may be on the host
    other_bytes: float  # all weights that stay on the device
    token_bytes: float  # K and V of one token in all layers
    block_tokens: int = 1  # of a KV block, which is on the device or on the host

    def device_bytes(self, host_layers: int) -> float:
        """Weights on the device beside those of `host_layers` on the host, with the buffers for these."""
        buffers = WEIGHT_BUFFERS if host_layers else 0
        return self.other_bytes + (self.num_layers - host_layers + buffers) * self.layer_bytes


class Memory(NamedTuple):
    """Memory for weights and KV in bytes; `host_kv_bytes`: at most for KV on the host, 0: all KV is on the device."""

    device_bytes: float
    host_bytes: float
    host_kv_bytes: float


class Demand(NamedTuple):
    """The sequences to decode: each as long as `context_tokens`, at most `max_batch` at a time."""

    context_tokens: int
    max_batch: int


@dataclass(frozen=True, slots=True)
class HostChoice:
    """One choice, and the predicted time of a decode step with it."""

    num_layers: int
    host_layers: int  # whose weights are on the host
    device_tokens: int  # KV of the batch
    host_tokens: int
    batch: int
    split: Split  # of host_tokens: how many are computed again
    step_s: float
    link_s: float  # of the step, in which weights and KV cross the link, if nothing is computed again

    @property
    def tokens_per_s(self) -> float:
        """New tokens of all sequences."""
        return self.batch / self.step_s

    @property
    def host_share(self) -> float:
        """Share of the layers whose weights are on the host."""
        return self.host_layers / self.num_layers

    @property
    def reason(self) -> str:
        """What decided, for people."""
        if not self.host_layers and not self.host_tokens:
            return f"the device holds all weights and the KV of {self.batch} of the longest sequences"
        bound = "the link" if self.link_s >= self.step_s * (1 - 1e-9) else "the device"
        return (
            f"weights of {self.host_layers} of {self.num_layers} layers and {self.host_tokens} of "
            f"{self.host_tokens + self.device_tokens} tokens' KV on the host, so that {self.batch} of the longest "
            f"sequences decode together; {bound} limits a step"
        )


def num_host_layers(num_layers: int, share: float) -> int:
    """How many layers a share of them is."""
    return round(share * num_layers)


def streamed_layers(host_layers: int) -> int:
    """Of the layers on the host, those that each step loads: two or one stay in the buffers."""
    return host_layers if host_layers > WEIGHT_BUFFERS else 0


def choose_host_share(
    rates: Rates,
    sizes: ModelSizes,
    memory: Memory,
    demand: Demand,
    objective: Objective,
    host_layers: Collection[int] | None = None,
) -> HostChoice:
    """The best choice: "latency": the fastest step of one sequence; "throughput": the most tokens a second.

    Of equal ones, that with the fewest layers and tokens on the host. host_layers: the numbers of layers to try; None:
    any. Raises Incompatible if no choice holds one sequence.
    """
    choices = list(_feasible(rates, sizes, memory, demand, objective, host_layers))
    if not choices:
        raise Incompatible(_too_small(sizes, memory, demand.context_tokens, host_layers), param="offload_weights")
    return min(choices, key=lambda one: (-one.tokens_per_s, one.host_layers, one.host_tokens))


def choice_for_batch(
    rates: Rates, sizes: ModelSizes, memory: Memory, context_tokens: int, batch: int, host_layers: int
) -> HostChoice | None:
    """The choice of `batch` sequences with the weights of `host_layers` on the host; None: it does not fit.

    KV is on the device as far as there is room beside the staging buffers for the rest: more is never faster.
    """
    size = sizes.block_tokens
    block_bytes = size * sizes.token_bytes
    context_tokens = -(-context_tokens // size) * size
    num_tokens = device_tokens = batch * context_tokens
    num_blocks = (memory.device_bytes - sizes.device_bytes(host_layers)) // block_bytes
    if num_tokens > num_blocks * size:
        kv_bytes = num_blocks * block_bytes
        staging_bytes = max(staging_bytes_of(rates, sizes, context_tokens), kv_bytes / STAGING_SHARE)
        device_tokens = int((kv_bytes - staging_bytes) // block_bytes) * size
    host_tokens = num_tokens - device_tokens
    host_kv_bytes = host_tokens * sizes.token_bytes
    host_bytes = host_layers * sizes.layer_bytes + host_kv_bytes
    if device_tokens < 1 or host_kv_bytes > memory.host_kv_bytes or host_bytes > memory.host_bytes:
        return None
    costs = _step_costs(rates, sizes.num_layers, num_tokens, batch, host_layers)
    split = choose_split(costs, host_tokens, sizes.num_layers)
    link_s = costs.weights_s + (costs.begin_fetch_s + costs.load_s * host_tokens if host_tokens else 0.0)
    times_s = split.layer_s * sizes.num_layers, link_s * sizes.num_layers
    return HostChoice(sizes.num_layers, host_layers, device_tokens, host_tokens, batch, split, *times_s)


def staging_bytes_of(rates: Rates, sizes: ModelSizes, context_tokens: int) -> float:
    """The staging buffers for one layer of the longest sequence: K and V, and their inputs if those are kept."""
    planes = 2 if rates.costs.inputs is None else 3  # each half as large as K and V
    return STAGING_BUFFERS * planes * context_tokens * sizes.token_bytes / 2 / sizes.num_layers


def _feasible(
    rates: Rates,
    sizes: ModelSizes,
    memory: Memory,
    demand: Demand,
    objective: Objective,
    host_layers: Collection[int] | None,
) -> Iterator[HostChoice]:
    batches = range(1, (demand.max_batch if objective == "throughput" else 1) + 1)
    for layers in _numbers_of_layers(sizes) if host_layers is None else host_layers:
        for batch in batches:
            choice = choice_for_batch(rates, sizes, memory, demand.context_tokens, batch, layers)
            if choice is None:
                break  # more sequences do not fit either
            yield choice


def _numbers_of_layers(sizes: ModelSizes) -> list[int]:
    """Fewer than three would save nothing: the buffers hold as many."""
    return [0, *range(WEIGHT_BUFFERS + 1, sizes.num_layers + 1)]


def _step_costs(rates: Rates, num_layers: int, num_tokens: int, batch: int, host_layers: int) -> OffloadCosts:
    base_s = rates.costs.base_s + rates.row_s * (batch - 1) + rates.context_s * num_tokens
    weights_s = rates.layer_load_s * streamed_layers(host_layers) / num_layers
    return replace(rates.costs, base_s=base_s, weights_s=weights_s)


def _too_small(sizes: ModelSizes, memory: Memory, context_tokens: int, host_layers: Collection[int] | None) -> str:
    numbers = _numbers_of_layers(sizes) if host_layers is None else host_layers
    least = min(map(sizes.device_bytes, numbers))
    kv_bytes = context_tokens * sizes.token_bytes
    host_bytes = max(numbers) * sizes.layer_bytes
    return (
        f"one sequence of {context_tokens} tokens (max_context_tokens) has {kv_bytes:.0f} bytes of KV, and the weights "
        f"take at least {least:.0f} on the device, with {host_bytes:.0f} on the host: that does not fit into "
        f"{memory.device_bytes:.0f} bytes on the device and {memory.host_bytes:.0f} on the host, of which "
        f"{memory.host_kv_bytes:.0f} for KV: allow more memory (device_memory, offload_bytes) or a shorter context"
    )
