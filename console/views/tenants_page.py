"""The tenants page: who may send requests, what each may use and has used. For operators only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from console.forms.tenant_form import draw_keys, limits_form, new_key_card
from console.gateway_api import GatewayApi, GatewayError
from console.live import away, empty, live, show_message
from console.plain_text import plain
from console.quantities import NOTHING, size

NEW = "+ New tenant"


def render(api: GatewayApi) -> None:
    """Draws the page."""
    st.title("Tenants")
    show_message()
    live("tenants", api.tenants, _draw)
    try:
        tenants = api.tenants()["tenants"]
    except GatewayError:
        away(api.tenants, "tenants")
        return
    new_key_card()
    names = [tenant["name"] for tenant in tenants]
    chosen = st.selectbox("Tenant", [*names, NEW], key="tenant")
    tenant = next((tenant for tenant in tenants if tenant["name"] == chosen), None)
    left, right = st.columns([3, 2], gap="large")
    with left:
        st.subheader("Limits")
        limits_form(api, tenant)
    with right:
        st.subheader("Keys")
        draw_keys(api, tenant)


def tenant_row(tenant: Mapping[str, Any]) -> dict[str, Any]:
    """One row of the table."""
    usage = tenant["usage"] or {}
    keys = [key for key in tenant["keys"] if not key["revoked_at"]]
    return {
        "tenant": tenant["name"],
        "keys": len(keys),
        "requests": usage.get("num_requests", 0),
        "refused": usage.get("num_refused", 0),
        "prompt tokens": usage.get("prompt_tokens", 0),
        "cached": usage.get("cached_tokens", 0),
        "output tokens": usage.get("output_tokens", 0),
        "stored KV": size(tenant["stored_kv_bytes"]),
        "KV quota": size(tenant["kv_bytes"]) if tenant["kv_bytes"] else NOTHING,
        "requests/min": tenant["requests_per_minute"],
        "tokens/min": tenant["tokens_per_minute"],
        "classes": ", ".join(tenant["classes"] or ()) or "all",
        "weight": tenant["weight"],
        "from": "configuration" if tenant["is_declared"] else "ledger",
    }


def _draw(state: Mapping[str, Any]) -> None:
    if not state["tenants"]:
        empty(
            "No tenant yet",
            "Everybody who reaches the gateway may send requests. Once there is a key, every request needs one.",
            ":material/key:",
        )
        return
    rows = [tenant_row(tenant) for tenant in state["tenants"]]
    st.dataframe(rows, hide_index=True, placeholder=NOTHING, key="tenants")
    told = "Every request needs a key." if state["is_key_needed"] else "No request needs a key."
    st.caption(plain(f"Requests and tokens of the last 24 hours, of all gateways. {told}"))
