"""Forms of the tenants page: limits, keys, and a new key, which is shown once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from functools import partial
from typing import Any

import streamlit as st

from console.forms.form_version import begun, follow, forget
from console.gateway_api import GatewayApi
from console.live import refusals_shown, rerun_with
from console.plain_text import plain

_GIB = 1 << 30
_NO_LIMITS: Mapping[str, Any] = {
    "name": "", "version": 0, "requests_per_minute": None, "tokens_per_minute": None, "kv_bytes": None, "classes": None,
    "default_class": None, "weight": 1.0, "cache_pool": None, "is_declared": False, "keys": (),
}  # fmt: skip


def limits_form(api: GatewayApi, tenant: Mapping[str, Any] | None) -> None:
    """Draws the limits of a tenant; None: of a new one."""
    known = begun("tenant", tenant) if tenant else _NO_LIMITS
    if known["is_declared"]:
        st.caption("This tenant is one of the configuration file: its limits are changed there.")
        return
    key = f"{known['name']}-{known['version']}"
    name = known["name"] or st.text_input("Name", key=f"name-{key}", max_chars=64)
    first, second = st.columns(3), st.columns(3)
    requests = first[0].number_input(
        "Requests a minute", 0.0, None, known["requests_per_minute"], key=f"requests-{key}"
    )
    tokens = first[1].number_input("Tokens a minute", 0.0, None, known["tokens_per_minute"], key=f"tokens-{key}")
    kv_gib = known["kv_bytes"] and known["kv_bytes"] / _GIB
    kv = first[2].number_input("KV in each store (GiB)", 0.0, None, kv_gib, key=f"kv-{key}")
    classes = second[0].text_input("Classes", ", ".join(known["classes"] or ()), key=f"classes-{key}",
                                   help="Separated by commas; empty: all.")  # fmt: skip
    usual = second[1].text_input("Default class", known["default_class"] or "", key=f"default-{key}")
    weight = second[2].number_input("Weight", 0.001, 1_000.0, float(known["weight"]), key=f"weight-{key}")
    pool = st.text_input("Cache pool", known["cache_pool"] or "", key=f"pool-{key}", max_chars=64,
                         help="Tenants of one pool share cached KV; empty: its cache is its own.")  # fmt: skip
    body = {
        "version": known["version"], "requests_per_minute": requests or None, "tokens_per_minute": tokens or None,
        "kv_bytes": round(kv * _GIB) if kv else None, "default_class": usual or None, "weight": weight,
        "classes": [part.strip() for part in classes.split(",") if part.strip()] or None, "cache_pool": pool or None,
    }  # fmt: skip
    if tenant:
        follow("tenant", tenant, known, body)
    if st.button("Save limits", type="primary", disabled=not name, key=f"save-limits-{key}"):
        _edit(lambda: _save(api, name, body), f"The limits of {name} are saved.", {"tenant": name})


def draw_keys(api: GatewayApi, tenant: Mapping[str, Any] | None) -> None:
    """Draws the keys of a tenant, with a form for a new one. A new tenant begins with its limits."""
    if tenant is None:
        st.caption("Save the limits first; none are needed.")
        return
    name = tenant["name"]
    for key in tenant["keys"]:
        text, button = st.columns([3, 1], vertical_alignment="center")
        text.markdown(key_line(key))
        if button.button("Revoke", disabled=bool(key["is_declared"] or key["revoked_at"]), key=f"re-{key['key_id']}"):
            _edit(partial(api.revoke_key, name, key["key_id"]), f"Key {key['key_id']} is revoked.")
    label = st.text_input("For", max_chars=128, key=f"label-{name}", help="Shown in this list.")
    days = st.number_input("Days until it ends", 0.0, 36_500.0, None, key=f"days-{name}", help="Empty: never.")
    if st.button("Make a key", key=f"make-{name}"):
        _edit(lambda: _make(api, name, label, days), f"{name} has a new key.")


def key_line(key: Mapping[str, Any]) -> str:
    """One key as a line."""
    if key["is_declared"]:
        state = "of the configuration"
    elif key["revoked_at"]:
        state = f"revoked {_when(key['revoked_at'])}"
    else:
        state = f"made {_when(key['created_at'])}" + (f", ends {_when(key['expires_at'])}" if key["expires_at"] else "")
    label = f" {plain(key['label'])}" if key["label"] else ""
    return f"`{key['key_id']}`{label}  \n:small[:gray[{state}]]"


def new_key_card() -> None:
    """Shows the key that was just made, until it is put away."""
    made = st.session_state.get("new_api_key")
    if made is None:
        return
    with st.container(border=True):
        st.markdown("**The new key.** It is not shown again, and nobody can look it up.")
        st.code(made, language=None)
        if st.button("I have it", key="have-key"):
            del st.session_state["new_api_key"]
            st.rerun()


def _save(api: GatewayApi, name: str, body: Mapping[str, Any]) -> None:
    api.put_tenant(name, body)
    forget("tenant", name)


def _make(api: GatewayApi, name: str, label: str, days: float | None) -> None:
    st.session_state["new_api_key"] = api.add_key(name, label, days or None)["key"]


def _when(moment: str) -> str:
    return datetime.fromisoformat(moment).astimezone().strftime("%d %b %Y %H:%M")


def _edit(edit: Callable[[], object], done: str, widgets: Mapping[str, Any] | None = None) -> None:
    with refusals_shown():
        edit()
        rerun_with(done, widgets)
