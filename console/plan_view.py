"""One plan, and several beside each other: figures, curves, what if, and the file to start from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import streamlit as st

from console import charts
from console.plain_text import plain
from console.plan_charts import curve_rows, over_rate
from console.planner_api import Plan
from console.quantities import NOTHING, seconds, share


def title(plan: Plan) -> str:
    """A plan in a line."""
    number = f"#{plan['id']} " if plan["id"] else ""
    return f"{number}{plan['model']} on {plan['summary']['gpu']}: {plan['summary']['layouts'][0]['layout']}"


def plan_row(plan: Plan) -> dict[str, Any]:
    """One line of the table of plans."""
    summary, best = plan["summary"], plan["summary"]["layouts"][0]
    return {
        "plan": plan["id"],
        "made": datetime.fromisoformat(plan["created_at"]).astimezone().strftime("%d %b %H:%M"),
        "model": plan["model"],
        "GPU": summary["gpu"],
        "workload": plan["request"].get("workload", NOTHING),
        "TTFT / TPOT": " / ".join(seconds(summary["targets"][name]) for name in ("ttft_s", "tpot_s")),
        "in time": share(summary["attainment_asked"]),
        "asked (req/s)": summary["rate_asked_per_s"],
        **_figures(best),
    }


def layout_row(one: Mapping[str, Any], criterion: str) -> dict[str, Any]:
    """One line of a plan's table."""
    return {
        **_figures(one),
        "for $1": round(one["goodput_per_dollar"]) if one["price_per_hour"] else None,
        "in time": _in_time(one, criterion),
        "TTFT met": one["attainment_ttft"],
        "TPOT met": one["attainment_tpot"],
        "TTFT p90": seconds(one["ttft_s"]["p90"]),
        "TPOT p90": seconds(one["tpot_s"]["p90"]),
    }


def compared_to_colocated(summary: Mapping[str, Any]) -> str:
    """How the best stands to the best layout of workers that do both."""
    colocated, best = summary["colocated"], summary["layouts"][0]
    if colocated is None:
        return "No layout of workers that do both meets the targets."
    if best["layout"] == colocated["layout"]:
        other = summary["disaggregated"]
        better = "" if other is None else (
            f", {best['goodput_per_s_per_gpu'] / other['goodput_per_s_per_gpu']:.2f} times "
            f"the best with prefill and decode apart, {other['layout']}"
        )  # fmt: skip
        return f"Workers that do both are best here{better}."
    return (
        f"{summary['over_colocated']:.2f} times the goodput for each GPU of the best colocated, {colocated['layout']}."
    )


def draw_plan(plan: Plan, key: str) -> None:
    """All of one."""
    summary, best = plan["summary"], plan["summary"]["layouts"][0]
    st.markdown(f"**{plain(title(plan))}**")
    price = f"${best['price_per_hour']:.2f}/h" if best["price_per_hour"] else NOTHING
    tiles = (
        ("GPUs", str(best["num_gpus"]), "of all workers"),
        ("Costs", price, "by the catalogue's prices, which differ by a factor of two"),
        ("Holds", f"{best['goodput_per_s']:.3g} req/s", "the highest rate at which enough requests are in time"),
        (
            "In time",
            share(_in_time(best, summary["criterion"])),
            f"of the requests, at {best['rate_per_s']:.3g} a second",
        ),
        ("Each GPU", f"{best['goodput_per_s_per_gpu']:.3g} req/s", "of what the layout holds"),
    )
    for column, (label, value, note) in zip(st.columns(len(tiles)), tiles, strict=True):
        column.metric(label, value, border=True, help=note)
    said = f"{compared_to_colocated(summary)} {_targets(summary)}. Times: {_sources(summary['latency'])}."
    st.caption(plain(said))
    for note in summary["notes"]:
        st.caption(f":material/info: {plain(note)}")
    rows = [layout_row(one, summary["criterion"]) for one in summary["layouts"]]
    st.dataframe(rows, column_config=_percent("in time", "TTFT met", "TPOT met"), hide_index=True, key=f"layouts-{key}")
    points = [row for curve in summary["curves"] for row in curve_rows(curve["layout"], curve)]
    draw_curves(points, summary, key)
    st.markdown("**What if** the best had to bear more")
    what_if = [
        {
            "what": name,
            "req/s": one["rate_per_s"],
            "in time": _in_time(one, summary["criterion"]),
            "TTFT p90": seconds(one["ttft_s"]["p90"]),
            "TPOT p90": seconds(one["tpot_s"]["p90"]),
        }
        for name, one in {"as planned": best, **summary["sensitivity"]}.items()
    ]
    st.dataframe(what_if, column_config=_percent("in time"), hide_index=True, key=f"what-if-{key}")


def draw_comparison(plans: Sequence[Plan]) -> None:
    """The best layout of each."""
    points = [
        row
        for plan in plans
        for curve in plan["summary"]["curves"][:1]
        for row in curve_rows(title(plan), curve)
    ]  # fmt: skip
    draw_curves(points, plans[0]["summary"], "compared")
    st.caption("The dashed share is that of the first plan. Each was simulated with its own requests and targets.")


def draw_curves(points: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], key: str) -> None:
    """Attainment and goodput over the rate, side by side."""
    if not points:
        st.caption("This plan was made without curves.")
        return
    goal, rate = summary["attainment_asked"], summary["rate_asked_per_s"]
    left, right = st.columns(2)
    with left.container(border=True):
        st.markdown("**Requests in time** over the rate")
        charts.show(over_rate(points, "attainment", goal, rate), f"attainment-{key}")
    with right.container(border=True):
        st.markdown("**Goodput** over the rate")
        charts.show(over_rate(points, "goodput", goal, rate), f"goodput-{key}")


def _figures(one: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "layout": " = ".join([one["layout"], *one.get("same_as", ())]),
        "GPUs": one["num_gpus"],
        "$/h": round(one["price_per_hour"], 2),
        "holds (req/s)": round(one["goodput_per_s"], 2),
        "each GPU": round(one["goodput_per_s_per_gpu"], 3),
    }


def _in_time(one: Mapping[str, Any], criterion: str) -> float:
    """The share that counts."""
    if criterion == "joint":
        return float(one["attainment_joint"])
    return min(float(one["attainment_ttft"]), float(one["attainment_tpot"]))


def _targets(summary: Mapping[str, Any]) -> str:
    targets = summary["targets"]
    return (
        f"{share(summary['attainment_asked'])} within TTFT {seconds(targets['ttft_s'])} and "
        f"TPOT {seconds(targets['tpot_s'])}"
    )


def _sources(latency: Sequence[Mapping[str, Any]]) -> str:
    """Where times are from, and how well they fit what was measured."""
    return "; ".join(
        one["source"]
        + (f" (median error {share(one['error_prefill'])} / {share(one['error_step'])})" if one["error_step"] else "")
        for one in latency
    )


def _percent(*names: str) -> dict[str, Any]:
    return {name: st.column_config.NumberColumn(format="percent") for name in names}
