"""Planner: which workers, how many and with what parallelism, for a workload and its targets."""

from __future__ import annotations

import time
from typing import NamedTuple

import streamlit as st

from console.gateway_api import GatewayApi
from console.live import away, empty
from console.plain_text import plain
from console.plan_apply import draw_apply_button, draw_applying
from console.plan_view import draw_comparison, draw_plan, plan_row, title
from console.planner_api import Plan, PlannerApi, PlannerError, Search
from console.planner_form import planner_form
from console.quantities import NOTHING

_LOOK_AT_SEARCH_S = 0.5
_PLANS_AGAIN_S = 30.0  # others make some, too
STAGES = {
    "workers alone": "Workers alone",
    "layouts": "Layouts",
    "disaggregated": "Prefill and decode apart",
    "colocated": "Workers that do both",
    "goodputs": "Rates that are held",
    "curves": "Curves",
    "what if": "What if",
}


def render(api: GatewayApi, planner: PlannerApi | None) -> None:
    """The page."""
    st.title("Planner")
    if planner is None:
        empty(
            "No planner",
            "`halfmoon up` starts one. For a console of its own: `--planner host:port`, or HALFMOON_CONSOLE_PLANNER.",
            ":material/power_off:",
        )
        return
    try:
        catalogue = planner.catalogue()
    except PlannerError as error:
        away(str(error), planner.catalogue)
        return
    asked = planner_form(api, catalogue)
    search: Search | None = st.session_state.get("plan_search")
    is_running = search is not None and not search.state.is_over
    button, said = st.columns([1, 5], vertical_alignment="center")
    if button.button("Search", type="primary", disabled=bool(asked.missing) or is_running, width="stretch"):
        st.session_state["plan_search"] = planner.search(asked.fields, asked.files)
        st.rerun()
    if asked.missing:
        said.caption(f"Still needed: {', '.join(asked.missing)}.")
    if search is not None:
        _draw_search(search)
    plans = _kept_plans(planner, search)
    if catalogue.can_apply:
        draw_applying(planner, plans)
    _draw_plans(plans, search, catalogue.can_apply)


class _Kept(NamedTuple):
    """The plans of before, and when they were asked for: with all their figures they are a megabyte."""

    plans: list[Plan]
    at_s: float
    newest: Plan | None  # that was found on this page


def _kept_plans(planner: PlannerApi, search: Search | None) -> list[Plan]:
    """None where they cannot be read: searching goes on without the ledger."""
    found = search.state.plan if search is not None else None
    kept: _Kept | None = st.session_state.get("plans_of_before")
    if kept is not None and kept.newest is found and time.monotonic() - kept.at_s < _PLANS_AGAIN_S:
        return kept.plans
    try:
        plans = planner.plans()
    except PlannerError as error:
        st.warning(f"Plans of before cannot be read now: {plain(error)}", icon=":material/cloud_off:")
        return []
    st.session_state["plans_of_before"] = _Kept(plans, time.monotonic(), found)
    return plans


def _draw_search(search: Search) -> None:
    """Where it is, or what came of it; looked at often until it is over."""
    was_over = search.state.is_over

    def now() -> None:
        state = search.state
        if state.is_over and not was_over:
            st.rerun()  # the whole page: there is a plan to show
        if state.problem is not None:
            st.error(plain(state.problem), icon=":material/error:")
        if state.was_cancelled:
            st.info("The search was cancelled.", icon=":material/block:")
        if not state.is_over:
            _draw_progress(search)

    st.fragment(now, run_every=None if was_over else _LOOK_AT_SEARCH_S)()


def _draw_progress(search: Search) -> None:
    state = search.state
    with st.container(border=True):
        head, button = st.columns([5, 1], vertical_alignment="center")
        waiting = f"Waiting: {state.num_ahead} before this one" if state.num_ahead else "Searching"
        head.markdown(f"**{waiting}** · {search.age_s:.0f} s")
        if button.button("Cancel", width="stretch", key="plan-cancel"):
            search.cancel()
        for what, (done, total) in state.progress.items():
            st.progress(min(done / total, 1.0) if total else 0.0, f"{STAGES.get(what, what)}: {done} of {total}")


def _draw_plans(plans: list[Plan], search: Search | None, can_apply: bool) -> None:
    """The one that was found last, or those that are chosen in the table."""
    found = search.state.plan if search is not None else None
    if found is not None and not found["id"]:
        st.warning("The ledger did not take this plan: download it, it is nowhere else.", icon=":material/warning:")
    chosen: list[Plan] = []
    if plans:
        st.subheader("Plans")
        table = st.dataframe(
            [plan_row(plan) for plan in plans], hide_index=True, placeholder=NOTHING, key="plans",
            on_select="rerun", selection_mode="multi-row",
        )  # fmt: skip
        chosen = [plans[at] for at in table["selection"]["rows"] if at < len(plans)]
        st.caption("Choose one to see it, several to compare them.")
    elif found is None:
        empty("No plan yet", "Say above what has to be served and how quickly, and search.", ":material/query_stats:")
    if len(chosen) > 1:
        st.subheader("Compared")
        draw_comparison(chosen)
    shown = chosen or ([found] if found is not None else plans[:1])
    for plan in shown:
        draw_plan(plan, str(plan["id"]))
        _draw_use(plan, can_apply)


def _draw_use(plan: Plan, can_apply: bool) -> None:
    """How to begin with it."""
    left, middle, right = st.columns([2, 1, 5], vertical_alignment="center")
    left.download_button(
        "Download plan.yaml", plan["plan_yaml"], "plan.yaml", "application/yaml", on_click="ignore",
        icon=":material/download:", key=f"download-{plan['id']}", width="stretch",
    )  # fmt: skip
    if can_apply:
        with middle:
            draw_apply_button(plan)
    with right.popover("How to start it"):
        st.markdown(f"{plain(title(plan))}, on one host:")
        st.code("halfmoon up --plan plan.yaml --model MODEL", language="bash")
        st.caption("MODEL is the Hugging Face directory or id to serve. The workers get GPUs of their own.")
