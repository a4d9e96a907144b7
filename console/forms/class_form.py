"""The form of one class: edit, preview on the last hour, save, remove."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import streamlit as st

from console.forms.form_version import begun, follow, forget, forget_all
from console.gateway_api import GatewayApi
from console.live import refusals_shown, rerun_with
from console.plain_text import plain
from console.quantities import share

EARLY_REJECTIONS = {
    "strict": "requests predicted to miss a target",
    "overload": "requests that miss a target only because of others",
}
DEGRADATIONS = ("cap_max_tokens", "lower_kv_precision", "shed_lowest_class")
_KINDS = ("header", "api_key", "tenant", "model")
_DEFAULTS: Mapping[str, Any] = {
    "version": 0, "priority": 0, "reserved": 0.0, "ttft_s": None, "tbt_s": None, "attainment": 0.9, "rules": [],
    "early_rejection": "strict", "degradation": [], "capped_tokens": 256,
    "max_pause_s": 0.0, "kv_policy": None,
}  # fmt: skip


def class_form(api: GatewayApi, stored: Mapping[str, Any] | None, taken: Collection[str] = ()) -> None:
    """Draws the form. `stored` is the present class, None for a new one, which has none of the names `taken`."""
    known = {**_DEFAULTS, **(begun("class", stored) if stored else {})}
    key = f"{known.get('name', '')}-{known['version']}"  # each version has its own form
    name, body = _fields(known, key, is_new=stored is None)
    if stored is not None:
        follow("class", stored, known, body)
    buttons = st.columns([2, 2, 2, 3])
    is_taken = stored is None and name in taken
    if is_taken:
        st.warning(f"There is a class called {plain(name, 64)}: choose it above to edit it.", icon=":material/group:")
    may = bool(name.strip()) and not is_taken
    if buttons[0].button("Preview", disabled=not may, key=f"preview-{key}", width="stretch"):
        _preview(api, name, body)
    if buttons[1].button("Save", type="primary", disabled=not may, key=f"save-{key}", width="stretch"):
        _save(api, name, body)
    if stored is not None:
        with buttons[2].popover("Remove", width="stretch"):
            st.write(f"Requests of class {plain(name, 64)} will belong to another class, or to none.")
            if st.button("Remove it", key=f"remove-{key}"):
                _remove(api, name, known["version"])


def preview_sentence(preview: Mapping[str, int]) -> str:
    """Describes a preview in a sentence."""
    total = preview["num_requests"]
    if not total:
        return "No request of this class came in the last hour, so there is nothing to preview."
    before, after = preview["num_refused"], preview["num_would_be_refused"]
    change = abs(after - before) / total
    how = (
        "refused the same number"
        if after == before
        else f"refused {share(change)} {'more' if after > before else 'less'}"
    )
    served = preview["num_served"]
    met = (
        f" and met the targets of {share(preview['num_meeting'] / served)} of those served"
        if served
        else " and served none"
    )
    new = preview["num_newly_admitted"]
    unknown = f" {new} refused requests would have been admitted; their latencies are unknown." if new else ""
    undecided = preview.get("num_undecided", 0)  # older gateways do not report it
    early = f" {undecided} were refused before they were tokenized; whether they would be refused now is unknown."
    unknown += early if undecided else ""
    return f"Of the last hour's {total} requests this would have {how} ({before} → {after}){met}.{unknown}"


def rules_of(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Rules in a table; rows without a value are ignored."""
    return [
        {"kind": row.get("kind") or "header", "header": row.get("header") or "", "value": row["value"]}
        for row in rows
        if row.get("value")
    ]


def seconds_of(milliseconds: float | None) -> float | None:
    """Converts for the gateway; 0 and empty mean no target."""
    return milliseconds / 1000 if milliseconds else None


def show_removed(name: str | None, names: Collection[str]) -> None:
    """Says so if the class `name`, whose form is open, was removed, and forgets the form."""
    if name is not None and name not in names and forget("class", name):
        st.warning(
            f"Class {plain(name, 64)} was removed elsewhere. What was typed for it here is not saved; “Undo” in the "
            "history restores the class.",
            icon=":material/group:",
        )


