"""A sweep's points as a table, as ratios to the control arm, and as a plot. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from halfmoon.plan.plot import panel, rule
from halfmoon.replay.bench_load import Pace
from halfmoon.replay.report import counted, percentiles
from halfmoon.replay.sweep import Point, Sweep

_UNIT: dict[Pace, str] = {"rate": "rate/s", "at once": "at once"}


def markdown_table(points: Sequence[Point], pace: Pace = "rate") -> str:
    """The points in order of their rates, servers side by side. Percentiles are those of answered requests."""
    has_servers = len({point.server for point in points}) > 1
    has_jobs = any(point.jobs_per_hour for point in points)
    columns: dict[str, Callable[[Point], str]] = {_UNIT[pace]: lambda point: f"{point.value:.3g}"}
    if has_servers:
        columns["server"] = lambda point: point.server
    columns |= {
        "requests": lambda point: str(point.summary.num_requests),
        "in time": lambda point: f"{point.summary.attainment:.1%}",
        "goodput/s": lambda point: f"{point.summary.goodput_per_s:.3g}",
        "tokens/s": lambda point: f"{point.output_tokens_per_s:.4g}",
    }
    if has_jobs:
        columns["jobs/h"] = lambda point: f"{point.jobs_per_hour:.4g}"
        columns["in time/h"] = lambda point: f"{point.jobs_in_time_per_hour:.4g}"
    columns |= {
        "TTFT p50 / p90 / p99, s": lambda point: percentiles(point.summary.ttft_s, 1, ".3f"),
        "TPOT p50 / p90 / p99, ms": lambda point: percentiles(point.summary.tbt_s, 1000, ".1f"),
        "cached": lambda point: f"{point.summary.cached_share:.0%}",
        "failed": lambda point: str(point.summary.num_refused + point.summary.num_failed),
    }
    rows = [list(columns), ["---"] * len(columns)]
    rows += [[cell(point) for cell in columns.values()] for point in sorted(points, key=lambda one: one.value)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows) + "\n"


def ratio_lines(points: Sequence[Point], control: str, pace: Pace = "rate") -> list[str]:
    """Each other server's figures divided by those of the control arm at the same point."""
    by_value = {point.value: point for point in points if point.server == control}
    lines = []
    for point in sorted(points, key=lambda one: one.value):
        base = by_value.get(point.value)
        if base is None or point.server == control:
            continue
        figures = {
            "TTFT p50": (point.summary.ttft_s.p50, base.summary.ttft_s.p50),
            "TPOT p50": (point.summary.tbt_s.p50, base.summary.tbt_s.p50),
            "tokens/s": (point.output_tokens_per_s, base.output_tokens_per_s),
            "goodput": (point.summary.goodput_per_s, base.summary.goodput_per_s),
            "jobs/h": (point.jobs_per_hour, base.jobs_per_hour),
        }
        ratios = ", ".join(f"{name} {value / other:.2f}x" for name, (value, other) in figures.items() if other > 0)
        lines.append(f"{point.server} beside {control}, {_where(point, pace)}: {ratios}")
    return lines


def failure_lines(points: Sequence[Point], pace: Pace = "rate") -> list[str]:
    """Why requests of a point were not answered."""
    lines = []
    for point in sorted(points, key=lambda one: one.value):
        summary = point.summary
        ends = (
            ("refused", summary.num_refused, summary.refused_by),
            ("failed", summary.num_failed, summary.failed_by),
        )
        reasons = ", ".join(f"{name} {counted(num, by_reason)}" for name, num, by_reason in ends if num)
        if reasons:
            lines.append(f"{point.server}, {_where(point, pace)}: {reasons}")
    return lines


def search_line(sweep: Sweep, server: str) -> str:
    """Why a search found no rate that the server keeps."""
    if sweep.may_keep(server):
        return f"none, down to {sweep.least:.3g} a second; lower ones take longer and were not tried: give --start"
    alone = sweep.alone[server]
    figures = f"TTFT p50 {alone.ttft_s.p50:.3g} s, TPOT p50 {1000 * alone.tbt_s.p50:.3g} ms"
    sent = f"{alone.num_in_time} of {alone.num_requests} requests sent one at a time were in time ({figures})"
    return f"none: {sent}, so lower rates were not tried"


def _where(point: Point, pace: Pace) -> str:
    return f"{point.value:.3g} {'a second' if pace == 'rate' else 'at once'}"


def plot_spec(points: Sequence[Point], names: Sequence[str], attainment: float, pace: Pace = "rate") -> dict[str, Any]:
    """A Vega-Lite specification: requests in time, goodput (or jobs an hour), TTFT and TPOT over the rate."""
    rows = [
        {
            "server": point.server,
            "rate": point.value,
            "attainment": point.summary.attainment,
            "goodput": point.summary.goodput_per_s,
            "jobs": point.jobs_in_time_per_hour,
            "ttft": point.summary.ttft_s.p50,
            "tpot": 1000 * point.summary.tbt_s.p50,
        }
        for point in sorted(points, key=lambda one: one.value)
    ]
    unit = "requests/s" if pace == "rate" else "sessions at once"
    from_zero = {"domainMin": 0}
    good = ("jobs", "jobs in time an hour") if any(row["jobs"] for row in rows) else ("goodput", "goodput, requests/s")
    goal = rule("y", attainment, f"goal {attainment:.0%}")
    panels = [
        panel("attainment", "share of requests in time", unit, list(names), [goal], {"domain": [0, 1]}, "server"),
        panel(*good, unit, list(names), [], from_zero, "server"),
        panel("ttft", "TTFT p50, s", unit, list(names), [], from_zero, "server"),
        panel("tpot", "TPOT p50, ms", unit, list(names), [], from_zero, "server"),
    ]
    return {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "data": {"values": rows},
        "vconcat": [{"hconcat": panels[:2]}, {"hconcat": panels[2:]}],
        "config": {"view": {"strokeWidth": 0}, "background": "white"},
        "padding": 12,
    }
