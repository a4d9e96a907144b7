"""Placements: where the latest requests went, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import streamlit as st

from console import charts
from console.gateway_api import GatewayApi, GatewayError
from console.live import disconnected, empty, live
from console.palette import BLUE, ORANGE, SPANS, TTFT_PARTS
from console.plain_text import plain
from console.quantities import NOTHING, ago, count, seconds, size

_LIMIT = 200
_TABLE_PX = 380
_MS = 1000

Placement = Mapping[str, Any]


def render(api: GatewayApi) -> None:
    """The page."""
    st.title("Placements")
    live("placements", lambda: _placements(api), lambda found: _draw(api, found))


def placement_row(placement: Placement) -> dict[str, Any]:
    """One line of the table."""
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
    }


def outcome(placement: Placement) -> str:
    """In a word or two."""
    if placement["refusal"]:
        return f"refused: {placement['refusal']}"
    status = (placement["measured"] or {}).get("status", "running")
    return f"{status}, moved" if placement["moves"] else str(status)


def predicted_ttft_s(placement: Placement) -> float:
    """From its arrival."""
    return float(placement["waited_s"] + placement["predicted"]["ttft_s"])


def candidate_parts(placement: Placement) -> list[dict[str, Any]]:
    """What the predicted TTFT of each candidate is made of, in milliseconds, the best first."""
    rows = []
    for one in sorted(placement["candidates"], key=lambda candidate: candidate["ttft_s"]):
        mark = " ◀ chosen" if one["worker_id"] == placement["prefill_worker"] else ""
        rows += [
            {"label": one["worker_id"] + mark, "part": part, "value": one[f"{part}_s"] * _MS} for part in TTFT_PARTS
        ]
    return rows


def pairs(placements: Sequence[Placement], kind: str) -> list[dict[str, float]]:
    """Predicted and measured seconds of the requests that have both; `kind` is ttft or tbt."""
    found = []
    for one in placements:
        measured = (one["measured"] or {}).get(f"{kind}_s")
        predicted = predicted_ttft_s(one) if kind == "ttft" else one["predicted"]["tbt_s"]
        if measured and predicted and not one["moves"]:
            found.append({"predicted": predicted, "measured": measured})
    return found


def _placements(api: GatewayApi) -> Sequence[Placement]:
    """What is shown stands still while one of them is looked at: rows would move under the hand."""
    frozen: list[Placement] | None = st.session_state.get("frozen_placements")
    if _selected() is not None and frozen is not None:
        return frozen
    st.session_state["frozen_placements"] = found = api.placements(_LIMIT)
    return found


def _selected() -> int | None:
    rows = st.session_state.get("placements_table", {}).get("selection", {}).get("rows", [])
    return rows[0] if rows else None


def _draw(api: GatewayApi, placements: Sequence[Placement]) -> None:
    if not placements:
        empty("No request has come yet", "Send one on the page “Try it”, or with curl.", ":material/alt_route:")
        return
    selected = _selected()
    if selected is None:
        st.caption(f"The latest {len(placements)}, live. Select a row to see why a request went where it went.")
    else:
        st.caption("The list stands still while a row is selected.")
    number = st.column_config.NumberColumn
    st.dataframe(
        [placement_row(one) for one in placements],
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
            found = pairs(placements, kind)
            if found:
                charts.show(charts.against(found, colour), f"errors-{kind}")
            else:
                st.caption("No request has both yet.")


def _draw_one(api: GatewayApi, placement: Placement) -> None:
    st.subheader(plain(placement["request_id"]))
    _draw_figures(placement)
    left, right = st.columns(2)
    with left.container(border=True):
        st.markdown("**Candidates for the prefill**, by predicted TTFT")
        rows = candidate_parts(placement)
        if rows:
            charts.show(charts.parts(rows, TTFT_PARTS, "ms"), "candidates")
        else:
            st.caption("No worker took prompts then.")
    with right.container(border=True):
        st.markdown("**Its way over the services**")
        _draw_timeline(api, placement)


def _draw_figures(placement: Placement) -> None:
    measured = placement["measured"] or {}
    tiles = (
        ("Outcome", plain(outcome(placement))),
        ("Prompt", f"{count(placement['prompt_tokens'])} tokens"),
        ("Cached", NOTHING if not measured else f"{count(measured['cached_tokens'])} tokens"),
        ("TTFT", f"{seconds(measured.get('ttft_s'))} (≈ {seconds(predicted_ttft_s(placement))})"),
        ("TBT", f"{seconds(measured.get('tbt_s'))} (≈ {seconds(placement['predicted']['tbt_s'])})"),
        ("Output", NOTHING if not measured else f"{measured['output_tokens']} tokens"),
    )
    for column, (label, value) in zip(st.columns(len(tiles)), tiles, strict=True):
        column.caption(label)
        column.markdown(f"**{value}**")
    for move in placement["moves"]:
        st.caption(
            f"Moved after {seconds(move['after_s'])} to {plain(move['prefill_worker'])} and "
            f"{plain(move['decode_worker'])}: the workers before failed it."
        )


def _draw_timeline(api: GatewayApi, placement: Placement) -> None:
    request_id = placement["request_id"]
    try:
        spans = api.request(request_id)["timeline"]
    except GatewayError as error:
        disconnected(str(error), None)
        return
    if not spans:
        st.caption("It has not ended yet, or its row is on the way to the ledger.")
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
    """Of tokens or bytes, where the span is of some."""
    if span["num_tokens"] is not None:
        return f"{span['num_tokens']} tokens"
    return None if span["num_bytes"] is None else size(span["num_bytes"])


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else value_s * _MS
