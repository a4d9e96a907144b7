"""Latency from first principles: a step takes as long as its arithmetic or its memory traffic, whichever is longer,
with stated losses.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from halfmoon.errors import Incompatible, InvalidRequest
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.offload.host_choice import ModelSizes
from halfmoon.sim.latency_sources.expert_load import expert_loads
from halfmoon.sim.latency_sources.hardware import Device, device
from halfmoon.sim.latency_sources.latency_model import FitError, LatencyModel, PrefillPiece, StepPiece
from halfmoon.sim.latency_sources.model_shape import ModelShape

_MODERN_ERROR, _ERROR_OF_2023 = FitError(0.27, 0.43), FitError(0.12, 0.14)
_PIPELINE_HOP_S = 20e-6  # from stage to stage, besides the bytes


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The share of the data sheet that a good engine reaches, and the overheads of a step.

    The defaults describe an engine that is limited by neither launches nor the host. Engines of 2023 and 2024 were, and
    more so the more devices shared a layer: docs/evaluation/ has the errors against published measurements.
    """

    flops: float = 0.6  # of matrix products
    attention_flops: float = 0.5  # of long prompts; prompts of 2,000 tokens reach half of it, which hardly matters
    memory: float = 0.7
    link: float = 0.7
    step_s: float = 2e-3  # scheduling, launching, sampling
    all_reduce_s: float = 12e-6  # latency of one all-reduce
    kv_memory: float = 0.9  # of the device's memory, for weights, activations and KV
    step_bytes: float = 2.0**30  # minimum for activations and staging, as a worker keeps
    batch_tokens: int = 2048  # of the largest step, whose activations must fit
    expert_skew: float = 0.3  # how unevenly tokens choose experts, an assumption: see expert_load.py
    error: FitError = _MODERN_ERROR  # median over the ten measured tables of docs/evaluation/simulator.md


OF_2023 = Efficiency(all_reduce_s=100e-6, error=_ERROR_OF_2023)
"""Engines of 2023 and 2024, which lost more at each exchange between devices that share a layer. This one figure was
chosen to agree with DistServe's and Splitwise's tables.
"""


@dataclass(frozen=True, slots=True)
class Roofline:
    """A model of known shape on hardware of the catalogue."""

    shape: ModelShape
    efficiency: Efficiency = Efficiency()
    default_gpu: str | None = None

    def model(
        self, gpu: str | None, tensor_parallel: int, pipeline_parallel: int, host_layers: int = 0
    ) -> LatencyModel:
        """host_layers: whose weights are not in the devices' memory; times are as if they were.

        Raises InvalidRequest for unknown hardware, for a parallelism that a worker would refuse, and if the weights
        leave no room for KV.
        """
        try:
            self.shape.check(tensor_parallel, pipeline_parallel)
        except Incompatible as error:
            raise InvalidRequest(f"{self.shape.name}: {error.message}", param="tensor_parallel") from error
        name = gpu or self.default_gpu
        if name is None:
            raise InvalidRequest("a roofline needs to know the hardware: name a gpu for each group", param="gpu")
        return _model(self.shape, device(name), self.efficiency, tensor_parallel, pipeline_parallel, host_layers)


