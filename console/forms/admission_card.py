"""The admission card: how requests that would miss their targets are treated, and the history of that mode."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import streamlit as st

from console.forms.class_form import done
from console.gateway_api import GatewayApi, GatewayError
from console.plain_text import plain

_SHOWN = 8
_OWN = "own"
_MEANINGS = {
    "off": "Requests are never refused for a target; they wait.",
    "load": "A request that would miss a target under the present load is refused at once.",
    "predicted": "A request that would miss a target under the load at the end of its prefill is refused at once.",
    _OWN: "Each gateway uses its own option (`--admission`).",
}


def draw_admission(api: GatewayApi) -> None:
    """Draws the card; an edit applies from the next request on."""
    try:
        admission = api.admission()
    except GatewayError as error:
        st.error(plain(str(error)), icon=":material/cloud_off:")
        return
    with st.container(border=True):
        left, right = st.columns([3, 2], gap="large", vertical_alignment="center")
        with left:
            _edit(api, admission)
        with right:
            _history(api, admission)


def edit_line(edit: Mapping[str, Any]) -> str:
    """One edit as a line."""
    when = datetime.fromisoformat(edit["edited_at"]).astimezone().strftime("%d %b %H:%M:%S")
    return f"**{edit['mode'] or _OWN}** v{edit['version']}  \n:small[:gray[{when}]]"


def _edit(api: GatewayApi, admission: Mapping[str, Any]) -> None:
    present, version = admission["set"] or _OWN, admission["version"]
    mode = st.segmented_control(
        "Admission", list(_MEANINGS), default=present, required=True, key=f"admission-{version}",
        format_func=lambda mode: f"as started ({admission['own']})" if mode == _OWN else mode,
    )  # fmt: skip
    st.caption(_MEANINGS[mode or present])
    if st.button("Save mode", type="primary", disabled=mode == present, key=f"save-admission-{version}"):
        _save(api, None if mode == _OWN else mode, version)


def _history(api: GatewayApi, admission: Mapping[str, Any]) -> None:
    edits = admission["edits"]
    if not edits:
        st.caption("Not set yet: every gateway uses its own option.")
        return
    with st.popover(f"History ({admission['version']})"):
        for at, edit in enumerate(edits[:_SHOWN]):
            text, button = st.columns([3, 1], vertical_alignment="center")
            text.markdown(edit_line(edit))
            is_present = at == 0 or edit["mode"] == admission["set"]
            if button.button("Restore", disabled=is_present, key=f"put-back-{edit['version']}"):
                _save(api, edit["mode"], admission["version"])


def _save(api: GatewayApi, mode: str | None, version: int) -> None:
    try:
        saved = api.put_admission(mode, version)
    except GatewayError as error:
        st.error(plain(str(error)))
        return
    done(f"Admission is {saved['mode']} here since version {saved['version']}.")
