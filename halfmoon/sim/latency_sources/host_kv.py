"""Workers whose KV beyond the device's memory is in host memory (`--offload-kv host`, the schedule "throughput")."""

from __future__ import annotations

from dataclasses import replace

from halfmoon.errors import InvalidRequest
from halfmoon.sim.latency_sources.hardware import device
from halfmoon.sim.latency_sources.latency_model import HostKV, LatencyModel, LatencySource
from halfmoon.sim.latency_sources.roofline import Roofline
from halfmoon.sim.latency_sources.sequence_parallel import parallel_model

_DEVICE_SHARE = 0.75  # of the device's KV memory for blocks; the engine keeps up to a quarter for its staging buffers

_KV_BYTES = 2.0  # of a number


def worker_model(
    source: LatencySource, gpu: str | None, tensor: int, pipeline: int, sequence: int, host_bytes: int = 0
) -> LatencyModel:
    """The latency of one worker, with `host_bytes` of host memory for KV of all its devices together.

    Raises InvalidRequest as `parallel_model` does, and for a worker that would refuse KV on the host. That needs a
    roofline, which knows the devices' links to their host.
    """
    model = parallel_model(source, gpu, tensor, pipeline, sequence)
    if not host_bytes:
        return model
    if pipeline * sequence > 1:
        raise InvalidRequest(
            f"KV on the host is not for stages of layers, or ranks that share tokens: not for TP{tensor} x PP{pipeline}"
            f" x SP{sequence}",
            param="offload_bytes",
        )
    if not isinstance(source, Roofline):
        raise InvalidRequest(
            "how fast KV comes from the host was not measured: latencies need to be a roofline's", param="offload_bytes"
        )
    if source.shape.bytes_per_kv != _KV_BYTES:
        raise InvalidRequest("KV on the host is kept in the model's dtype: plan without another KV", param="latency")
    name = gpu or source.default_gpu
    assert name is not None, "the source's own model had a device"
    pcie_bytes_per_s = device(name).pcie_bytes_per_s
    if pcie_bytes_per_s is None:
        raise InvalidRequest(
            f"a {name} computes in host memory: give it more of that instead of KV on the host", param="offload_bytes"
        )
    token_bytes = source.shape.device_kv_bytes_per_token(tensor, 1)
    device_tokens = int(model.kv_tokens * _DEVICE_SHARE)
    load_s = token_bytes / (pcie_bytes_per_s * source.efficiency.link)
    return replace(
        model,
        kv_tokens=device_tokens + int(host_bytes / tensor // token_bytes),
        host=HostKV(device_tokens, load_s, source.shape.num_layers),
        source=f"{model.source}, {host_bytes / 2**30:g} GiB KV on the host",
    )
