"""The SLO page's admission mode, and the targets that feedback has tightened."""

from __future__ import annotations

from typing import Any

import pytest

testing = pytest.importorskip("streamlit.testing.v1")

from console.plain_text import plain  # noqa: E402
from console.views.slo_page import class_row, tightened  # noqa: E402
from tests.console.fake_gateway import ADMISSION, GOLD, FakeGateway  # noqa: E402
from tests.console.test_console import open_page  # noqa: E402

TIGHT = GOLD | {"applied_ttft_s": 0.45, "applied_tbt_s": None, "measured_ttft_s": 0.6, "measured_tbt_s": None}


def save(shown: Any) -> Any:
    return next(one for one in shown.button if one.label == "Save mode")


def modes(shown: Any) -> Any:
    return next(one for one in shown.button_group if one.key.startswith("admission"))


def test_another_mode_is_saved_over_its_version(gateway: FakeGateway) -> None:
    shown = open_page("slo", gateway.url)
    assert save(shown).disabled
    shown = modes(shown).set_value("off").run()
    save(shown).click().run()
    assert gateway.edits() == [("PUT", "/halfmoon/v1/admission")]
    assert gateway.bodies[-1] == {"mode": "off", "version": 2}


def test_a_mode_set_elsewhere_meanwhile_is_told_of(gateway: FakeGateway) -> None:
    shown = modes(open_page("slo", gateway.url)).set_value("off").run()
    gateway.answers["/halfmoon/v1/admission"] = (200, ADMISSION | {"set": "predicted", "version": 3})
    save(shown).click().run()
    assert gateway.edits() == []
    told = ["Admission was set elsewhere meanwhile: it is predicted since version 3."]
    assert [one.value for one in shown.warning] == told
    assert not shown.run().warning


def test_an_earlier_mode_is_put_back(gateway: FakeGateway) -> None:
    shown = open_page("slo", gateway.url)
    back = [one for one in shown.button if one.label == "Restore"]
    assert [one.disabled for one in back] == [True, False]
    back[1].click().run()
    assert gateway.bodies[-1] == {"mode": None, "version": 2}


def test_what_the_gateway_refuses_is_said(gateway: FakeGateway) -> None:
    shown = modes(open_page("slo", gateway.url)).set_value("own").run()
    gateway.answers["/halfmoon/v1/admission"] = (409, {"error": {"message": "another version by now"}})
    assert any("another version by now" in one.value for one in save(shown).click().run().error)


def test_nobody_has_set_it(gateway: FakeGateway) -> None:
    gateway.answers["/halfmoon/v1/admission"] = (200, ADMISSION | {"set": None, "version": 0, "edits": []})
    shown = open_page("slo", gateway.url)
    assert any("Not set yet" in one.value for one in shown.caption)


def test_tightened_targets_are_beside_the_classs_own(gateway: FakeGateway) -> None:
    gateway.answers["/halfmoon/v1/classes"] = (200, {"classes": [TIGHT]})
    shown = open_page("slo", gateway.url)
    assert shown.dataframe[0].value["TTFT now"][0] == pytest.approx(450.0)
    assert any(plain(tightened([TIGHT])[0]) in one.value for one in shown.caption)
    assert tightened([TIGHT]) == [
        "gold: admission applies a TTFT of 450 ms instead of 500 ms: 90.0 % of requests took up to 600 ms."
    ]
    assert tightened([GOLD, TIGHT | {"applied_ttft_s": 0.5}]) == []
    assert class_row(GOLD, None)["TTFT now"] is None
