"""The SLO page: the classes of requests, their targets and results. An edit applies from the next request on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import streamlit as st

from console.forms.class_form import class_form, done, show_removed
from console.forms.class_history import draw_history
from console.forms.mode_card import OWN, ModeChoice, draw_mode
from console.gateway_api import GatewayApi, GatewayError
from console.live import at_once, away, empty, live, show_message
from console.plain_text import plain
from console.quantities import NOTHING, seconds, share

_MINUTES = 30
NEW = "+ New\N{NO-BREAK SPACE}class"  # no class has this name: a gateway takes printable ones only
_MEANINGS = {
    "off": "Requests are never refused for a target; they wait.",
    "load": "A request that would miss a target under the present load is refused at once.",
    "predicted": "A request that would miss a target under the load at the end of its prefill is refused at once.",
    OWN: "Each gateway uses its own option (`--admission`).",
}


class Seen(NamedTuple):
    """Data of the table."""

    classes: Sequence[Mapping[str, Any]]
    together: Mapping[str, Any]


def render(api: GatewayApi) -> None:
    """Draws the page."""
    st.title("SLO")
    show_message()
    live("slo", lambda: Seen(api.classes(), api.series(_MINUTES)["together"]), _draw)
    look = partial(at_once, api.classes, api.class_edits)
    try:
        classes, edits = look()
    except GatewayError:
        away(look, "slo")
        return
    _draw_admission(api)
    left, right = st.columns([3, 2], gap="large")
    with left:
        st.subheader("Edit")
        names = [qos_class["name"] for qos_class in classes]
        show_removed(st.session_state.get("class"), names)
        chosen = st.selectbox("Class", [*names, NEW], key="class")
        class_form(api, next((qos_class for qos_class in classes if qos_class["name"] == chosen), None), names)
    with right:
        st.subheader("History")
        draw_history(api, edits, classes)


def class_row(qos_class: Mapping[str, Any], counts: Mapping[str, int] | None) -> dict[str, Any]:
    """One row of the table; `counts` are the outcomes of its requests."""
    ended = (counts or {}).get("ended", 0)
    return {
        "class": qos_class["name"],
        "version": qos_class["version"],
        "priority": qos_class["priority"],
        "TTFT (ms)": _ms(qos_class["ttft_s"]),
        "TBT (ms)": _ms(qos_class["tbt_s"]),
        "TTFT now": _ms(qos_class.get("applied_ttft_s")),
        "TBT now": _ms(qos_class.get("applied_tbt_s")),
        "goal": qos_class["attainment"],
        "in time": counts["good"] / ended if counts and ended else None,
        "requests": ended,
        "refused": (counts or {}).get("refused", 0),
        "reserved": qos_class["reserved"],
        "degradation": " → ".join(qos_class["degradation"]).replace("_", " ") or NOTHING,
        "rules": ", ".join(_rule(rule) for rule in qos_class["rules"]) or NOTHING,
    }


def tightened(classes: Sequence[Mapping[str, Any]]) -> list[str]:
    """A sentence for each target that admission applies more strictly than the class states, and why."""
    sentences = []
    for qos_class in classes:
        for kind in ("ttft", "tbt"):
            own_s, applied_s = qos_class[f"{kind}_s"], qos_class.get(f"applied_{kind}_s")
            if own_s is not None and applied_s is not None and applied_s < own_s:
                measured_s = qos_class.get(f"measured_{kind}_s")
                because = (
                    ""
                    if measured_s is None
                    else f": {share(qos_class['attainment'])} of requests took up to {seconds(measured_s)}"
                )
                sentences.append(
                    f"{qos_class['name']}: admission applies a {kind.upper()} of {seconds(applied_s)} instead of "
                    f"{seconds(own_s)}{because}."
                )
    return sentences


def _draw(seen: Seen) -> None:
    counts = seen.together["classes"]
    if not seen.classes:
        empty(
            "No class yet",
            "Every request is served as fast as possible, without targets and without refusals for missing them.",
            ":material/speed:",
        )
        return
    percent = {name: st.column_config.NumberColumn(format="percent") for name in ("goal", "in time", "reserved")}
    rows = [class_row(qos_class, counts.get(qos_class["name"])) for qos_class in seen.classes]
    st.dataframe(rows, column_config=percent, hide_index=True, placeholder=NOTHING, key="classes")
    for sentence in tightened(seen.classes):
        st.caption(f":material/compress: {plain(sentence)}")
    st.caption(f"Requests of the last {_MINUTES} minutes. Refusals count against “in time”. {_others(seen)}")


def _others(seen: Seen) -> str:
    """Describes the requests that belong to none of these classes."""
    names = {qos_class["name"] for qos_class in seen.classes}
    rest = [count for name, count in seen.together["classes"].items() if name not in names]
    ended = sum(count["ended"] for count in rest)
    return (
        f"{ended} more requests had no class, {share(sum(count['good'] for count in rest) / ended)} of them good."
        if ended
        else ""
    )


def _rule(rule: Mapping[str, str]) -> str:
    return (
        f"{rule['header']}: {rule['value']}"
        if rule["kind"] == "header"
        else f"{rule['kind'].replace('_', ' ')} {rule['value']}"
    )


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else value_s * 1000


def _draw_admission(api: GatewayApi) -> None:
    """Draws the card: how requests that would miss their targets are treated, and the history of that mode."""
    try:
        admission = api.admission()
    except GatewayError as error:
        st.error(plain(str(error)), icon=":material/cloud_off:")
        return
    draw_mode(ModeChoice("Admission", "admission", _MEANINGS, api.put_admission, done), admission)
