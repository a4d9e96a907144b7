"""A plan's summary, its curves and its plot agree with the plan, and are plain JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from halfmoon.errors import InvalidRequest
from halfmoon.plan.planning import PlanResult, make_plan
from halfmoon.plan.plot import check_plot, plot_spec
from halfmoon.plan.summary import summary_of
from tests.plan.planning_problems import REQUEST


@cache
def plan() -> PlanResult:
    return make_plan(replace(REQUEST, gpus_per_node=2, rate_per_s=2.0), 1, with_curves=True)


def test_a_summary_is_plain_json_that_agrees_with_the_plan() -> None:
    result = plan()
    summary = json.loads(json.dumps(summary_of(result)))
    best = result.plan.best[0]
    first = summary["layouts"][0]
    assert (
        first["num_gpus"]
        == best.layout.num_gpus
        == sum(workers["count"] * workers["tensor"] * workers["pipeline"] for workers in first["workers"])
    )
    assert first["goodput_per_s_per_gpu"] == pytest.approx(first["goodput_per_s"] / first["num_gpus"])
    assert first["goodput_per_dollar"] == pytest.approx(3600 * first["goodput_per_s"] / first["price_per_hour"])
    assert first["attainment_joint"] >= summary["attainment_asked"]
    assert [layout["num_gpus"] for layout in summary["layouts"]] == sorted(
        layout["num_gpus"] for layout in summary["layouts"]
    )
    assert set(summary["sensitivity"]) == {"traffic +20 %", "outputs +50 %", "prompts +50 %"}
    assert all(one["source"].startswith("roofline of llama-3-8b on h100") for one in summary["latency"])


def test_a_curve_has_the_requested_rate_and_ascends() -> None:
    result = plan()
    shown = {rated.layout for rated in result.plan.best}
    assert shown <= {curve.layout for curve in result.curves}
    for curve in result.curves:
        assert 2.0 in curve.rates_per_s
        assert list(curve.rates_per_s) == sorted(set(curve.rates_per_s))
        assert all(0.0 <= share <= 1.0 for share in curve.attainments)
        assert max(curve.attainments) >= 0.9


def test_a_plot_has_a_point_for_each_rate_and_its_goals() -> None:
    summary = summary_of(plan())
    spec = json.loads(json.dumps(plot_spec(summary)))
    rows = spec["data"]["values"]
    assert len(rows) == sum(len(curve["rate_per_s"]) for curve in summary["curves"])
    assert all(row["goodput"] == pytest.approx(row["rate"] * row["attainment"]) for row in rows)
    names = [curve["layout"] for curve in summary["curves"]]
    lines = [layer for panel in spec["hconcat"] for layer in panel["layer"] if "encoding" in layer]
    assert [line["encoding"]["color"]["scale"]["domain"] for line in lines] == [names, names]
    assert "goal 90%" in json.dumps(spec)
    assert "asked for" in json.dumps(spec)


def test_without_a_rate_a_plot_counts_per_gpu() -> None:
    summary = {**summary_of(plan()), "rate_asked_per_s": None}
    rows = plot_spec(summary)["data"]["values"]
    curve = summary["curves"][0]
    assert rows[0]["rate"] == pytest.approx(curve["rate_per_s"][0] / curve["num_gpus"])
    assert "asked for" not in json.dumps(plot_spec(summary))


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("plan.pdf", r"a plot is a \.png or \.html file, not plan\.pdf"),
        ("nowhere/plan.png", "nowhere is not a directory"),
    ],
)
def test_a_plot_that_cannot_be_written_is_refused_before_the_search(path: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as caught:
        check_plot(Path(path))
    assert caught.value.param == "plot"
