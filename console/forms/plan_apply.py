"""Part of the Planner page: applying a plan after a preview of the changes."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import streamlit as st

from console.plain_text import plain
from console.plan_view import title
from console.planner_api import Plan, PlannerApi, PlannerError, PlannerLost
from console.quantities import NOTHING
from halfmoon.pb import planner_pb2

_LOOK_S = 0.5
_STAGES = {"starting": "New workers that have joined", "draining": "Old workers that have finished"}
_CHOSEN, _RUNNING = "plan_to_apply", "plan_applying"  # session keys: a plan's number; its Applying


def draw_apply_button(plan: Plan) -> None:
    """Draws the button. A plan that the ledger did not store has no number and cannot be applied."""
    running: Applying | None = st.session_state.get(_RUNNING)
    is_busy = running is not None and not running.state.is_over
    if plan["id"] and st.button("Apply…", key=f"apply-{plan['id']}", disabled=is_busy, icon=":material/play_arrow:"):
        st.session_state[_CHOSEN] = plan["id"]
        st.session_state.pop(_RUNNING, None)
        st.rerun()


def draw_applying(planner: PlannerApi, plans: Iterable[Plan]) -> None:
    """Draws the question, the progress or the outcome."""
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
            _close_question()
        return
    _draw_change(change)
    stop_first = False
    if change.needs_stop_first:
        st.warning(plain(change.needs_stop_first), icon=":material/warning:")
        stop_first = st.checkbox("Stop the old workers first (serving may be interrupted)", key="apply-stop-first")
    is_ready = stop_first or not change.needs_stop_first
    apply, cancel, _ = st.columns([1, 1, 4])
    if apply.button("Apply", type="primary", key="apply-now", disabled=not is_ready, width="stretch"):
        st.session_state[_RUNNING] = Applying(planner.apply(plan["id"], stop_first))
        _close_question()
    if cancel.button("Cancel", key="apply-cancel", width="stretch"):
        _close_question()


def _draw_change(change: planner_pb2.WorkerChange) -> None:
    now, then = st.columns(2)
    for column, name, groups in ((now, "Now", change.now), (then, "Then", change.then)):
        column.caption(name)
        column.table(
            [
                {"workers": group.count, "role": group.role, "options": plain(group.options or NOTHING)}
                for group in groups
            ]
        )
    st.caption(
        f"{change.num_kept} stay, {change.num_started} start, then {change.num_stopped} finish their accepted "
        "requests and stop. After a restart, `halfmoon up` follows its own options again."
    )


def _draw_running(running: Applying) -> None:
    """Draws the progress, refreshed often until the change is over."""
    was_over = running.state.is_over

    def now() -> None:
        state = running.state
        if state.is_over and not was_over:
            st.rerun()  # the whole page, so that its buttons work again
        if state.problem is not None and state.is_lost:
            st.warning(
                f"The workers may still change, and the Overview shows them: {plain(state.problem)}",
                icon=":material/cloud_off:",
            )
        elif state.problem is not None:
            st.error(f"The plan was not applied: {plain(state.problem)}", icon=":material/error:")
        elif state.applied is not None:
            st.success("The plan's workers are serving.", icon=":material/check_circle:")
        elif state.progress is not None:
            progress = state.progress
            share = progress.done / progress.total if progress.total else 1.0
            st.progress(share, f"{_STAGES.get(progress.what, progress.what)}: {progress.done} of {progress.total}")
        else:
            st.progress(0.0, "Changing the workers")

    st.fragment(now, run_every=None if was_over else _LOOK_S)()


def _close_question() -> None:
    del st.session_state[_CHOSEN]
    st.rerun()


@dataclass(slots=True)
class ApplyState:
    """State of the change. Written by its thread alone; each assignment is complete."""

    progress: planner_pb2.Progress | None = None
    applied: planner_pb2.WorkerChange | None = None
    problem: str | None = None
    is_lost: bool = False  # the planner is away: how the change ends is not known
    is_over: bool = False


class Applying:
    """Follows one change of the workers, which continues even if the page is closed."""

    def __init__(self, updates: Iterable[planner_pb2.ApplyUpdate]) -> None:
        self.state = ApplyState()
        threading.Thread(target=_follow, args=(updates, self.state), daemon=True).start()


def _follow(updates: Iterable[planner_pb2.ApplyUpdate], state: ApplyState) -> None:
    try:
        for update in updates:
            if update.HasField("progress"):
                state.progress = update.progress
            else:
                state.applied = update.applied
    except PlannerError as error:
        state.is_lost = isinstance(error, PlannerLost)
        state.problem = str(error)
    finally:
        state.is_over = True
