"""What a worker can be told, beside where the others are."""

from __future__ import annotations

from typing import Literal

from pydantic import ByteSize, Field

from halfmoon.config.section import Section

Calibrate = Literal["auto", "always", "never"]
RoleName = Literal["prefill", "decode", "both"]


class WorkerConfig(Section):
    """The engine of one worker, its limits, and its links to others."""

    weights: Literal["checkpoint", "dummy"] = Field("checkpoint", description="'dummy': random weights of that shape")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where the engine computes; auto takes a GPU if there is one"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="number format of weights and KV; auto takes bfloat16 where it is fast"
    )
    block_tokens: int = Field(64, ge=1, description="tokens in a KV block; the same on all workers")
    kv_memory: ByteSize | None = Field(
        None, description="memory for KV blocks, such as 2GiB; default: a share of what is free"
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of a GPU that this worker takes, where kv_memory is not given"
    )
    max_batch_tokens: int | None = Field(None, ge=2, description="most tokens in one forward pass; default: by device")
    chunk_tokens: int | None = Field(None, ge=1, description="prompt tokens beside running decodes; default: by device")
    max_running: int = Field(64, ge=1, description="most sequences in one batch")
    offload_kv: Literal["none", "host"] = Field(
        "none",
        description="'host': KV that kv_memory does not hold lies in host memory and comes layer by layer; "
        "of OPT, layers' inputs may lie there instead, half as large. Not with several ranks",
    )
    offload_bytes: ByteSize = Field(ByteSize(4 << 30), gt=0, description="host memory for offload_kv: host")
    offload_schedule: Literal["latency", "throughput"] = Field(
        "latency", description="groups of such sequences one after the other, or all of them in each layer"
    )
    max_context_tokens: int | None = Field(None, ge=1, description="limit on prompt + output; default: the model's")
    attention: Literal["auto", "sdpa", "native", "triton"] = Field(
        "auto",
        description="'triton': our kernels for CUDA; 'native': those for CPUs; 'sdpa': torch's; 'auto': by device",
    )
    cuda_graphs: bool = Field(True, description="on a GPU, capture decode steps at start")
    num_threads: int | None = Field(None, ge=1, description="CPU threads of the engine, of each of its ranks")
    tensor_parallel: int = Field(1, ge=1, description="devices that share every layer of the model")
    pipeline_parallel: int = Field(1, ge=1, description="stages of devices, each with some of the layers")
    lease_s: float = Field(10.0, ge=5, description="a KV reservation ends when its sender is silent for this long")
    kv_transports: str = Field(
        "shm,grpc",
        description="places for KV under way, best first: 'cuda_ipc', 'shm', 'nixl'; 'grpc' always remains",
    )
    kv_window: ByteSize = Field(ByteSize(32 << 20), description="KV under way to one worker, at most")
    kv_stall_s: float = Field(10.0, gt=0, description="a KV link without progress for this long has failed")
    kv_link_mbps: float | None = Field(None, gt=0, description="for experiments: KV goes so many megabytes a second")
    kv_link_delay_ms: float = Field(0.0, ge=0, description="for experiments: KV arrives this much later")
    kv_store_mbps: float | None = Field(
        None, gt=0, description="for experiments: so many megabytes a second to and from the store"
    )
    calibrate: Calibrate = Field(
        "auto",
        description="measure a few prefills and decode steps before joining, so that the gateway predicts from the "
        "first request on: auto uses what an earlier start measured (in the state directory), never joins at once",
    )
    calibrate_s: float = Field(3.0, gt=0, description="how long that may take, about")
    drain_s: float = Field(2.0, ge=0, description="at SIGTERM, time that running requests get to finish")
