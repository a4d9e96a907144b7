"""The tenants page: usage, limits over a version, keys shown once, and what a stranger sees."""

from __future__ import annotations

from typing import Any

import pytest

testing = pytest.importorskip("streamlit.testing.v1")

from console.forms.tenant_form import key_line  # noqa: E402
from console.gateway_api import GatewayApi  # noqa: E402
from console.views.tenants_page import NEW, tenant_row  # noqa: E402
from tests.console.fake_gateway import TENANT, FakeGateway  # noqa: E402
from tests.console.test_console import open_page  # noqa: E402


def button(shown: Any, label: str) -> Any:
    return next(one for one in shown.button if one.label == label and not one.disabled)


def test_a_row_has_limits_and_usage() -> None:
    row = tenant_row(TENANT)
    assert (row["keys"], row["requests"], row["refused"], row["stored KV"]) == (1, 12, 2, "1.0 MiB")
    assert (row["classes"], row["KV quota"], row["from"]) == ("gold, default", "1.0 GiB", "ledger")
    assert tenant_row(TENANT | {"usage": None, "classes": None, "kv_bytes": None})["classes"] == "all"


def test_limits_are_saved_over_their_version(gateway: FakeGateway) -> None:
    shown = open_page("tenants", gateway.url)
    next(one for one in shown.number_input if one.label == "Tokens a minute").set_value(5_000.0)
    button(shown.run(), "Save limits").click().run()
    assert gateway.edits() == [("PUT", "/halfmoon/v1/tenants/acme")]
    assert gateway.bodies[-1] == {
        "version": 2, "requests_per_minute": 60.0, "tokens_per_minute": 5_000.0, "kv_bytes": 1 << 30,
        "classes": ["gold", "default"], "default_class": None, "weight": 2.0, "cache_pool": None,
    }  # fmt: skip


def tokens(shown: Any) -> Any:
    return next(one for one in shown.number_input if one.label == "Tokens a minute")


def test_limits_saved_elsewhere_meanwhile_are_told_of_and_not_saved_over(gateway: FakeGateway) -> None:
    shown = open_page("tenants", gateway.url)
    tokens(shown).set_value(5_000.0)
    newer = TENANT | {"version": 3, "tokens_per_minute": 70.0}
    gateway.answers["/halfmoon/v1/tenants"] = (200, {"tenants": [newer], "is_key_needed": True})
    gateway.answers["/halfmoon/v1/tenants/acme"] = (409, {"error": {"message": "has version 3 by now"}})
    button(shown, "Save limits").click().run()
    assert gateway.bodies[-1]["version"] == 2  # which the gateway refuses
    assert "Version 3 was saved elsewhere" in shown.warning[0].value
    assert any("has version 3 by now" in one.value for one in shown.error)
    assert tokens(shown).value == 5_000.0
    button(shown, "Load the new version").click().run()
    assert tokens(shown).value == 70.0
    assert not shown.warning


def test_limits_in_which_nothing_was_typed_follow(gateway: FakeGateway) -> None:
    shown = open_page("tenants", gateway.url)
    newer = TENANT | {"version": 3, "tokens_per_minute": 70.0}
    gateway.answers["/halfmoon/v1/tenants"] = (200, {"tenants": [newer], "is_key_needed": True})
    assert tokens(shown.run()).value == 70.0
    assert not shown.warning


def test_a_new_tenant_is_chosen_once_it_is_saved(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(api: GatewayApi, name: str, body: object) -> None:
        tenants = [TENANT, TENANT | {"name": name, "version": 1, "keys": []}]
        gateway.answers["/halfmoon/v1/tenants"] = (200, {"tenants": tenants, "is_key_needed": True})

    monkeypatch.setattr(GatewayApi, "put_tenant", save)
    shown = open_page("tenants", gateway.url)
    shown.selectbox(key="tenant").set_value(NEW).run()
    next(one for one in shown.text_input if one.label == "Name").set_value("beta").run()
    button(shown, "Save limits").click().run()
    assert shown.selectbox(key="tenant").value == "beta"
    assert not button(shown, "Make a key").disabled


def test_a_new_key_is_shown_until_it_is_put_away(gateway: FakeGateway) -> None:
    shown = button(open_page("tenants", gateway.url), "Make a key").click().run()
    assert gateway.bodies[-1] == {"label": "", "expires_days": None}
    assert [one.value for one in shown.code] == ["hm-new"]
    shown = button(shown, "I have it").click().run()
    assert not shown.code


def test_a_key_is_revoked(gateway: FakeGateway) -> None:
    button(open_page("tenants", gateway.url), "Revoke").click().run()
    assert gateway.edits() == [("DELETE", "/halfmoon/v1/tenants/acme/keys/36047ea5510dfcd1")]


def test_without_tenants_and_for_a_new_one(gateway: FakeGateway) -> None:
    gateway.answers["/halfmoon/v1/tenants"] = (200, {"tenants": [], "is_key_needed": False})
    shown = open_page("tenants", gateway.url)
    assert any("No tenant yet" in one.value for one in shown.markdown)
    assert next(one for one in shown.selectbox if one.label == "Tenant").value == NEW
    assert next(one for one in shown.button if one.label == "Save limits").disabled


def test_what_the_configuration_declares_is_not_edited(gateway: FakeGateway) -> None:
    declared = TENANT | {"is_declared": True, "keys": [TENANT["keys"][0] | {"is_declared": True}]}
    gateway.answers["/halfmoon/v1/tenants"] = (200, {"tenants": [declared], "is_key_needed": True})
    shown = open_page("tenants", gateway.url)
    assert any("configuration file" in one.value for one in shown.caption)
    assert next(one for one in shown.button if one.label == "Revoke").disabled
    assert "of the configuration" in key_line(declared["keys"][0])


def test_strangers_read_why_they_see_nothing(gateway: FakeGateway) -> None:
    refusal = {"error": {"message": "tenants and keys are for operators only"}}
    gateway.answers["/halfmoon/v1/tenants"] = (401, refusal)
    assert any("for operators only" in one.value for one in open_page("tenants", gateway.url).error)
