"""Workers with KV or weights in host memory (`--offload-kv host`, `--offload-weights`, the schedule "throughput")."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from halfmoon.errors import Incompatible, InvalidRequest
from halfmoon.policy.offload.host_choice import (
    STAGING_SHARE,
    Demand,
    HostChoice,
    Memory,
    Objective,
    Rates,
    choose_host_share,
    num_host_layers,
    streamed_layers,
)
from halfmoon.policy.offload.recompute import NEVER, OffloadCosts, Recompute
from halfmoon.sim.latency_sources.hardware import Device, device
from halfmoon.sim.latency_sources.host_memory import HostMemory, Recomputed
from halfmoon.sim.latency_sources.latency_model import LatencyModel, LatencySource
from halfmoon.sim.latency_sources.roofline import Roofline, model_sizes, usable_bytes
from halfmoon.sim.latency_sources.sequence_parallel import parallel_model

_KV_BYTES = 2.0  # of a number


class HostShare(NamedTuple):
    """What a worker keeps on its host: KV in bytes, of all devices together, and weights of a share of the layers."""

    kv_bytes: int = 0
    weights: float = 0.0

    def __str__(self) -> str:
        kv = f"{self.kv_bytes / 2**30:g} GiB KV" * bool(self.kv_bytes)
        weights = f"{self.weights:.0%} of the weights" * bool(self.weights)
        return " and ".join(one for one in (kv, weights) if one) + " on the host"


NOTHING = HostShare()


class HostRoom(NamedTuple):
    """Host memory of a worker in bytes, of all devices together."""

    kv_bytes: float
    weight_bytes: float


def worker_model(
    source: LatencySource, gpu: str | None, tensor: int, pipeline: int, sequence: int, host: HostShare = NOTHING
) -> LatencyModel:
    """The latency of one worker.

    Raises InvalidRequest as `parallel_model` does, and for a worker that would refuse what is to be on the host. That
    needs a roofline, which knows the devices' links to their host.
    """
    if not any(host):
        return parallel_model(source, gpu, tensor, pipeline, sequence)
    roofline, on = _checked(source, gpu, (tensor, pipeline, sequence), host)
    shape = roofline.shape
    host_layers = num_host_layers(shape.num_layers, host.weights)
    model = roofline.model(gpu, tensor, 1, host_layers)
    token_bytes = shape.device_kv_bytes_per_token(tensor, 1)
    device_tokens = model.kv_tokens
    if host.kv_bytes:  # the engine keeps up to that share for its staging buffers
        device_tokens = int(model.kv_tokens * (1 - 1 / STAGING_SHARE))
    load_s = 1 / _link_bytes_per_s(roofline, on)  # of a byte
    return replace(
        model,
        kv_tokens=device_tokens + int(host.kv_bytes / tensor // token_bytes),
        host=HostMemory(
            device_tokens,
            token_bytes * load_s,
            shape.num_layers,
            shape.device_layer_bytes(tensor) * streamed_layers(host_layers) * load_s,
            _recomputed(roofline, on, token_bytes * load_s) if host.kv_bytes and tensor == 1 else None,
        ),
        source=f"{model.source}, {host}",
    )


def chosen_weights(
    source: LatencySource,
    gpu: str | None,
    tensor: int,
    room: HostRoom,
    demand: Demand,
    objective: Objective,
) -> float:
    """The share of layers whose weights a worker would keep on its host, by the engine's own rule.

    Raises InvalidRequest as `worker_model` does, and if even so the devices do not hold one sequence.
    """
    needed = HostShare(int(room.kv_bytes), 1.0)
    roofline, on = _checked(source, gpu, (tensor, 1, 1), needed)
    try:
        return _host_choice(roofline, gpu, on, tensor, room, demand, objective).host_share
    except Incompatible as error:
        what = f"{roofline.shape.name} on {tensor} x {on.name}: {error.message}"
        raise InvalidRequest(what, param="host_weights") from error


def _host_choice(
    roofline: Roofline, gpu: str | None, on: Device, tensor: int, room: HostRoom, demand: Demand, objective: Objective
) -> HostChoice:
    shape, num_layers = roofline.shape, roofline.shape.num_layers
    sizes = model_sizes(shape, tensor)
    times = roofline.model(gpu, tensor, 1, num_layers)
    one, many = times.cycle(1), times.cycle(demand.max_batch)
    load_s = 1 / _link_bytes_per_s(roofline, on)
    inputs = None
    if tensor == 1 and (way := _recomputed(roofline, on, sizes.token_bytes * load_s)) is not None:
        inputs = Recompute(way.fetch_s / num_layers, way.compute_s / num_layers)
    costs = OffloadCosts(sizes.token_bytes * load_s / num_layers, one.base_s / num_layers, inputs, NEVER)
    row_s = (many.base_s - one.base_s) / max(demand.max_batch - 1, 1) / num_layers
    rates = Rates(costs, sizes.layer_bytes * load_s, row_s, one.slope_s / num_layers)
    kv_bytes, weight_bytes = room.kv_bytes / tensor, room.weight_bytes / tensor
    memory = Memory(usable_bytes(shape, on, tensor, roofline.efficiency), kv_bytes + weight_bytes, kv_bytes)
    numbers = [layers for layers in range(num_layers + 1) if layers * sizes.layer_bytes <= weight_bytes]
    return choose_host_share(rates, sizes, memory, demand, objective, numbers)


def _checked(
    source: LatencySource, gpu: str | None, parallelism: tuple[int, int, int], host: HostShare
) -> tuple[Roofline, Device]:
    tensor, pipeline, sequence = parallelism
    param = "offload_bytes" if host.kv_bytes else "offload_weights"
    if pipeline * sequence > 1:
        raise InvalidRequest(
            "KV or weights on the host are not planned for stages of layers, or ranks that share tokens: not for "
            f"TP{tensor} x PP{pipeline} x SP{sequence}",
            param=param,
        )
    if not isinstance(source, Roofline):
        raise InvalidRequest(
            "how fast KV and weights come from the host was not measured: latencies need to be a roofline's",
            param=param,
        )
    if host.kv_bytes and source.shape.bytes_per_kv != _KV_BYTES:
        raise InvalidRequest("KV on the host is kept in the model's dtype: plan without another KV", param="latency")
    name = gpu or source.default_gpu
    if name is None:
        raise InvalidRequest("a roofline needs to know the hardware: name a gpu for each group", param="gpu")
    on = device(name)
    if on.pcie_bytes_per_s is None:
        raise InvalidRequest(
            f"a {name} computes in host memory: give it more of that instead of KV or weights on the host", param=param
        )
    return source, on


def _link_bytes_per_s(roofline: Roofline, on: Device) -> float:
    assert on.pcie_bytes_per_s is not None
    return on.pcie_bytes_per_s * roofline.efficiency.link


def _recomputed(roofline: Roofline, on: Device, load_s: float) -> Recomputed | None:
    """OPT's K and V from layers' inputs: half of the bytes, and the two projections. Others load everything."""
    shape = roofline.shape
    if not shape.computes_kv_from_inputs:
        return None
    flops = 2 * 2 * shape.num_layers * shape.hidden * shape.num_kv_heads * shape.head_dim
    return Recomputed(load_s / 2, flops / (on.product_flops(shape.weights.arithmetic) * roofline.efficiency.flops))
