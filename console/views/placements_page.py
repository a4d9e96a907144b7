"""The Placements page: where the latest requests went, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from console.charts import charts
from console.charts.palette import BLUE, ORANGE, SPANS, TTFT_PARTS
from console.gateway_api import GatewayApi, GatewayError
from console.live import disconnected, empty, live
from console.plain_text import plain
from console.quantities import NOTHING, ago, count, seconds, size

_LIMIT = 200
_TABLE_PX = 380
_MS = 1000

Placement = Mapping[str, Any]

_HANDED_OVER = "Computed by a prefill worker and handed over"
_PROMPT_SIDE = {
    "kept_cached": "Computed by the decode worker, which has most of the prompt.",
    "kept_loaded": "Computed by the decode worker, which loaded most of the prompt from others.",
    "kept_short": "Computed by the decode worker: little of the prompt was left to compute.",
    "kept_idle": "Computed by the decode worker: prefill workers had longer queues.",
    "kept_alone": "Computed by the decode worker: no prefill worker was there.",
    "not_faster": f"{_HANDED_OVER}: a decode worker would not have been sooner.",
    "not_short": f"{_HANDED_OVER}: too long for one step of a decode worker.",
    "neighbours": f"{_HANDED_OVER}: it would have slowed down what decode workers had.",
    "no_room": f"{_HANDED_OVER}: decode workers were nearly full.",
    "unknown": f"{_HANDED_OVER}: how fast decode workers compute prompts was not known.",
}


def render(api: GatewayApi) -> None:
    """Draws the page."""
    st.title("Placements")
    live("placements", lambda: _placements(api), lambda placements: _draw(api, placements))


def placement_row(placement: Placement) -> dict[str, Any]:
    """One row of the table."""
    measured = placement["measured"] or {}
    return {
        "when": ago(placement["age_s"]),
        "request": placement["request_id"],
        "class": placement["qos_class"],
        "prompt": placement["prompt_tokens"],
        "outcome": outcome(placement),
        "prefill": placement["prefill_worker"],
        "decode": placement["decode_worker"],
        "TTFT predicted": _ms(predicted_ttft_s(placement)),
        "TTFT": _ms(measured.get("ttft_s")),
        "TBT predicted": _ms(placement["predicted"]["tbt_s"]),
        "TBT": _ms(measured.get("tbt_s")),
        "cached": measured.get("cached_tokens"),
        "output": measured.get("output_tokens"),
        "guessed": right_guesses(measured),
    }


def right_guesses(measured: Mapping[str, Any]) -> str | None:
    """How many guessed tokens of an answer were right, of how many; None where nothing was guessed."""
    num_drafts = measured.get("drafts") or 0
    return f"{measured['right_drafts']} of {num_drafts} right" if num_drafts else None


def outcome(placement: Placement) -> str:
    """Outcome in a word or two."""
    if placement["refusal"]:
        return f"refused: {placement['refusal']}"
    status = (placement["measured"] or {}).get("status", "running")
    return f"{status}, moved" if placement["moves"] else str(status)


def prompt_side(placement: Placement) -> str | None:
    """Says why a decode worker computed the prompt, or why not; None where there was nothing to choose."""
    return _PROMPT_SIDE.get(placement.get("disaggregation") or "")


def predicted_ttft_s(placement: Placement) -> float:
    """Predicted TTFT from the request's arrival."""
    return float(placement["waited_s"] + placement["predicted"]["ttft_s"])


def candidate_parts(placement: Placement) -> list[dict[str, Any]]:
    """Parts of each candidate's predicted TTFT in milliseconds, best candidate first."""
    rows = []
    for candidate in sorted(placement["candidates"], key=lambda part: part["ttft_s"]):
        mark = " ◀ chosen" if candidate["worker_id"] == placement["prefill_worker"] else ""
        rows += [
            {"label": candidate["worker_id"] + mark, "part": part, "value": candidate[f"{part}_s"] * _MS}
            for part in TTFT_PARTS
        ]
    return rows


def pairs(placements: Sequence[Placement], kind: str) -> list[dict[str, float]]:
    """Predicted and measured seconds of the requests that have both; `kind` is "ttft" or "tbt"."""
    rows = []
    for placement in placements:
        measured = (placement["measured"] or {}).get(f"{kind}_s")
        predicted = predicted_ttft_s(placement) if kind == "ttft" else placement["predicted"]["tbt_s"]
        if measured and predicted and not placement["moves"]:
            rows.append({"predicted": predicted, "measured": measured})
    return rows


def _placements(api: GatewayApi) -> Sequence[Placement]:
    """The latest placements; frozen while a row is selected, so that rows do not move under the pointer."""
    frozen: list[Placement] | None = st.session_state.get("frozen_placements")
    if _selected() is not None and frozen is not None:
        return frozen
    st.session_state["frozen_placements"] = latest = api.placements(_LIMIT)
    return latest


