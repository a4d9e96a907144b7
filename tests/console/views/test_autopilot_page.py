"""The Autopilot page: how it stands, its decisions with what was predicted and measured, and its mode."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

testing = pytest.importorskip("streamlit.testing.v1")

from console.views.autopilot_page import decision_row, looking_ahead, standing  # noqa: E402
from tests.console.fake_gateway import AUTOPILOT, DECISION, FakeGateway  # noqa: E402
from tests.console.test_console import open_page  # noqa: E402

STATUS = AUTOPILOT["status"]


def test_a_decision_has_what_was_predicted_and_measured() -> None:
    row = decision_row(DECISION, datetime(2026, 1, 1, 0, 1, tzinfo=UTC))
    assert (row["when"], row["decision"], row["role"]) == ("1 min ago", "Another role", "prefill → decode")
    assert (row["phase"], row["pressure"], row["predicted"], row["measured"]) == (
        "decode",
        "1.25",
        "0.70",
        "0.65",
    )
    assert (row["in time before"], row["in time after"]) == ("50.0 %", "95.0 %")
    advice = DECISION | {"measured_prefill": None, "measured_decode": None, "measured_attainment": None}
    assert decision_row(advice, datetime.now(UTC))["measured"] == "–"


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({}, "No change: no phase needs more workers."),
        (
            {"action": "cannot_be_met", "reason": "4 workers cannot meet the targets", "num_needed": 6},
            "4 workers cannot meet the targets. 6 would.",
        ),
        (
            {"action": "change_role", "outcome": "advised", "worker_id": "p0", "role": "decode", "reason": "it must"},
            "Advised: p0 to serve decode, because it must.",
        ),
    ],
)
def test_how_it_stands_is_a_sentence(status: dict[str, Any], said: str) -> None:
    assert standing(STATUS | status) == said


def test_the_page_shows_pressures_roles_and_decisions(gateway: FakeGateway) -> None:
    shown = open_page("autopilot", gateway.url)
    figures = {one.label: (one.value, one.delta) for one in shown.metric}
    assert figures["Prefill pressure"][0] == "0.40"
    assert figures["Decode pressure"][0] == "nobody serves it"
    assert any("demand over what its workers serve within the targets" in one.value for one in shown.caption)
    assert figures["Prefill workers"] == ("3", "-1")
    assert list(shown.dataframe[0].value["worker"]) == ["prefill-1"]
    assert any("4 requests/s by arima" in one.value for one in shown.caption)
    assert looking_ahead(STATUS["outlook"] | {"method": "last"}).endswith("what is measured now.")


def test_without_a_planner_it_says_so(gateway: FakeGateway) -> None:
    for status in (None, STATUS):
        stale = {"status": status, "status_at": None if status is None else "2026-01-01T00:00:00+00:00"}
        gateway.answers["/halfmoon/v1/autopilot"] = (200, AUTOPILOT | stale | {"decisions": []})
        shown = open_page("autopilot", gateway.url)
        assert any("No autopilot looks" in one.value for one in shown.markdown)
        assert not shown.dataframe


def test_it_is_told_to_act(gateway: FakeGateway) -> None:
    shown = open_page("autopilot", gateway.url)
    mode = next(one for one in shown.button_group if one.key.startswith("autopilot"))
    shown = mode.set_value("act").run()
    next(one for one in shown.button if one.label == "Save mode").click().run()
    assert gateway.edits() == [("PUT", "/halfmoon/v1/autopilot")]
    assert gateway.bodies[-1] == {"mode": "act", "version": 0}
