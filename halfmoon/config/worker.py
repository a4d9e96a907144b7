"""Settings of a worker, except the addresses of other services."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, ByteSize, Field

from halfmoon.config.section import Section, off_is_a_word
from halfmoon.host_limits import MOST_THREADS

Calibrate = Literal["auto", "always", "never"]
_MOST = (1 << 31) - 1  # of what is counted: messages between services hold no more


class WorkerConfig(Section):
    """The engine of one worker, its limits, and its links to others."""

    engine: Literal["halfmoon", "vllm"] = Field(
        "halfmoon", description="what computes: 'halfmoon', our own engine; 'vllm', which has to be installed"
    )
    engine_python: Path | None = Field(
        None,
        description="Python interpreter that `halfmoon up` runs the worker with, such as that of vLLM's environment",
    )
    engine_args: str = Field(
        "", description="further options for vLLM, as on its command line, such as '--quantization awq'"
    )
    staging_memory: ByteSize = Field(
        ByteSize(512 << 20),
        gt=0,
        description="host memory of a worker with vLLM for KV that is handed over or loaded, and for its last prompts",
    )
    weights: Literal["checkpoint", "dummy"] = Field(
        "checkpoint", description="'checkpoint': the model's; 'dummy': random weights of the same shape"
    )
    prepared_weights: Annotated[str, BeforeValidator(off_is_a_word)] = Field(
        "auto",
        description="directory, its owner's alone, where packed weights are kept: workers of a host share their memory "
        "and start sooner; auto: `prepared` in the cache directory; off: not kept. Our own engine, on a CPU",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where the engine computes; auto uses a GPU if there is one"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="number format of weights and KV; auto uses bfloat16 where it is fast"
    )
    kv_dtype: Literal["auto", "int8", "fp8"] = Field(
        "auto",
        description="number format of KV in memory; int8, fp8 (e4m3): with a scale for each token and head, half as "
        "large as bfloat16, int8 nearer to it; auto: the dtype. Not with vLLM, nor with offload_kv",
    )
    block_tokens: int = Field(64, ge=1, le=_MOST, description="tokens in a KV block; must be the same on all workers")
    kv_memory: ByteSize | None = Field(
        None,
        gt=0,
        description="memory for KV blocks, such as 2GiB, on a CPU in huge pages, of which an idle worker of one rank "
        "without offload_kv has some ready ahead of use; default on a CPU: an eighth of the free memory, or a "
        "quarter among more than two host_workers, at most 2GiB",
    )
    host_workers: int = Field(
        1,
        ge=1,
        description="workers that start on this host at once and divide what is free of its memory, or of its "
        "container's; where their threads exceed its cores, decode steps of our own engine leave time to prompts that "
        "are on their way, as far as TBT targets allow; `halfmoon up` sets it to the number that it starts here",
    )
    paused_memory: ByteSize | None = Field(
        None,
        ge=0,
        description="host memory for KV of paused answers (max_pause_s) whose blocks others need; what does not fit is "
        "computed again, as all is with 0; default: as much as the KV memory, at most a quarter of the free memory, "
        "or a half among more than two host_workers. Our own engine",
    )
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="share of a GPU's memory that this worker uses, unless kv_memory is given"
    )
    max_batch_tokens: int | None = Field(
        None, ge=2, le=_MOST, description="most tokens in one forward pass; default: depends on the device"
    )
    chunk_tokens: int | None = Field(
        None,
        ge=1,
        le=_MOST,
        description="most prompt tokens in a step with running decodes; default: what the tightest TBT target of those "
        "leaves, or all that fits where nobody set one",
    )
    max_running: int = Field(64, ge=1, le=_MOST, description="most sequences in one batch")
    offload_kv: Literal["none", "host", "auto"] = Field(
        "none",
        description="'host': KV that exceeds kv_memory is kept in host memory and fetched layer by layer; for OPT, "
        "layers' inputs, half as large, may be kept there instead. With tensor_parallel all of it is fetched; not with "
        "pipeline_parallel. auto: if measured rates say that it pays, as with offload_weights: auto",
    )
    offload_bytes: ByteSize = Field(
        ByteSize(4 << 30), gt=0, description="host memory for offload_kv: host or auto, of all ranks together"
    )
    device_memory: ByteSize | None = Field(
        None,
        gt=0,
        description="memory for weights and KV together that offload_kv: auto and offload_weights: auto divide, "
        "instead of kv_memory; default: gpu_memory_utilization of the GPU; needed on a CPU",
    )
    offload_schedule: Literal["auto", "latency", "throughput"] = Field(
        "auto",
        description="order of offloaded sequences: 'latency': group by group; 'throughput': all of them in each layer, "
        "whose weights are then read once; auto: throughput with offload_weights, else latency",
    )
    offload_recompute: Literal["auto", "never", "always"] = Field(
        "auto",
        description="what is computed again instead of loaded with offload_kv: host: auto, as measured rates say; "
        "never; always, K and V from layers' inputs, which only a model has whose inputs are half as large (OPT)",
    )
    offload_weights: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = Field(
        0.0,
        description="share of the layers whose weights are in host memory and come in while others compute; room for "
        "two layers on the device is for them. auto: chosen at start by measured rates, for the most tokens a second "
        "of up to max_running sequences of max_context_tokens, or with offload_schedule: latency for the fastest step "
        "of one. On a CPU with attention: native. Not with vLLM",
    )
    max_context_tokens: int | None = Field(
        None, ge=1, le=_MOST, description="most tokens of prompt and output; default: the model's context"
    )
    attention: Literal["auto", "sdpa", "native", "triton", "flex"] = Field(
        "auto",
        description="'triton': our CUDA kernels; 'native': our CPU kernels; 'sdpa': torch's; 'flex': torch's "
        "FlexAttention, compiled where a C++ compiler (or Triton, on a GPU) is; 'auto': by device",
    )
    mixed_attention: Literal["auto", "fused", "apart"] = Field(
        "auto",
        description="with attention: triton, decodes and prompts of a step by one kernel ('fused'), by two ('apart'), "
        "or by a table of GPUs where one was measured to be faster, which is empty yet ('auto')",
    )
    cuda_graphs: bool = Field(True, description="capture decode steps in CUDA graphs at start, on a GPU")
    speculation: Annotated[Literal["off", "ngram"], BeforeValidator(off_is_a_word)] = Field(
        "off",
        description="'ngram': a decode step also computes tokens that followed the last three before, and keeps those "
        "that are drawn; the text stays as it is. Stops by itself where it does not pay. Our own engine, on a CPU",
    )
    num_threads: int | None = Field(
        None,
        ge=1,
        le=MOST_THREADS,
        description="CPU threads of each rank of the engine; default: `OMP_NUM_THREADS`, which `halfmoon up` sets to a "
        "share of the cores",
    )
    tensor_parallel: int = Field(1, ge=1, le=_MOST, description="devices that share every layer of the model")
    pipeline_parallel: int = Field(1, ge=1, le=_MOST, description="stages that the layers are divided into")
    sequence_parallel: int = Field(
        1,
        ge=1,
        le=_MOST,
        description="devices with the whole model each that share the tokens of long prompts (ring attention), for "
        "prefill workers; instead of the two others. Our own engine",
    )
    long_prompt_tokens: int = Field(
        4096,
        ge=1,
        le=_MOST,
        description="with sequence_parallel: all its devices compute prompts with more uncached tokens than this; "
        "shorter ones stay on one each",
    )
    remote_ranks: int = Field(
        0,
        ge=0,
        le=_MOST,
        description="how many of the tensor, pipeline or sequence parallel ranks are on other hosts, the last "
        "first: `halfmoon join RANK_LISTEN --ranks N` there. Not with vLLM",
    )
    rank_listen: str | None = Field(None, description="HOST:PORT of this host where remote_ranks join")
    lease_s: float = Field(10.0, ge=5, description="a KV reservation ends after its sender has been silent this long")
    kv_transports: str = Field(
        "shm,grpc",
        description="transports of KV, best first: 'cuda_ipc', 'shm', 'nixl'; 'grpc' is always the last resort",
    )
    kv_window: ByteSize = Field(ByteSize(32 << 20), gt=0, description="most KV in transfer to one worker")
    kv_stall_s: float = Field(10.0, gt=0, description="a KV link without progress for this long has failed")
    kv_link_mbps: float | None = Field(
        None, gt=0, description="for experiments: limits KV transfer to this many megabytes per second"
    )
    kv_link_delay_ms: float = Field(0.0, ge=0, description="for experiments: delays KV transfer by this much")
    kv_store_mbps: float | None = Field(
        None,
        gt=0,
        description="for experiments: limits transfer to and from the store to this many megabytes per second",
    )
    calibrate: Calibrate = Field(
        "auto",
        description="measure a few prefills and decode steps before joining, so that the gateway can predict from the "
        "first request on. auto: use an earlier start's measurements (in the state directory); never: join at once",
    )
    calibrate_s: float = Field(3.0, gt=0, description="how long calibration may take, roughly")
    keep_answers_s: float = Field(
        60.0,
        ge=0,
        description="how long the answer to a request with a client's id is kept after its end, and goes on after its "
        "gateway has died, for a repeat of the request",
    )
    keep_answers_bytes: ByteSize = Field(
        ByteSize(64 << 20), ge=0, description="most memory for kept answers; those that ended first are dropped first"
    )
    stream_interval_ms: float = Field(
        8.0,
        ge=0,
        le=1000,
        description="tokens of decode steps shorter than this wait for the next step's, at most for as long, and share "
        "its message and event; 0: every step sends its own",
    )
    drain_s: float = Field(2.0, ge=0, description="how long running requests may take to finish after SIGTERM")
