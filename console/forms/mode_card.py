"""A card with a mode that counts for the whole cluster: its meanings, an edit over its version, and its history."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NamedTuple

import streamlit as st

from console.live import refusals_shown

_SHOWN = 8
OWN = "own"  # the mode that services were started with


class ModeChoice(NamedTuple):
    """One such mode. `put` saves a mode over a version and raises GatewayError; `say` shows a message after that."""

    title: str
    key: str  # of the widgets
    meanings: Mapping[str, str]  # by mode; `OWN` is one
    put: Callable[[str | None, int], Mapping[str, Any]]
    say: Callable[[str], None]


def draw_mode(choice: ModeChoice, state: Mapping[str, Any]) -> None:
    """Draws the card. `state` has the mode in force, the `own` one, the one that is `set`, its version and edits."""
    version, begun = state["version"], f"{choice.key}-begun"
    if st.session_state.setdefault(begun, version) != version:
        st.session_state[begun] = version
        st.warning(
            f"{choice.title} was set elsewhere meanwhile: it is {state['set'] or OWN} since version {version}.",
            icon=":material/group:",
        )
    with st.container(border=True):
        left, right = st.columns([3, 2], gap="large", vertical_alignment="center")
        with left:
            _edit(choice, state)
        with right:
            _history(choice, state)


def edit_line(edit: Mapping[str, Any]) -> str:
    """One edit as a line."""
    when = datetime.fromisoformat(edit["edited_at"]).astimezone().strftime("%d %b %H:%M:%S")
    return f"**{edit['mode'] or OWN}** v{edit['version']}  \n:small[:gray[{when}]]"


def _edit(choice: ModeChoice, state: Mapping[str, Any]) -> None:
    present, version = state["set"] or OWN, state["version"]
    mode = st.segmented_control(
        choice.title, list(choice.meanings), default=present, required=True, key=f"{choice.key}-{version}", wrap=True,
        format_func=lambda mode: f"as started ({state['own']})" if mode == OWN else mode,
    )  # fmt: skip
    st.caption(choice.meanings[mode or present])
    if st.button("Save mode", type="primary", disabled=mode == present, key=f"save-{choice.key}-{version}"):
        _save(choice, None if mode == OWN else mode, version)


def _history(choice: ModeChoice, state: Mapping[str, Any]) -> None:
    edits = state["edits"]
    if not edits:
        st.caption("Not set yet: what the services were started with counts.")
        return
    with st.popover(f"History ({state['version']})"):
        for at, edit in enumerate(edits[:_SHOWN]):
            text, button = st.columns([3, 1], vertical_alignment="center")
            text.markdown(edit_line(edit))
            is_present = at == 0 or edit["mode"] == state["set"]
            if button.button("Restore", disabled=is_present, key=f"put-back-{choice.key}-{edit['version']}"):
                _save(choice, edit["mode"], state["version"])


def _save(choice: ModeChoice, mode: str | None, version: int) -> None:
    with refusals_shown():
        saved = choice.put(mode, version)
        st.session_state[f"{choice.key}-begun"] = saved["version"]
        choice.say(f"{choice.title} is {saved['mode'] or OWN} since version {saved['version']}.")