def _fields(known: Mapping[str, Any], key: str, *, is_new: bool) -> tuple[str, dict[str, Any]]:
    """Draws the fields; returns the class's name and its body for the gateway."""
    name = st.text_input("Name", key=f"name-{key}", max_chars=64) if is_new else str(known["name"])
    first = st.columns(3)
    ttft_ms = first[0].number_input("TTFT target (ms)", 0.0, None, _ms(known["ttft_s"]), 10.0, key=f"ttft-{key}",
                                    placeholder="none", help="Empty: no target.")  # fmt: skip
    tbt_ms = first[1].number_input("TBT target (ms)", 0.0, None, _ms(known["tbt_s"]), 1.0, key=f"tbt-{key}",
                                   placeholder="none", help="Empty: no target.")  # fmt: skip
    goal = first[2].number_input("Requests in time (%)", 1.0, 100.0, 100 * known["attainment"], 1.0, key=f"goal-{key}")
    second = st.columns(3)
    priority = second[0].number_input("Priority", -1000, 1000, known["priority"], key=f"priority-{key}",
                                      help="Smaller numbers go first.")  # fmt: skip
    reserved = second[1].number_input("Reserved share (%)", 0.0, 100.0, 100 * known["reserved"], 5.0, key=f"kept-{key}",
                                      help="Share of the decode workers' KV memory; lent while unused.")  # fmt: skip
    capped = second[2].number_input("Capped output (tokens)", 1, None, known["capped_tokens"], key=f"cap-{key}",
                                    help="Length to which “cap max tokens” shortens answers.")  # fmt: skip
    max_pause_s = st.number_input("Longest pause of an answer (s)", 0.0, None, float(known["max_pause_s"]), 0.5,
                                  key=f"pause-{key}",
                                  help="While a higher class needs its place or its KV memory. 0: never.")  # fmt: skip
    kv_policy = st.text_input("Kept KV", known["kv_policy"] or "", key=f"policy-{key}", max_chars=32,
                              placeholder="whole",
                              help="For example sinks:4+1024; requests may differ. Empty: all of it.")  # fmt: skip
    early_rejection = st.selectbox(
        "Early rejection", tuple(EARLY_REJECTIONS), tuple(EARLY_REJECTIONS).index(known["early_rejection"]),
        format_func=EARLY_REJECTIONS.__getitem__, key=f"rejection-{key}",
        help="The second also serves requests that miss a target even alone, such as a long prompt on a slow host.",
    )  # fmt: skip
    degradation = st.multiselect(
        "Degradation before a refusal, in this order", DEGRADATIONS, known["degradation"],
        format_func=lambda step: step.replace("_", " "), key=f"degradation-{key}",
    )  # fmt: skip
    st.caption("A request belongs to this class if one of these rules matches; class “default” takes the rest.")
    columns = {
        "kind": st.column_config.SelectboxColumn("by", options=_KINDS, default="header"),
        "header": st.column_config.TextColumn("header"),
        "value": st.column_config.TextColumn("is"),
    }
    start = [dict(rule) for rule in known["rules"]] or [{"kind": "header", "header": "", "value": ""}]
    rows = st.data_editor(start, num_rows="dynamic", column_config=columns, column_order=("kind", "header", "value"),
                          key=f"rules-{key}", hide_index=True)  # fmt: skip
    body = {
        "version": known["version"],
        "ttft_s": seconds_of(ttft_ms),
        "tbt_s": seconds_of(tbt_ms),
        "attainment": goal / 100,
        "priority": int(priority),
        "reserved": reserved / 100,
        "capped_tokens": int(capped),
        "max_pause_s": max_pause_s,
        "kv_policy": kv_policy.strip() or None,
        "early_rejection": early_rejection,
        "degradation": list(degradation),
        "rules": rules_of(rows),
    }
    return name, body


def _preview(api: GatewayApi, name: str, body: Mapping[str, Any]) -> None:
    with refusals_shown():
        with st.spinner("Replaying the last hour"):
            preview = api.preview_class(name, body)
        st.info(preview_sentence(preview), icon=":material/history:")


def _save(api: GatewayApi, name: str, body: Mapping[str, Any]) -> None:
    with refusals_shown():
        saved = api.put_class(name, body)
        done(f"Class {plain(name, 64)} is saved as version {saved['version']}.", {"class": name})


def _remove(api: GatewayApi, name: str, version: int) -> None:
    with refusals_shown():
        api.delete_class(name, version)
        done(f"Class {plain(name, 64)} is removed.")


def done(what: str, widgets: Mapping[str, Any] | None = None) -> None:
    """Shows a message after the rerun; forms start again."""
    forget_all("class")
    rerun_with(what, widgets)


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else value_s * 1000
