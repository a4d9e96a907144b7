"""The workers of a cluster as a simulation begins."""

from __future__ import annotations

from halfmoon.errors import InvalidRequest
from halfmoon.sim.cluster.cluster_spec import ClusterSpec
from halfmoon.sim.cluster.worker import SimWorker


def idle_workers(spec: ClusterSpec, unit_tokens: int, *, keeps_times: bool) -> list[SimWorker]:
    """By number. `unit_tokens` are of a block of the workload's prefixes; `keeps_times`: of every token.

    Raises InvalidRequest where such a block is no multiple of the cluster's blocks, or no memory for one.
    """
    if unit_tokens % spec.block_tokens:
        raise InvalidRequest(
            f"the workload's prefixes are of blocks of {unit_tokens} tokens, which is no multiple of the "
            f"cluster's block_tokens, {spec.block_tokens}",
            param="block_tokens",
        )
    groups = [group for group in spec.groups for _ in range(group.count)]
    unit_pages = unit_tokens // spec.block_tokens
    workers = [
        SimWorker(number, group, node, spec.block_tokens, unit_pages, keeps_times=keeps_times)
        for number, (group, node) in enumerate(zip(groups, spec.nodes, strict=True))
    ]
    for worker in workers:
        if worker.kv.num_pages < unit_pages:
            raise InvalidRequest(
                f"the memory of worker {worker.name} holds no block of {unit_tokens} tokens: "
                "give it more kv_tokens, or smaller block_tokens",
                param="kv_tokens",
            )
    return workers
