"""Clusters of few workers whose times can be reckoned by hand, and work for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.sim.cluster.cluster_spec import ClusterSpec, Network, WorkerGroup
from halfmoon.sim.latency_sources.latency_model import LatencyModel, PrefillPiece, StepPiece
from halfmoon.sim.workloads.workload import Prefixes, Workload

# a prompt token takes 1 ms, a step 10 ms and 1 ms for each sequence
MODEL = LatencyModel(
    (PrefillPiece(0, PrefillModel(0.0, 1e-3, 0.0)),),
    (StepPiece(0, StepModel(0.01, 1e-3, 0.0)),),
    kv_tokens=64 * 200,
    kv_bytes_per_token=1e6,
    source="test",
)
FAST = Network(bytes_per_s=1e15, node_bytes_per_s=1e15, latency_s=0.0)


def group(role: str, count: int = 1, **changes: object) -> WorkerGroup:
    return replace(WorkerGroup("both", count, MODEL), role=role, **changes)  # type: ignore[arg-type]


def pair(network: Network = FAST, **changes: object) -> ClusterSpec:
    return replace(ClusterSpec((group("prefill"), group("decode")), network), **changes)  # type: ignore[arg-type]


def work(*rows: tuple[float, int, int], ids: list[list[int]] | None = None, block_tokens: int = 64) -> Workload:
    start_s, prompt, output = zip(*rows, strict=True)
    prefixes = None
    if ids is not None:
        offsets = np.concatenate([[0], np.cumsum([len(one) for one in ids])])
        prefixes = Prefixes(block_tokens, np.array([one for some in ids for one in some], dtype=np.int64), offsets)
    return Workload(np.array(start_s, dtype=float), np.array(prompt), np.array(output), prefixes)
