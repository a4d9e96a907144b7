"""Part of the Planner page: putting a plan to work, after a look at what that changes."""

from __future__ import annotations

from collections.abc import Iterable

import streamlit as st

from console.applying import Applying
from console.plain_text import plain
from console.plan_view import title
from console.planner_api import Plan, PlannerApi, PlannerError
from console.quantities import NOTHING
from halfmoon.pb import planner_pb2

_LOOK_S = 0.5
_SAID = {"starting": "New workers that have joined", "draining": "Old workers that have finished"}
_CHOSEN, _RUNNING = "plan_to_apply", "plan_applying"  # a plan's number; its Applying


def draw_apply_button(plan: Plan) -> None:
    """Where the planner can; what the ledger did not take has no number to name it by."""
    running: Applying | None = st.session_state.get(_RUNNING)
    is_busy = running is not None and not running.state.is_over
    if plan["id"] and st.button("Apply…", key=f"apply-{plan['id']}", disabled=is_busy, icon=":material/play_arrow:"):
        st.session_state[_CHOSEN] = plan["id"]
        st.session_state.pop(_RUNNING, None)
        st.rerun()


def draw_applying(planner: PlannerApi, plans: Iterable[Plan]) -> None:
    """What is asked, under way, or came of it."""
    running: Applying | None = st.session_state.get(_RUNNING)
    if running is not None:
        _draw_running(running)
    chosen = next((plan for plan in plans if plan["id"] == st.session_state.get(_CHOSEN)), None)
    if chosen is not None:
        with st.container(border=True):
            _draw_question(planner, chosen)


def _draw_question(planner: PlannerApi, plan: Plan) -> None:
    st.markdown(f"**Apply {plain(title(plan))}?**")
    try:
        change = planner.preview_apply(plan["id"])
    except PlannerError as error:
        st.error(plain(str(error)), icon=":material/block:")
        if st.button("Close", key="apply-close"):
            _ask_no_more()
        return
    _draw_change(change)
    stop_first = False
    if change.needs_stop_first:
        st.warning(plain(change.needs_stop_first), icon=":material/warning:")
        stop_first = st.checkbox("Stop the old workers first: nothing may be served meanwhile", key="apply-stop-first")
    is_ready = stop_first or not change.needs_stop_first
    apply, cancel, _ = st.columns([1, 1, 4])
    if apply.button("Apply", type="primary", key="apply-now", disabled=not is_ready, width="stretch"):
        st.session_state[_RUNNING] = Applying(planner.apply(plan["id"], stop_first))
        _ask_no_more()
    if cancel.button("Cancel", key="apply-cancel", width="stretch"):
        _ask_no_more()


def _draw_change(change: planner_pb2.WorkerChange) -> None:
    now, then = st.columns(2)
    for column, name, groups in ((now, "Now", change.now), (then, "Then", change.then)):
        column.caption(name)
        column.table([{"workers": one.count, "role": one.role, "options": one.options or NOTHING} for one in groups])
    st.caption(
        f"{change.num_kept} stay, {change.num_started} start, and then {change.num_stopped} finish what they have "
        "accepted and stop. Started again, `halfmoon up` starts what its own options say."
    )


def _draw_running(running: Applying) -> None:
    """Looked at often until it is over."""
    was_over = running.state.is_over

    def now() -> None:
        state = running.state
        if state.is_over and not was_over:
            st.rerun()  # the whole page: its buttons work again
        if state.problem is not None:
            st.error(f"The plan was not applied: {plain(state.problem)}", icon=":material/error:")
        elif state.applied is not None:
            st.success("The plan's workers serve.", icon=":material/check_circle:")
        elif state.progress is not None:
            one = state.progress
            share = one.done / one.total if one.total else 1.0
            st.progress(share, f"{_SAID.get(one.what, one.what)}: {one.done} of {one.total}")
        else:
            st.progress(0.0, "Changing the workers")

    st.fragment(now, run_every=None if was_over else _LOOK_S)()


def _ask_no_more() -> None:
    del st.session_state[_CHOSEN]
    st.rerun()
