"""The figures of a replay, on outcomes whose figures are known."""

from __future__ import annotations

import json
import math
from io import StringIO

import pytest
from rich.console import Console

from halfmoon.replay.outcome import Outcome, ReplayTargets, summarized
from halfmoon.replay.report import report_table, report_tables

TARGETS = ReplayTargets(ttft_s=1.0, tbt_s=0.1)
OUTCOMES = [
    Outcome("answered", ttft_s=0.5, tbt_s=0.1, num_tokens=5, num_prompt_tokens=100, num_cached_tokens=50),
    Outcome("answered", ttft_s=1.5, tbt_s=0.05, num_tokens=5, num_prompt_tokens=100),
    Outcome("answered", ttft_s=1.0, tbt_s=0.2, num_tokens=5, num_prompt_tokens=100),
    Outcome("refused", "ttft"),
    Outcome("refused", "tbt"),
    Outcome("failed", "no_capacity"),
]


def test_each_request_has_one_end() -> None:
    found = summarized(OUTCOMES, TARGETS, duration_s=2.0)
    assert (found.num_in_time, found.num_late, found.num_late_ttft) == (1, 2, 1)
    assert (found.refused_by, found.failed_by) == ({"ttft": 1, "tbt": 1}, {"no_capacity": 1})
    assert found.num_in_time + found.num_late + found.num_refused + found.num_failed == found.num_requests
    assert found.num_refused_or_wasted == 5
    assert found.attainment == pytest.approx(1 / 6)
    assert found.goodput_per_s == pytest.approx(0.5)
    assert found.ttft_s.mean == pytest.approx(1.0)
    assert found.cached_share == pytest.approx(50 / 300)


def test_without_targets_every_answer_is_in_time() -> None:
    assert summarized(OUTCOMES, ReplayTargets(), duration_s=2.0).num_in_time == 3


def test_nothing_gives_no_figures_and_still_a_report() -> None:
    found = summarized([], TARGETS, duration_s=0.0)
    assert math.isnan(found.attainment)
    assert json.loads(json.dumps(found.as_json()))["attainment"] is None
    assert report_table({("random", "off"): found}).row_count > 5


def test_a_report_has_as_many_columns_as_fit_the_terminal() -> None:
    found = summarized(OUTCOMES, TARGETS, duration_s=2.0)
    modes = [(placement, admission) for placement in ("kvcache-centric", "random") for admission in ("off", "load")]
    terminal = Console(width=80, file=StringIO())
    tables = list(report_tables(dict.fromkeys(modes, found), terminal.width))
    assert [len(table.columns) for table in tables] == [3, 3]
    assert all(terminal.measure(table).maximum <= 80 for table in tables)
    assert [len(table.columns) for table in report_tables({modes[0]: found}, width=20)] == [2]
