"""Configuration of a worker, apart from addresses."""

from __future__ import annotations

from typing import Literal

from pydantic import ByteSize, Field

from halfmoon.config.section import Section

Calibrate = Literal["auto", "always", "never"]
RoleName = Literal["prefill", "decode", "both"]


class WorkerConfig(Section):
    """The engine of one worker, its limits, and its links to others."""

    weights: Literal["checkpoint", "dummy"] = Field(
        "checkpoint", description="'dummy': random weights of the same shape"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where the engine computes; auto takes a GPU if there is one"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="number format of weights and KV; auto takes bfloat16 where it is fast"
    )
    block_tokens: int = Field(64, ge=1, description="tokens in a KV block; must be the same on all workers")
    kv_memory: ByteSize | None = Field(
        None, description="memory for KV blocks, such as 2GiB; default: a share of what is free"
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of a GPU's memory this worker uses if kv_memory is not given"
    )
    max_batch_tokens: int | None = Field(None, ge=2, description="most tokens in one forward pass; default: by device")
    chunk_tokens: int | None = Field(None, ge=1, description="prompt tokens in a step with decodes; default: by device")
    max_running: int = Field(64, ge=1, description="most sequences in one batch")
    offload_kv: Literal["none", "host"] = Field(
        "none",
        description="'host': KV that does not fit into kv_memory stays in host memory and is copied layer by layer; "
        "for OPT models the layers' inputs may be kept instead, half as large. Not with several ranks",
    )
    offload_bytes: ByteSize = Field(ByteSize(4 << 30), gt=0, description="host memory for offload_kv: host")
    offload_schedule: Literal["latency", "throughput"] = Field(
        "latency", description="groups of such sequences: one after another, or all in each layer"
    )
    max_context_tokens: int | None = Field(None, ge=1, description="limit on prompt + output; default: the model's")
    attention: Literal["auto", "sdpa", "native", "triton"] = Field(
        "auto",
        description="'triton': our CUDA kernels; 'native': our CPU kernels; 'sdpa': torch's; 'auto': by device",
    )
    cuda_graphs: bool = Field(True, description="on a GPU, capture decode steps at start")
    num_threads: int | None = Field(None, ge=1, description="CPU threads of each rank of the engine")
    tensor_parallel: int = Field(1, ge=1, description="devices that share every layer of the model")
    pipeline_parallel: int = Field(1, ge=1, description="number of stages, each with some of the layers")
    lease_s: float = Field(10.0, ge=5, description="seconds of silence after which a sender's KV reservation ends")
    kv_transports: str = Field(
        "shm,grpc",
        description="transports of KV, best first: 'cuda_ipc', 'shm', 'nixl'; 'grpc' is always the last resort",
    )
    kv_window: ByteSize = Field(ByteSize(32 << 20), description="most KV in transit to one worker")
    kv_stall_s: float = Field(10.0, gt=0, description="seconds without progress after which a KV link has failed")
    kv_link_mbps: float | None = Field(None, gt=0, description="for experiments: limit on KV links in MB/s")
    kv_link_delay_ms: float = Field(0.0, ge=0, description="for experiments: delay added to KV links")
    kv_store_mbps: float | None = Field(
        None, gt=0, description="for experiments: limit on the link to the store in MB/s"
    )
    calibrate: Calibrate = Field(
        "auto",
        description="measure a few prefills and decode steps before joining, so that the gateway can predict from the "
        "first request on. auto: use an earlier start's measurements (in the state directory); never: join at once",
    )
    calibrate_s: float = Field(3.0, gt=0, description="approximate seconds that calibration may take")
    drain_s: float = Field(2.0, ge=0, description="at SIGTERM, seconds that running requests get to finish")
