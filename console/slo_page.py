"""SLO: the classes of requests, what each is promised, and how that went. An edit counts from the next request on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import streamlit as st

from console.admission_card import draw_admission
from console.class_form import class_form
from console.class_history import draw_history
from console.gateway_api import GatewayApi, GatewayError
from console.live import away, empty, live
from console.plain_text import plain
from console.quantities import NOTHING, seconds, share

_MINUTES = 30
NEW = "+ New class"


class Seen(NamedTuple):
    """What the table shows."""

    classes: Sequence[Mapping[str, Any]]
    together: Mapping[str, Any]


def render(api: GatewayApi) -> None:
    """The page."""
    st.title("SLO")
    _say_what_was_done()
    live("slo", lambda: Seen(api.classes(), api.series(_MINUTES)["together"]), _draw)
    try:
        classes, edits = api.classes(), api.class_edits()
    except GatewayError as error:
        away(str(error), api.class_edits)
        return
    draw_admission(api)
    left, right = st.columns([3, 2], gap="large")
    with left:
        st.subheader("Edit")
        names = [one["name"] for one in classes]
        chosen = st.selectbox("Class", [*names, NEW], key="class")
        class_form(api, next((one for one in classes if one["name"] == chosen), None))
    with right:
        st.subheader("History")
        draw_history(api, edits, classes)


def class_row(one: Mapping[str, Any], counts: Mapping[str, int] | None) -> dict[str, Any]:
    """One line of the table; `counts` are what became of its requests."""
    ended = (counts or {}).get("ended", 0)
    return {
        "class": one["name"],
        "version": one["version"],
        "priority": one["priority"],
        "TTFT (ms)": _ms(one["ttft_s"]),
        "TBT (ms)": _ms(one["tbt_s"]),
        "TTFT now": _ms(one.get("applied_ttft_s")),
        "TBT now": _ms(one.get("applied_tbt_s")),
        "goal": one["attainment"],
        "in time": counts["good"] / ended if counts and ended else None,
        "requests": ended,
        "refused": (counts or {}).get("refused", 0),
        "reserved": one["reserved"],
        "gives up first": " → ".join(one["degradation"]).replace("_", " ") or NOTHING,
        "who": ", ".join(_rule(rule) for rule in one["rules"]) or NOTHING,
    }


def tightened(classes: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each target that admission holds requests to more strictly than the class says, and why."""
    said = []
    for one in classes:
        for kind in ("ttft", "tbt"):
            own_s, applied_s = one[f"{kind}_s"], one.get(f"applied_{kind}_s")
            if own_s is not None and applied_s is not None and applied_s < own_s:
                measured_s = one.get(f"measured_{kind}_s")
                because = "" if measured_s is None else f": {share(one['attainment'])} took up to {seconds(measured_s)}"
                said.append(
                    f"{one['name']}: {kind.upper()} is admitted to {seconds(applied_s)} in place of "
                    f"{seconds(own_s)}{because}."
                )
    return said


def _draw(seen: Seen) -> None:
    counts = seen.together["classes"]
    if not seen.classes:
        empty(
            "No class yet",
            "Every request is served as well as can be; nobody is promised anything, and nobody refused for it.",
            ":material/speed:",
        )
        return
    percent = {name: st.column_config.NumberColumn(format="percent") for name in ("goal", "in time", "reserved")}
    rows = [class_row(one, counts.get(one["name"])) for one in seen.classes]
    st.dataframe(rows, column_config=percent, hide_index=True, placeholder=NOTHING, key="classes")
    for sentence in tightened(seen.classes):
        st.caption(f":material/compress: {plain(sentence)}")
    st.caption(f"Requests of the last {_MINUTES} minutes. Refusals count against “in time”. {_others(seen)}")


def _others(seen: Seen) -> str:
    """Requests that are of none of these classes."""
    names = {one["name"] for one in seen.classes}
    rest = [one for name, one in seen.together["classes"].items() if name not in names]
    ended = sum(one["ended"] for one in rest)
    return (
        f"{ended} more requests were of no class, {share(sum(one['good'] for one in rest) / ended)} good."
        if ended
        else ""
    )


def _say_what_was_done() -> None:
    """Once, after the rerun that follows an edit."""
    done = st.session_state.pop("class_edit_done", None)
    if done:
        st.toast(done, icon=":material/check_circle:")


def _rule(rule: Mapping[str, str]) -> str:
    return (
        f"{rule['header']}: {rule['value']}"
        if rule["kind"] == "header"
        else f"{rule['kind'].replace('_', ' ')} {rule['value']}"
    )


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else value_s * 1000
