"""Who is in the cluster and how full it is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from console.gateway_api import GatewayApi, GatewayError

_REFRESH_S = 2


def worker_row(worker: Mapping[str, Any]) -> dict[str, Any]:
    """One line of the table."""
    load = worker.get("load") or {}
    return {
        "worker": worker["worker_id"],
        "role": worker["role"],
        "state": "draining" if load.get("draining") else "serving",
        "blocks used": used_share(worker),
        "running": load.get("num_running"),
        "waiting": load.get("num_waiting"),
        "reserved": load.get("num_reserved"),
        "held": load.get("num_held"),
        "prompt tokens": load.get("num_prefill_tokens_total"),
        "output tokens": load.get("num_output_tokens_total"),
        "address": worker.get("address"),
        "device": worker.get("device"),
        "pid": worker.get("pid"),
        "version": worker.get("version"),
        "last heard (s ago)": worker.get("age_s"),
    }


def used_share(worker: Mapping[str, Any]) -> float | None:
    """Share of the worker's KV blocks in use, 0 to 1; None before its first report."""
    total, load = worker.get("total_blocks"), worker.get("load")
    return None if not total or not load else 1 - load["free_blocks"] / total


def render(api: GatewayApi) -> None:
    """The page; refreshes itself."""
    st.header("Cluster")
    st.fragment(_render_now, run_every=_REFRESH_S)(api)


def _render_now(api: GatewayApi) -> None:
    try:
        cluster = api.cluster()
    except GatewayError as err:
        st.error(str(err))
        return
    workers = cluster["workers"]
    columns = st.columns(4)
    columns[0].metric("Model", cluster.get("served_model") or cluster.get("model") or "none")
    columns[1].metric("Workers", len(workers))
    columns[2].metric("Running", sum((worker.get("load") or {}).get("num_running", 0) for worker in workers))
    columns[3].metric("Waiting", sum((worker.get("load") or {}).get("num_waiting", 0) for worker in workers))
    st.caption(
        f"gateway {cluster.get('gateway_id', '?')}, up {cluster.get('uptime_s', 0):.0f} s, "
        f"context {cluster.get('context_tokens') or 'unknown'} tokens"
    )
    if cluster.get("missing"):
        st.warning(f"Requests are refused: there is no {' and no '.join(cluster['missing'])} worker.")
    if not workers:
        return
    share = st.column_config.ProgressColumn(format="percent", min_value=0, max_value=1)
    st.dataframe([worker_row(worker) for worker in workers], column_config={"blocks used": share}, hide_index=True)
