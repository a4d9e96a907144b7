"""The Autopilot page: which roles the traffic needs, what was changed for it, and what came of that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any

import streamlit as st

from console.forms.mode_card import OWN, ModeChoice, draw_mode
from console.gateway_api import GatewayApi, GatewayError
from console.live import away, empty, live, rerun_with, show_message
from console.plain_text import plain
from console.quantities import NOTHING, ago, share

_LIMIT = 200
_TABLE_PX = 420
_SILENT_S = 10.0  # a status that is older says that no planner runs
_ROLES = ("prefill", "decode", "both")
_MEANINGS = {
    "off": "The autopilot is silent.",
    "observe": "The autopilot says what it would change, and changes nothing.",
    "act": "The autopilot changes workers' roles, one at a time, and leaves alone what a person has changed lately.",
    OWN: "The planner uses its own setting (`planner.autopilot`).",
}
_ACTIONS = {
    "hold": "No change",
    "change_role": "Another role",
    "add_worker": "One worker more",
    "remove_worker": "One worker less",
    "cannot_be_met": "Cannot be met",
}

Autopilot = Mapping[str, Any]


def render(api: GatewayApi) -> None:
    """Draws the page."""
    st.title("Autopilot")
    show_message()
    try:
        autopilot = api.autopilot(1)
    except GatewayError:
        away(partial(api.autopilot, 1))
        return
    own = (autopilot["status"] or {}).get("own_mode", "unknown")
    draw_mode(ModeChoice("Autopilot", "autopilot", _MEANINGS, api.put_autopilot, rerun_with), {**autopilot, "own": own})
    live("autopilot", partial(api.autopilot, _LIMIT), _draw)


def decision_row(decision: Mapping[str, Any], now: datetime) -> dict[str, Any]:
    """One row of the table. A pressure of 1 is the most that meets the targets."""
    phase = "prefill" if decision["prefill"] >= decision["decode"] else "decode"
    change = f"{decision['before'] or 'new'} → {decision['after']}" if decision["after"] else NOTHING
    return {
        "when": ago((now - datetime.fromisoformat(decision["decided_at"])).total_seconds()),
        "decision": _ACTIONS.get(decision["action"], decision["action"]),
        "worker": decision["worker_id"] or NOTHING,
        "role": change,
        "why": decision["reason"],
        "outcome": decision["outcome"] or NOTHING,
        "phase": phase,
        "pressure": _pressure(decision[phase]),
        "predicted": _pressure(max(decision["predicted_prefill"], decision["predicted_decode"])),
        "measured": _pressure(_most(decision["measured_prefill"], decision["measured_decode"])),
        "in time before": share(decision["attainment"]),
        "in time after": share(decision["measured_attainment"]),
        "roles": decision["split"],
        "towards": decision["target"],
    }


def standing(status: Mapping[str, Any]) -> str:
    """What the autopilot makes of this moment, as a sentence."""
    if status["action"] == "hold":
        return f"No change: {status['reason']}."
    if status["action"] == "cannot_be_met":
        needed = status["num_needed"]
        return f"{status['reason']}." + (f" {needed} would." if needed else " No number of them would.")
    what = {"change_role": "to serve", "add_worker": "more, to serve", "remove_worker": "less, of role"}
    who = status["worker_id"] or "One worker"
    done = {"done": "Done", "advised": "Advised"}.get(status["outcome"], status["outcome"] or "Decided")
    return f"{done}: {who} {what[status['action']]} {status['role']}, because {status['reason']}."


def looking_ahead(ahead: Mapping[str, Any]) -> str:
    """The slow loop's forecast, as a sentence."""
    roles = ":".join(map(str, ahead["target"]))
    if ahead["method"] == "last":
        return "Looking ahead: no forecast beats what is measured now."
    how = "followed" if ahead["is_followed"] else "not followed: the last one was wrong"
    return (
        f"Looking ahead: {ahead['rate_per_s']:.3g} requests/s by {ahead['method']}, off by {share(ahead['error'])} in "
        f"back-tests; the simulator prefers {roles} ({how})."
    )


def _draw(autopilot: Autopilot) -> None:
    status, now = autopilot["status"], datetime.now(UTC)
    age_s = (now - datetime.fromisoformat(autopilot["status_at"])).total_seconds() if status else None
    if age_s is None or age_s > _SILENT_S or "pressure" not in status:
        empty(
            "No autopilot looks at this gateway",
            "It runs in the planner, which `halfmoon up` starts. Beside containers it needs --gateway.",
            ":material/flight_takeoff:",
        )
    else:
        _now(status)
    st.subheader("Decisions")
    if not autopilot["decisions"]:
        st.caption("None yet: nothing had to change.")
        return
    _decisions(autopilot["decisions"], now)


def _now(status: Mapping[str, Any]) -> None:
    pressures = [(phase.capitalize(), status["pressure"][phase]) for phase in ("prefill", "decode")]
    roles = zip(_ROLES, status["split"], status["target"], strict=True)
    figures = [
        *(
            (f"{phase} pressure", "nobody serves it" if value is None else _pressure(value), None)
            for phase, value in pressures
        ),
        ("In time, lately", share(status["attainment"]), None),
        *(
            (f"{role.capitalize()} workers", str(number), number_then - number or None)
            for role, number, number_then in roles
            if number or number_then
        ),
    ]
    for column, (label, value, change) in zip(st.columns(len(figures)), figures, strict=True):
        column.metric(label, value, change, delta_color="off")
    st.caption("Pressure: a phase's demand over what its workers serve within the targets. Above 1 targets are missed.")
    st.markdown(plain(standing(status)))
    ahead = status.get("outlook")
    if ahead:
        st.caption(plain(looking_ahead(ahead)))


def _decisions(decisions: Sequence[Mapping[str, Any]], now: datetime) -> None:
    rows = [decision_row(decision, now) for decision in decisions]
    st.dataframe(rows, hide_index=True, placeholder=NOTHING, key="autopilot-decisions", height=_TABLE_PX)
    st.caption(
        "The pressures are of the phase with the higher one: before the decision, as predicted of it, and as measured "
        "20 s later. Advice that was not followed has what came without it."
    )


def _most(one: float | None, other: float | None) -> float | None:
    return None if one is None or other is None else max(one, other)


def _pressure(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"
