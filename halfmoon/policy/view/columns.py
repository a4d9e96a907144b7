"""Which figures of each worker the cluster view keeps as columns."""

from __future__ import annotations

FIGURES = {
    name: index
    for index, name in enumerate(
        (
            "capacity_tokens",
            "block_tokens",
            "free_blocks",
            "num_requests",
            "waiting_prefill_tokens",
            "context_in_use_tokens",
            "prefill_free_s",
            "others_prefill_s",
            "fetch_s_per_token",
            "total_tokens",
        )
    )
}
"""Columns of `ClusterView.figures`, named as in `WorkerView`, and the tokens of all its blocks."""

LOAD = slice(FIGURES["free_blocks"], FIGURES["others_prefill_s"] + 1)
"""Of them those that load reports bring."""