def _selected() -> int | None:
    rows = st.session_state.get("placements_table", {}).get("selection", {}).get("rows", [])
    return rows[0] if rows else None


def _draw(api: GatewayApi, placements: Sequence[Placement]) -> None:
    if not placements:
        empty("No requests yet", "Send one on the Try it page or with curl.", ":material/alt_route:")
        return
    selected = _selected()
    if selected is None:
        st.caption(f"The latest {len(placements)} requests, live. Select a row to see why it was placed there.")
    else:
        st.caption("The list is frozen while a row is selected.")
    number = st.column_config.NumberColumn
    st.dataframe(
        [placement_row(placement) for placement in placements],
        column_config={
            name: number(f"{name} (ms)", format="%.1f") for name in ("TTFT predicted", "TTFT", "TBT predicted", "TBT")
        },
        hide_index=True,
        placeholder=NOTHING,
        height=_TABLE_PX,
        on_select="rerun",
        selection_mode="single-row",
        key="placements_table",
    )
    if selected is not None and selected < len(placements):
        _draw_one(api, placements[selected])
    else:
        _draw_errors(placements)


def _draw_errors(placements: Sequence[Placement]) -> None:
    left, right = st.columns(2)
    for column, kind, title, colour in ((left, "ttft", "TTFT", BLUE), (right, "tbt", "TBT", ORANGE)):
        with column.container(border=True):
            st.markdown(f"**{title}: predicted and measured**")
            rows = pairs(placements, kind)
            if rows:
                charts.show(charts.against(rows, colour), f"errors-{kind}")
            else:
                st.caption("No request has both values yet.")


def _draw_one(api: GatewayApi, placement: Placement) -> None:
    st.subheader(plain(placement["request_id"]))
    _draw_figures(placement)
    with st.container(border=True):
        st.markdown("**Prefill candidates**, by predicted TTFT")
        rows = candidate_parts(placement)
        if rows:
            charts.show(charts.parts(rows, TTFT_PARTS, "ms"), "candidates")
        else:
            st.caption("No worker accepted prompts at that time.")
    with st.container(border=True):
        st.markdown("**Timeline across services**")
        _draw_timeline(api, placement)


def _draw_figures(placement: Placement) -> None:
    measured = placement["measured"] or {}
    tiles = (
        ("Outcome", plain(outcome(placement))),
        ("Prompt", f"{count(placement['prompt_tokens'])} tokens"),
        ("Cached", NOTHING if not measured else f"{count(measured['cached_tokens'])} tokens"),
        ("Transfer", f"{seconds(measured.get('transfer_s'))} (≈ {seconds(placement['predicted'].get('transfer_s'))})"),
        ("TTFT", f"{seconds(measured.get('ttft_s'))} (≈ {seconds(predicted_ttft_s(placement))})"),
        ("TBT", f"{seconds(measured.get('tbt_s'))} (≈ {seconds(placement['predicted']['tbt_s'])})"),
        ("Output", NOTHING if not measured else f"{measured['output_tokens']} tokens"),
    )
    for column, (label, value) in zip(st.columns(len(tiles)), tiles, strict=True):
        column.caption(label)
        column.markdown(f"**{value}**")
    if (where := prompt_side(placement)) is not None:
        st.caption(where)
    if (guesses := right_guesses(measured)) is not None:
        st.caption(f"Guessed tokens: {guesses}.")
    for move in placement["moves"]:
        st.caption(
            f"Moved after {seconds(move['after_s'])} to {plain(move['prefill_worker'])} and "
            f"{plain(move['decode_worker'])}: the previous workers failed."
        )


def _draw_timeline(api: GatewayApi, placement: Placement) -> None:
    request_id = placement["request_id"]
    try:
        spans = api.request(request_id)["timeline"]
    except GatewayError as error:
        disconnected(str(error), None)
        return
    if not spans:
        st.caption("The request is still running, or its row has not reached the ledger yet.")
        return
    rows = [
        {
            "service": span["service"],
            "name": span["name"],
            "start_ms": span["start_s"] * _MS,
            "end_ms": span["end_s"] * _MS,
            "predicted_ms": _ms(span["predicted_s"]),
            "amount": _amount(span),
        }
        for span in spans
    ]
    charts.show(charts.spans(rows, SPANS), "timeline")


def _amount(span: Mapping[str, Any]) -> str | None:
    """Tokens or bytes of a span; None if it has neither."""
    if span["num_tokens"] is not None:
        return f"{span['num_tokens']} tokens"
    return None if span["num_bytes"] is None else size(span["num_bytes"])


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else value_s * _MS
