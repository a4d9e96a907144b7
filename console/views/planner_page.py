"""The Planner page: which workers, how many and with what parallelism for a workload and its targets."""

from __future__ import annotations

import time
from typing import NamedTuple

import streamlit as st

from console.forms.plan_apply import draw_apply_button, draw_applying
from console.forms.planner_form import planner_form
from console.gateway_api import GatewayApi
from console.live import away, empty
from console.plain_text import plain
from console.plan_view import draw_comparison, draw_map, draw_plan, plan_row, title
from console.planner_api import Plan, PlannerApi, PlannerError, Search
from console.quantities import NOTHING

_LOOK_AT_SEARCH_S = 0.5
_PLANS_AGAIN_S = 30.0  # others make plans too
STAGES = {
    "workers alone": "Workers alone",
    "layouts": "Layouts",
    "disaggregated": "Disaggregated layouts",
    "colocated": "Colocated layouts",
    "goodputs": "Sustained rates",
    "curves": "Curves",
    "what if": "What if",
    "other requests and times": "Other requests and times",
}


def render(api: GatewayApi, planner: PlannerApi | None) -> None:
    """Draws the page."""
    st.title("Planner")
    if planner is None:
        empty(
            "No planner",
            "`halfmoon up` starts one. A console alone needs `--planner host:port` or HALFMOON_CONSOLE_PLANNER.",
            ":material/power_off:",
        )
        return
    try:
        catalogue = planner.catalogue()
    except PlannerError:
        away(planner.catalogue)
        return
    form = planner_form(api, catalogue)
    search: Search | None = st.session_state.get("plan_search")
    is_running = search is not None and not search.state.is_over
    button, map_button, hint = st.columns([1, 1, 4], vertical_alignment="center")
    if button.button("Search", type="primary", disabled=bool(form.missing) or is_running, width="stretch"):
        st.session_state["plan_search"] = planner.search(form.fields, form.files)
        st.rerun()
    if map_button.button(
        "Map targets", disabled=bool(form.missing) or is_running, width="stretch", icon=":material/grid_on:",
        help="Over which targets, around those above, separate prefill and decode workers pay. Takes minutes.",
    ):  # fmt: skip
        st.session_state["plan_search"] = planner.search(form.fields, form.files, is_map=True)
        st.rerun()
    if form.missing:
        hint.caption(f"Still needed: {', '.join(form.missing)}.")
    if search is not None:
        _draw_search(search)
        if search.state.target_map is not None:
            draw_map(search.state.target_map)
    plans = _kept_plans(planner, search)
    if catalogue.can_apply:
        draw_applying(planner, plans)
    _draw_plans(plans, search, catalogue.can_apply)


class _Kept(NamedTuple):
    """Plans read from the ledger, and when: with all their figures they are about a megabyte."""

    plans: list[Plan]
    at_s: float
    newest: Plan | None  # found by a search on this page


def _kept_plans(planner: PlannerApi, search: Search | None) -> list[Plan]:
    """Plans from the ledger; empty if it cannot be read, since searching works without it."""
    newest = search.state.plan if search is not None else None
    kept: _Kept | None = st.session_state.get("plans_of_before")
    if kept is not None and kept.newest is newest and time.monotonic() - kept.at_s < _PLANS_AGAIN_S:
        return kept.plans
    try:
        plans = planner.plans()
    except PlannerError as error:
        st.warning(f"Earlier plans cannot be read now: {plain(error)}", icon=":material/cloud_off:")
        return []
    st.session_state["plans_of_before"] = _Kept(plans, time.monotonic(), newest)
    return plans


def _draw_search(search: Search) -> None:
    """Draws a search's progress or outcome, refreshed often until it is over."""
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
        waiting = f"Waiting for {state.num_ahead} other searches" if state.num_ahead else "Searching"
        head.markdown(f"**{waiting}** · {search.age_s:.0f} s")
        if button.button("Cancel", width="stretch", key="plan-cancel"):
            search.cancel()
        for what, (done, total) in state.progress.items():
            st.progress(min(done / total, 1.0) if total else 0.0, f"{STAGES.get(what, what)}: {done} of {total}")


def _draw_plans(plans: list[Plan], search: Search | None, can_apply: bool) -> None:
    """Draws the plans chosen in the table, or the one found last."""
    newest = search.state.plan if search is not None else None
    if newest is not None and not newest["id"]:
        st.warning(
            "The ledger did not store this plan. Download it: there is no other copy.", icon=":material/warning:"
        )
    chosen: list[Plan] = []
    if plans:
        st.subheader("Plans")
        table = st.dataframe(
            [plan_row(plan) for plan in plans], hide_index=True, placeholder=NOTHING, key="plans",
            on_select="rerun", selection_mode="multi-row",
        )  # fmt: skip
        chosen = [plans[at] for at in table["selection"]["rows"] if at < len(plans)]
        st.caption("Select one plan to see it, or several to compare them.")
    elif newest is None and (search is None or search.state.is_over):
        empty("No plan yet", "Describe the workload and its targets above, then search.", ":material/query_stats:")
    if len(chosen) > 1:
        st.subheader("Compared")
        draw_comparison(chosen)
    shown = chosen or ([newest] if newest is not None else plans[:1])
    for plan in shown:
        draw_plan(plan, str(plan["id"]))
        _draw_use(plan, can_apply)


def _draw_use(plan: Plan, can_apply: bool) -> None:
    """Draws the download button and how to start the plan."""
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
        st.caption("MODEL is the Hugging Face directory or id to serve. Each worker gets its own GPUs.")
