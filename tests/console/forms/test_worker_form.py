"""An operator changes a worker from the overview's table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

testing = pytest.importorskip("streamlit.testing.v1")

from tests.console.fake_gateway import CLUSTER, FakeGateway, running_fake_gateway  # noqa: E402
from tests.console.test_console import open_page, with_table  # noqa: E402

ROLE = "/halfmoon/v1/workers/prefill-1/role"
DRAIN = "/halfmoon/v1/workers/prefill-1/drain"


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with running_fake_gateway() as fake:
        fake.answers["/halfmoon/v1/cluster"] = (
            200,
            CLUSTER | {"workers": [worker | {"role_epoch": 3} for worker in CLUSTER["workers"]]},
        )
        yield fake


def button(shown: Any, label: str) -> Any:
    return next(one for one in shown.button if one.label == label)


def opened(gateway: FakeGateway) -> Any:
    shown = with_table(open_page("overview", gateway.url))
    return shown.selectbox(key="worker-to-change").set_value("prefill-1").run()


def test_another_role_is_sent_with_the_epoch_that_it_replaces(gateway: FakeGateway) -> None:
    gateway.answers[ROLE] = (200, {"worker_id": "prefill-1", "role": "decode"})
    shown = opened(gateway)
    assert button(shown, "Change role").disabled
    shown = next(one for one in shown.button_group if one.key == "role-prefill-1").set_value("decode").run()
    button(shown, "Change role").click().run()
    assert [one.value for one in shown.toast] == ["prefill-1 serves decode now."]
    assert gateway.edits() == [("POST", ROLE)]
    assert gateway.bodies[-1] == {"by": "console", "role": "decode", "epoch": 3, "force": False}


def test_a_refusal_is_said_and_may_be_forced(gateway: FakeGateway) -> None:
    gateway.answers[DRAIN] = (409, {"error": {"message": "the last worker that can prefill"}})
    shown = opened(gateway)
    assert "Drain" not in [one.label for one in shown.button]  # it asks first
    shown = button(shown, "Drain it").click().run()
    assert any("the last worker that can prefill" in one.value for one in shown.error)
    shown = shown.checkbox(key="force-change").check().run()
    button(shown, "Drain it").click().run()
    assert gateway.bodies[-1] == {"by": "console", "force": True}


def test_what_was_asked_of_a_worker_that_has_left_is_not_done_to_the_next(gateway: FakeGateway) -> None:
    shown = opened(gateway)
    left = [
        worker | ({"left_s_ago": 1.0} if worker["worker_id"] == "prefill-1" else {}) for worker in CLUSTER["workers"]
    ]
    gateway.answers["/halfmoon/v1/cluster"] = (200, CLUSTER | {"workers": left})
    shown = button(shown, "Drain it").click().run()
    assert shown.selectbox(key="worker-to-change").value != "prefill-1"
    assert gateway.edits() == []
