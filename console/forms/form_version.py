"""Forms over a version: what is typed survives an edit made elsewhere, and cannot be saved over it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import streamlit as st


def begun(kind: str, stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is `stored` as it was when its form was opened. `kind` names the forms of a page."""
    forms: dict[str, Mapping[str, Any]] = st.session_state.setdefault(_key(kind), {})
    return forms.setdefault(stored["name"], stored)


def forget(kind: str, name: str) -> bool:
    """The form of `name` begins again from what is stored. False if it was not open."""
    return st.session_state.get(_key(kind), {}).pop(name, None) is not None


def forget_all(kind: str) -> None:
    """All forms begin again from what is stored."""
    st.session_state[_key(kind)] = {}


def follow(kind: str, stored: Mapping[str, Any], known: Mapping[str, Any], body: Mapping[str, Any]) -> None:
    """Handles a newer version saved elsewhere: the form follows, at once if nothing was typed."""
    if stored["version"] == known["version"]:
        return
    edited = _is_edited(known, body)
    message = f"Version {stored['version']} was saved elsewhere while version {known['version']} was edited here."
    if edited:
        st.warning(f"{message} Your input cannot be saved over it.", icon=":material/group:")
    if not edited or st.button("Load the new version", key=f"take-{stored['name']}-{stored['version']}"):
        forget(kind, stored["name"])
        st.rerun()


def _is_edited(known: Mapping[str, Any], body: Mapping[str, Any]) -> bool:
    """Whether the form differs from what it began with."""
    return any(not _is_equal(known[name], value) for name, value in body.items() if name in known)


def _key(kind: str) -> str:
    return f"{kind}_begun"


def _is_equal(value: Any, other: Any) -> bool:
    is_number = isinstance(value, int | float) and isinstance(other, int | float)
    return math.isclose(value, other) if is_number else bool(value == other)
