"""How requests that would miss their targets are met: the admission mode of all gateways, and how it came to be."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import streamlit as st

from console.class_form import done
from console.gateway_api import GatewayApi, GatewayError
from console.plain_text import plain

_SHOWN = 8
_OWN = "own"
_MEANINGS = {
    "off": "Nobody is refused for a target; who comes waits.",
    "load": "Who would miss a target by the load of now is refused at once.",
    "predicted": "Who would miss a target by the load that is predicted for when its prefill ends is refused at once.",
    _OWN: "Each gateway does as it was started (`--admission`).",
}


def draw_admission(api: GatewayApi) -> None:
    """The card; an edit counts from the next request on."""
    try:
        found = api.admission()
    except GatewayError as error:
        st.error(plain(str(error)), icon=":material/cloud_off:")
        return
    with st.container(border=True):
        left, right = st.columns([3, 2], gap="large", vertical_alignment="center")
        with left:
            _edit(api, found)
        with right:
            _history(api, found)


def edit_line(edit: Mapping[str, Any]) -> str:
    """One edit in a line."""
    when = datetime.fromisoformat(edit["edited_at"]).astimezone().strftime("%d %b %H:%M:%S")
    return f"**{edit['mode'] or _OWN}** v{edit['version']}  \n:small[:gray[{when}]]"


def _edit(api: GatewayApi, found: Mapping[str, Any]) -> None:
    present, version = found["set"] or _OWN, found["version"]
    mode = st.segmented_control(
        "Admission", list(_MEANINGS), default=present, required=True, key=f"admission-{version}",
        format_func=lambda one: f"as started ({found['own']})" if one == _OWN else one,
    )  # fmt: skip
    st.caption(_MEANINGS[mode or present])
    if st.button("Save mode", type="primary", disabled=mode == present, key=f"save-admission-{version}"):
        _save(api, None if mode == _OWN else mode, version)


def _history(api: GatewayApi, found: Mapping[str, Any]) -> None:
    edits = found["edits"]
    if not edits:
        st.caption("Nobody has set it: every gateway does as it was started.")
        return
    with st.popover(f"History ({found['version']})"):
        for at, edit in enumerate(edits[:_SHOWN]):
            text, button = st.columns([3, 1], vertical_alignment="center")
            text.markdown(edit_line(edit))
            is_present = at == 0 or edit["mode"] == found["set"]
            if button.button("Put back", disabled=is_present, key=f"put-back-{edit['version']}"):
                _save(api, edit["mode"], found["version"])


def _save(api: GatewayApi, mode: str | None, version: int) -> None:
    try:
        saved = api.put_admission(mode, version)
    except GatewayError as error:
        st.error(plain(str(error)))
        return
    done(f"Admission is {saved['mode']} here, by version {saved['version']}.")
