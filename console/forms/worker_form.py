"""The card of one worker's changes: its role, or its end after what it has begun."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from console.gateway_api import GatewayApi
from console.live import refusals_shown, rerun_with
from console.plain_text import plain

_ROLES = ("prefill", "decode", "both")


def draw_worker_form(api: GatewayApi, workers: Sequence[Mapping[str, Any]]) -> None:
    """Draws the card for the members among `workers`."""
    members = {worker["worker_id"]: worker for worker in workers if "left_s_ago" not in worker}
    if not members:
        return
    with st.container(border=True):
        chosen, roles, act, drain, force = st.columns([3, 2, 1, 1, 1], vertical_alignment="bottom")
        name = chosen.selectbox("Worker", sorted(members), key="worker-to-change")
        worker = members[name]
        role = roles.segmented_control(
            "Role", _ROLES, default=worker["role"], required=True, key=f"role-{name}", wrap=True
        )
        forced = force.checkbox("Force", key="force-change", help="Also where it is refused for the cluster's sake.")
        changes = role is not None and role != worker["role"]
        if act.button("Change role", type="primary", disabled=not changes, key="change-role"):
            body = {"role": role, "epoch": worker.get("role_epoch"), "force": forced}
            _change(api, name, "role", body, f"{name} serves {role} now.")
        with drain.popover("Drain"):
            st.write(f"{plain(name)} takes no new work, finishes what it has begun, and ends.")
            if st.button("Drain it", key=f"drain-{name}"):
                _change(api, name, "drain", {"force": forced}, f"{name} takes no new work, and ends.")


def _change(api: GatewayApi, name: str, what: str, body: Mapping[str, Any], told: str) -> None:
    with refusals_shown():
        api.change_worker(name, what, body)
        rerun_with(plain(told))
