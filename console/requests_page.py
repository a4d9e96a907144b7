"""What happened: the ledger's newest rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from console.gateway_api import GatewayApi, GatewayError

_LIMITS = (50, 200, 1000)


def request_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """One line of the table; absent times stay empty."""
    return {
        "request": row["request_id"],
        "created": row.get("created_at"),
        "status": row.get("status"),
        "prompt": row.get("prompt_tokens"),
        "output": row.get("output_tokens"),
        "TTFT (ms)": _ms(row.get("ttft_s")),
        "mean TBT (ms)": _ms(row.get("mean_tbt_s")),
        "total (s)": row.get("e2e_s"),
        "prefill": row.get("prefill_worker"),
        "decode": row.get("decode_worker"),
        "error": row.get("error"),
    }


def median(values: Sequence[float | None]) -> float | None:
    """Of the values that are there; None of none."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    middle = len(known) // 2
    return known[middle] if len(known) % 2 else (known[middle - 1] + known[middle]) / 2


def render(api: GatewayApi) -> None:
    """The page."""
    st.header("Requests")
    limit = st.selectbox("Newest", _LIMITS)
    st.button("Refresh")
    try:
        rows = api.requests(limit)
    except GatewayError as err:
        st.error(str(err))
        return
    if not rows:
        st.info("No request has come yet.")
        return
    columns = st.columns(3)
    columns[0].metric("Requests", len(rows))
    columns[1].metric("Median TTFT", _shown(median([row.get("ttft_s") for row in rows])))
    columns[2].metric("Median of mean TBT", _shown(median([row.get("mean_tbt_s") for row in rows])))
    st.dataframe([request_row(row) for row in rows], hide_index=True)


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else round(value_s * 1000, 1)


def _shown(value_s: float | None) -> str:
    return "none yet" if value_s is None else f"{value_s * 1000:.1f} ms"
