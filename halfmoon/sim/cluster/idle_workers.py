"""The workers of a cluster at the beginning of a simulation."""

from __future__ import annotations

from halfmoon.errors import InvalidRequest
from halfmoon.sim.cluster.cluster_spec import ClusterSpec
from halfmoon.sim.worker.worker import SimWorker
from halfmoon.sim.workloads.workload import Prefixes


def idle_workers(spec: ClusterSpec, prefixes: Prefixes | None, *, keeps_times: bool) -> list[SimWorker]:
    """All workers by number. `keeps_times`: record the time of every token.

    Raises InvalidRequest if the blocks of `prefixes` are not a multiple of the cluster's, or if a worker's memory does
    not hold one such block.
    """
    prefix_block_tokens = spec.prefix_block_tokens(prefixes)
    if prefixes is not None and prefixes.block_tokens % spec.block_tokens:
        raise InvalidRequest(
            f"the workload's prefixes are of blocks of {prefixes.block_tokens} tokens, which is not a multiple of the "
            f"cluster's block_tokens, {spec.block_tokens}",
            param="block_tokens",
        )
    groups = [group for group in spec.groups for _ in range(group.count)]
    prefix_block_size = prefix_block_tokens // spec.block_tokens
    workers = [
        SimWorker(number, group, node, spec.block_tokens, prefix_block_size, keeps_times=keeps_times)
        for number, (group, node) in enumerate(zip(groups, spec.nodes, strict=True))
    ]
    for worker in workers:
        if worker.kv.num_blocks < prefix_block_size:
            raise InvalidRequest(
                f"the memory of worker {worker.name} holds no block of {prefix_block_tokens} tokens: "
                "give it more kv_tokens, or smaller block_tokens",
                param="kv_tokens",
            )
    return workers
