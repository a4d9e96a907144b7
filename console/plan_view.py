"""One plan, or several side by side: figures, curves, sensitivity, and the file to start from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import streamlit as st

from console.charts import charts
from console.charts.plan_charts import curve_rows, over_rate
from console.plain_text import plain
from console.planner_api import Plan, TargetMap
from console.quantities import NOTHING, seconds, share


def title(plan: Plan) -> str:
    """A plan's title in one line."""
    number = f"#{plan['id']} " if plan["id"] else ""
    return f"{number}{plan['model']} on {plan['summary']['gpu']}: {plan['summary']['layouts'][0]['layout']}"


def plan_row(plan: Plan) -> dict[str, Any]:
    """One row of the table of plans."""
    summary, best = plan["summary"], plan["summary"]["layouts"][0]
    return {
        "plan": plan["id"],
        "made": datetime.fromisoformat(plan["created_at"]).astimezone().strftime("%d %b %H:%M"),
        "model": plan["model"],
        "GPU": summary["gpu"],
        "workload": plan["request"].get("workload", NOTHING),
        "TTFT / TPOT": " / ".join(seconds(summary["targets"][name]) for name in ("ttft_s", "tpot_s")),
        "in time": share(summary["attainment_asked"]),
        "requested (req/s)": summary["rate_asked_per_s"],
        **_figures(best),
    }


def draw_map(found: TargetMap) -> None:
    """Draws a map over targets, and what it says in one sentence."""
    summary = found.summary
    with st.container(border=True):
        rows = found.chart["data"]["values"]
        own = ("data", "width", "title", "padding")  # Streamlit's front end breaks on a padding that is one number
        spec = {name: part for name, part in found.chart.items() if name not in own}
        st.subheader(plain(f"{summary['model']} on {summary['gpu']}, {summary['workload']}"))
        st.markdown(plain(summary["sentence"]))
        charts.show(charts.Chart(rows, {**spec, "config": {"view": {"strokeWidth": 0}}}), "target-map")
        st.caption(plain(found.chart["usermeta"]["how_to_read"]))


def layout_row(layout: Mapping[str, Any], criterion: str) -> dict[str, Any]:
    """One row of a plan's table of layouts."""
    return {
        **_figures(layout),
        "for $1": round(layout["goodput_per_dollar"]) if layout["price_per_hour"] else None,
        "in time": _in_time(layout, criterion),
        "TTFT met": layout["attainment_ttft"],
        "TPOT met": layout["attainment_tpot"],
        "TTFT p90": seconds(layout["ttft_s"]["p90"]),
        "TPOT p90": seconds(layout["tpot_s"]["p90"]),
    }


def compared_to_colocated(summary: Mapping[str, Any]) -> str:
    """Compares the best layout with the best colocated one."""
    colocated, best = summary["colocated"], summary["layouts"][0]
    if colocated is None:
        return "No colocated layout meets the targets."
    if best["layout"] == colocated["layout"]:
        other = summary["disaggregated"]
        better = "" if other is None else (
            f", {best['goodput_per_s_per_gpu'] / other['goodput_per_s_per_gpu']:.2f} times "
            f"the best disaggregated one, {other['layout']}"
        )  # fmt: skip
        return f"A colocated layout is best here{better}."
    return (
        f"{summary['over_colocated']:.2f} times the goodput per GPU of the best colocated one, {colocated['layout']}."
    )


def draw_plan(plan: Plan, key: str) -> None:
    """Draws everything about one plan."""
    summary, best = plan["summary"], plan["summary"]["layouts"][0]
    st.markdown(f"**{plain(title(plan))}**")
    price = f"${best['price_per_hour']:.2f}/h" if best["price_per_hour"] else NOTHING
    tiles = (
        ("GPUs", str(best["num_gpus"]), "over all workers"),
        ("Costs", price, "by the catalogue's prices, which differ by a factor of two"),
        ("Sustains", f"{best['goodput_per_s']:.3g} req/s", "the highest rate at which enough requests are in time"),
        (
            "In time",
            share(_in_time(best, summary["criterion"])),
            f"share of requests, at {best['rate_per_s']:.3g} per second",
        ),
        ("Per GPU", f"{best['goodput_per_s_per_gpu']:.3g} req/s", "share of the sustained rate"),
    )
    for column, (label, value, note) in zip(st.columns(len(tiles)), tiles, strict=True):
        column.metric(label, value, border=True, help=note)
    caption = f"{compared_to_colocated(summary)} {_targets(summary)}. Times: {_sources(summary['latency'])}."
    st.caption(plain(caption))
    for note in summary["notes"]:
        st.caption(f":material/info: {plain(note)}")
    rows = [layout_row(layout, summary["criterion"]) for layout in summary["layouts"]]
    st.dataframe(rows, column_config=_percent("in time", "TTFT met", "TPOT met"), hide_index=True, key=f"layouts-{key}")
    points = [row for curve in summary["curves"] for row in curve_rows(curve["layout"], curve)]
    draw_curves(points, summary, key)
    st.markdown("**What if** the best layout had more load")
    what_if = [
        {
            "what": name,
            "req/s": result["rate_per_s"],
            "in time": _in_time(result, summary["criterion"]),
            "TTFT p90": seconds(result["ttft_s"]["p90"]),
            "TPOT p90": seconds(result["tpot_s"]["p90"]),
        }
        for name, result in {"as planned": best, **summary["sensitivity"]}.items()
    ]
    st.dataframe(what_if, column_config=_percent("in time"), hide_index=True, key=f"what-if-{key}")


def draw_comparison(plans: Sequence[Plan]) -> None:
    """Compares the best layouts of several plans."""
    points = [
        row
        for plan in plans
        for curve in plan["summary"]["curves"][:1]
        for row in curve_rows(title(plan), curve)
    ]  # fmt: skip
    draw_curves(points, plans[0]["summary"], "compared")
    st.caption("The dashed line is the first plan's goal. Each plan was simulated with its own requests and targets.")


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


def _figures(layout: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "layout": " = ".join([layout["layout"], *layout.get("same_as", ())]),
        "GPUs": layout["num_gpus"],
        "$/h": round(layout["price_per_hour"], 2),
        "sustains (req/s)": round(layout["goodput_per_s"], 2),
        "per GPU": round(layout["goodput_per_s_per_gpu"], 3),
    }


def _in_time(result: Mapping[str, Any], criterion: str) -> float:
    """Attainment by the plan's criterion."""
    if criterion == "joint":
        return float(result["attainment_joint"])
    return min(float(result["attainment_ttft"]), float(result["attainment_tpot"]))


def _targets(summary: Mapping[str, Any]) -> str:
    targets = summary["targets"]
    return (
        f"{share(summary['attainment_asked'])} within TTFT {seconds(targets['ttft_s'])} and "
        f"TPOT {seconds(targets['tpot_s'])}"
    )


def _sources(latency: Sequence[Mapping[str, Any]]) -> str:
    """Sources of latencies, and how well they fit measurements."""
    return "; ".join(
        fit["source"]
        + (f" (median error {share(fit['error_prefill'])} / {share(fit['error_step'])})" if fit["error_step"] else "")
        for fit in latency
    )


def _percent(*names: str) -> dict[str, Any]:
    return {name: st.column_config.NumberColumn(format="percent") for name in names}
