"""Edits of the classes; undoing one is an edit that restores the state before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

import streamlit as st

from console.forms.class_form import done
from console.gateway_api import GatewayApi
from console.live import refusals_shown
from console.plain_text import plain
from console.quantities import NOTHING, seconds

_SHOWN = 12
_TITLES = {
    "ttft_s": "TTFT", "tbt_s": "TBT", "attainment": "goal", "capped_tokens": "cap", "max_pause_s": "pause",
    "kv_policy": "kept KV", "early_rejection": "early rejection",
}  # fmt: skip


class Undo(NamedTuple):
    """Restores a class; a body of None removes it."""

    name: str
    version: int  # its present version, 0 if it does not exist
    body: Mapping[str, Any] | None


def undo_of(edit: Mapping[str, Any], classes: Sequence[Mapping[str, Any]]) -> Undo | None:
    """Undo of an edit, given the present classes; None if they are already as before it."""
    present = next((qos_class for qos_class in classes if qos_class["name"] == edit["name"]), None)
    version = present["version"] if present else 0
    before = edit["before"]
    if before is None:
        return Undo(edit["name"], version, None) if present else None
    if present is not None and all(present.get(name) == value for name, value in before.items()):
        return None
    return Undo(edit["name"], version, before)


def change(edit: Mapping[str, Any]) -> str:
    """Describes an edit in one line."""
    before, after = edit["before"], edit["definition"]
    if before is None:
        return "made"
    if after is None:
        return "removed"
    names = [name for name in after if after[name] != before.get(name)]
    return ", ".join(f"{_TITLES.get(name, name)} {_value(name, before.get(name))} → {_value(name, after[name])}"
                     for name in names) or "saved unchanged"  # fmt: skip


def draw_history(api: GatewayApi, edits: Sequence[Mapping[str, Any]], classes: Sequence[Mapping[str, Any]]) -> None:
    """Draws the newest edits, each with a button that undoes it."""
    if not edits:
        st.caption("No edits yet. Every version will appear here and can be restored.")
        return
    for edit in edits[:_SHOWN]:
        when = datetime.fromisoformat(edit["edited_at"]).astimezone().strftime("%d %b %H:%M:%S")
        undo = undo_of(edit, classes)
        with st.container(horizontal=True, horizontal_alignment="distribute", vertical_alignment="center"):
            st.markdown(
                f"**{plain(edit['name'], 64)}** v{edit['version']} · {plain(change(edit))}  \n:small[:gray[{when}]]"
            )
            is_wanted = st.button("Undo", disabled=undo is None, key=f"undo-{edit['revision']}")
        if is_wanted and undo is not None:
            _restore(api, undo)
    if len(edits) > _SHOWN:
        st.caption(f"The newest {_SHOWN} of {len(edits)} edits.")


def _restore(api: GatewayApi, undo: Undo) -> None:
    with refusals_shown():
        if undo.body is None:
            api.delete_class(undo.name, undo.version)
        else:
            api.put_class(undo.name, {**undo.body, "version": undo.version})
        done(f"Class {plain(undo.name, 64)} is restored.")


def _value(name: str, value: Any) -> str:
    if value is None or value == []:
        return NOTHING
    if name.endswith("_s"):
        return seconds(float(value))
    if isinstance(value, list):
        return f"{len(value)} of them" if name == "rules" else " then ".join(value).replace("_", " ")
    return str(value)
