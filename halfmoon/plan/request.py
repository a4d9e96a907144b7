"""A user's request to the planner, in the terms of the command line: plain values, as a service receives them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from halfmoon.plan.problem import Affinity, Objective
from halfmoon.policy.placement.conditional import DEFAULT_MODE, ConditionalMode
from halfmoon.sim.cluster.cluster_spec import TbtOf
from halfmoon.sim.cluster.kv_codecs import KvCodecName
from halfmoon.sim.result import Criterion


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """One request. `make_plan` checks it. None means the default that `halfmoon plan --help` names.

    - workload: a trace's path, `chat`, `code`, … or `in=512,out=64`.
    - latency: what `latency_source` takes, or GPU=SOURCE for each GPU, separated by commas; None: the model's roofline.
    - gpu: a name, with `num_nodes` x `gpus_per_node` of them, or `h100:2x8,a100-80g:4x8`.
    - prices: dollars per hour of one GPU, by name, instead of the catalogue's.
    - network_gbit_per_s: of each node's port; None: the catalogue's.
    - context_tokens: of the model; None: its own.
    - num_requests: of one pass; of a trace, the first ones.
    - is_thorough: prune by bounds only; takes several times as long.
    - conditional_disaggregation: when decode workers compute prompts; `auto` and `strict` take several times as long.
    - host_bytes_per_gpu: host memory for KV; above 0, workers with `--offload-kv host` are tried, too.
    - max_prefill_degree: most prefill workers that compute one long prompt; above 1, layouts in which several do are
      tried, too.
    - kv_policy: of the class of these requests, such as sinks:4+1024; None: all KV is kept.
    - host_weight_bytes_per_gpu: host memory for weights; above 0, GPUs that do not hold the model are planned with
      `--offload-weights`.
    """

    model: str
    gpu: str
    workload: str
    ttft_s: float
    tpot_s: float
    tbt_s: float | None = None
    tbt_of: TbtOf = "longest-tenth"
    num_nodes: int = 1
    gpus_per_node: int = 8
    rate_per_s: float | None = None
    attainment: float = 0.9
    criterion: Criterion = "joint"
    objective: Objective | None = None
    affinity: Affinity = "auto"
    latency: str | None = None
    max_running: int | None = None
    num_requests: int | None = None
    seed: int = 0
    prefill_gpu: str | None = None
    decode_gpu: str | None = None
    prices: Mapping[str, float] = field(default_factory=dict)
    kv_codec: KvCodecName | Literal["auto"] = "auto"
    network_gbit_per_s: float | None = None
    context_tokens: int | None = None
    is_thorough: bool = False
    conditional_disaggregation: ConditionalMode = DEFAULT_MODE
    host_bytes_per_gpu: int = 0
    host_weight_bytes_per_gpu: int = 0
    kv_policy: str | None = None
    max_prefill_degree: int = 1