def kv_capacity_tokens(
    shape: ModelShape, on: Device, tensor: int, pipeline: int, efficiency: Efficiency, host_layers: int = 0
) -> int:
    """Tokens of KV beside weights and a step's needs on the fullest device; negative if those do not fit."""
    weight_bytes = shape.device_weight_bytes(tensor, pipeline)
    if host_layers:
        weight_bytes = model_sizes(shape, tensor).device_bytes(host_layers)
    left_bytes = usable_bytes(shape, on, tensor, efficiency) - weight_bytes
    return int(left_bytes // shape.device_kv_bytes_per_token(tensor, pipeline))


def usable_bytes(shape: ModelShape, on: Device, tensor: int, efficiency: Efficiency) -> float:
    """Memory of one device for weights and KV, beside a step's needs."""
    step_bytes = max(efficiency.step_bytes, shape.activation_bytes(efficiency.batch_tokens, tensor))
    return on.memory_bytes * efficiency.kv_memory - step_bytes


def model_sizes(shape: ModelShape, tensor: int) -> ModelSizes:
    """The part of each of `tensor` devices that share all layers."""
    layer_bytes = shape.device_layer_bytes(tensor)
    others = shape.device_weight_bytes(tensor, 1) - shape.num_layers * layer_bytes
    return ModelSizes(shape.num_layers, layer_bytes, others, shape.device_kv_bytes_per_token(tensor, 1))


def _model(shape: ModelShape, on: Device, efficiency: Efficiency, tp: int, pp: int, host_layers: int) -> LatencyModel:
    kv_tokens = kv_capacity_tokens(shape, on, tp, pp, efficiency, host_layers)
    if kv_tokens <= 0:
        needed_gb = shape.weight_bytes / 1e9
        raise InvalidRequest(
            f"{shape.name} does not fit on {tp * pp} x {on.name}: its weights alone are {needed_gb:.3g} GB, and "
            f"each has {on.memory_bytes * efficiency.kv_memory / 1e9:.3g} GB for weights, activations and KV"
            f"{_enough(shape, on, efficiency)}",
            param="tensor_parallel",
        )
    share = shape.stage_share(pp)
    memory = on.memory_bytes_per_s * efficiency.memory
    attention_flops = on.flops * efficiency.attention_flops
    pair_s = shape.prompt_pair_flops * share / tp / attention_flops
    read_s = shape.kv_bytes_per_token * share / min(tp, shape.num_kv_heads) / memory
    context_s = max(read_s, shape.decode_pair_flops * share / tp / attention_flops)
    fixed_s, token_s = _beside(shape, on, efficiency, tp, pp)
    pieces = _product_pieces(shape, on, efficiency, tp, pp)
    return LatencyModel(
        prefill=tuple(
            PrefillPiece(least, PrefillModel(fixed_s + base_s, each_s + token_s, pair_s))
            for least, base_s, each_s in pieces
        ),
        step=tuple(
            StepPiece(least, StepModel(fixed_s + base_s, each_s + token_s, context_s))
            for least, base_s, each_s in pieces
        ),
        kv_tokens=kv_tokens,
        kv_bytes_per_token=shape.kv_bytes_per_token,
        source=f"roofline of {shape.name} on {on.name}, TP{tp} x PP{pp}",
        error=efficiency.error,
        num_stages=pp,
        num_devices=tp * pp,
        launch_s=efficiency.step_s,
    )


def _enough(shape: ModelShape, on: Device, efficiency: Efficiency) -> str:
    """The fewest devices that leave room for KV, with layers shared by eight at most."""
    for total in (2**power for power in range(11)):
        for tensor in (one for one in (8, 4, 2, 1) if one <= total):
            try:
                shape.check(tensor, total // tensor)
            except Incompatible:
                continue
            if kv_capacity_tokens(shape, on, tensor, total // tensor, efficiency) > 0:
                return f"; it fits on {total} (TP{tensor} x PP{total // tensor})"
    return ""


class _ProductPiece(NamedTuple):
    """From `least` tokens in a step on, the products of one stage take `base_s + each_s * tokens`."""

    least: float
    base_s: float
    each_s: float


def _product_pieces(shape: ModelShape, on: Device, efficiency: Efficiency, tp: int, pp: int) -> list[_ProductPiece]:
    """Reading the weights takes longer up to some tokens, multiplying them from there on.

    Experts have a limit of their own, and are read as far as they are chosen: their time is exact at `KNOTS` and
    interpolated between.
    """
    flops = on.product_flops(shape.weights.arithmetic) * efficiency.flops
    memory = on.memory_bytes_per_s * efficiency.memory
    layers, head = shape.common_params * shape.stage_share(pp), shape.head_params / pp
    slower = on.product_flops(shape.weights.arithmetic) / on.flops  # the head computes in bfloat16
    product_s = 2 * (layers + head * slower) / tp / flops  # per token
    weights_s = (layers * shape.weights.bytes_per_weight + head * 2.0) / tp / memory
    if shape.experts is None:
        return [_ProductPiece(0, weights_s, 0.0), _ProductPiece(weights_s / product_s, 0.0, product_s)]
    experts, num_layers = shape.experts, shape.stage_mixtures(pp)
    expert_read_s = num_layers * shape.expert_params * shape.weights.bytes_per_weight / memory
    expert_product_s = num_layers * shape.expert_params * 2 / flops
    points = [
        (
            load.num_tokens,
            max(weights_s, product_s * load.num_tokens)
            + max(expert_read_s * load.num_read, expert_product_s * load.num_products),
        )
        for load in expert_loads(experts.num_experts, experts.num_chosen, tp, efficiency.expert_skew)
    ]
    pieces = [_ProductPiece(0, points[0][1], 0.0)]
    for (tokens, seconds), (after, after_s) in pairwise(points):
        each_s = (after_s - seconds) / (after - tokens)
        pieces.append(_ProductPiece(tokens, seconds - each_s * tokens, each_s))
    return pieces


def _beside(shape: ModelShape, on: Device, efficiency: Efficiency, tp: int, pp: int) -> tuple[float, float]:
    """Communication of one stage in seconds: per step, and per token in it."""
    row_bytes = shape.hidden * 2.0
    link = on.link_bytes_per_s * efficiency.link
    exchange = on.exchange_bytes_per_s(tp) * efficiency.link
    all_reduces = 2 * shape.num_layers / pp if tp > 1 else 0.0
    fixed_s = all_reduces * efficiency.all_reduce_s + (_PIPELINE_HOP_S if pp > 1 else 0.0)
    token_s = all_reduces * row_bytes * 2 * (tp - 1) / tp / exchange + (row_bytes / link if pp > 1 else 0.0)
    return fixed_s, token_s
