"""Applying a plan from the Planner page, against a fake planner and a fake gateway."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

testing = pytest.importorskip("streamlit.testing.v1")

from console.planner_api import PlannerApi  # noqa: E402
from halfmoon.pb import planner_pb2  # noqa: E402
from tests.console.fake_gateway import FakeGateway  # noqa: E402
from tests.console.fake_planner import CHANGE, FakePlanner, running_fake_planner  # noqa: E402


def the_page(gateway: str, planner: str) -> None:
    """What AppTest runs."""
    from console.gateway_api import GatewayApi
    from console.planner_api import PlannerApi
    from console.views import planner_page

    planner_page.render(GatewayApi(gateway), PlannerApi(planner, "secret"))


@pytest.fixture
def planner() -> Iterator[FakePlanner]:
    with running_fake_planner() as fake:
        fake.can_apply = True
        yield fake


def open_page(gateway: FakeGateway, planner: FakePlanner) -> Any:
    addresses = {"gateway": gateway.url, "planner": planner.address}
    return checked(testing.AppTest.from_function(the_page, kwargs=addresses, default_timeout=60).run())


def checked(shown: Any) -> Any:
    assert not shown.exception, shown.exception
    return shown


def click(shown: Any, label: str) -> Any:
    return checked(next(one for one in shown.button if one.label == label).click().run())


def labels(shown: Any) -> list[str]:
    return [one.label for one in shown.button]


def until_over(shown: Any) -> Any:
    """Looks again until the change has ended."""
    last_s = time.monotonic() + 60
    while not shown.session_state["plan_applying"].state.is_over:
        assert time.monotonic() < last_s
        shown = checked(shown.run())
    return checked(shown.run())


def test_a_plan_is_applied_after_a_look_at_what_changes(gateway: FakeGateway, planner: FakePlanner) -> None:
    shown = click(open_page(gateway, planner), "Apply…")
    assert [list(table.value["role"]) for table in shown.table] == [["prefill", "decode"], ["both"]]
    assert any("0 stay, 2 start, then 2 finish" in one.value for one in shown.caption)
    assert not planner.applied, "not before it is confirmed"
    shown = click(shown, "Apply")
    assert "Apply" not in labels(shown)
    planner.go.set()
    shown = until_over(shown)
    assert planner.applied == [(1, False)]
    assert [one.value for one in shown.success] == ["The plan's workers are serving."]
    assert "Bearer secret" in planner.tokens


def test_who_looks_and_cancels_changes_nothing(gateway: FakeGateway, planner: FakePlanner) -> None:
    shown = click(click(open_page(gateway, planner), "Apply…"), "Cancel")
    assert not shown.table
    assert not planner.applied


def test_why_it_was_not_applied_is_said(gateway: FakeGateway, planner: FakePlanner) -> None:
    planner.refuses_to_apply = "both-2 ended with exit status 1"
    planner.go.set()
    shown = until_over(click(click(open_page(gateway, planner), "Apply…"), "Apply"))
    assert [one.value for one in shown.error] == ["The plan was not applied: both-2 ended with exit status 1"]


def test_a_planner_that_is_lost_meanwhile_leaves_the_outcome_open(gateway: FakeGateway, planner: FakePlanner) -> None:
    planner.is_lost = True
    planner.go.set()
    shown = until_over(click(click(open_page(gateway, planner), "Apply…"), "Apply"))
    assert not shown.error, "the change belongs to `halfmoon up`, and goes on"
    assert "The workers may still change" in shown.warning[0].value
    assert "Socket closed" in shown.warning[0].value


def test_where_both_do_not_fit_stopping_first_has_to_be_chosen(gateway: FakeGateway, planner: FakePlanner) -> None:
    planner.change = planner_pb2.WorkerChange(now=CHANGE.now, then=CHANGE.then, needs_stop_first="1 GPU is free")
    planner.go.set()
    shown = click(open_page(gateway, planner), "Apply…")
    assert [one.value for one in shown.warning] == ["1 GPU is free"]
    assert next(one for one in shown.button if one.label == "Apply").disabled
    until_over(click(checked(shown.checkbox(key="apply-stop-first").check().run()), "Apply"))
    assert planner.applied == [(1, True)]


def test_where_nothing_can_be_applied_it_is_not_offered(gateway: FakeGateway, planner: FakePlanner) -> None:
    planner.can_apply = False
    assert "Apply…" not in labels(open_page(gateway, planner))


def test_what_the_ledger_did_not_take_is_not_offered(gateway: FakeGateway, planner: FakePlanner) -> None:
    planner.plans[0].id = 0
    assert "Apply…" not in labels(open_page(gateway, planner))


def test_updates_come_as_they_are(planner: FakePlanner) -> None:
    planner.go.set()
    kinds = [one.WhichOneof("update") for one in PlannerApi(planner.address).apply(1, stop_first=False)]
    assert kinds == ["progress", "applied"]
