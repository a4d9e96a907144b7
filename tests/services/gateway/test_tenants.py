"""Keys and tenants of a running gateway: declared, in the ledger, revoked, expired, unknown."""

from __future__ import annotations

import json
import random
import sqlite3
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from halfmoon.errors import InvalidRequest, NoCapacity, Unavailable
from halfmoon.ledger.edits.stored_tenants import StoredKey
from halfmoon.ledger.ledger import open_ledger
from halfmoon.policy.admission.admission_controller import AdmissionController
from halfmoon.policy.admission.fair_shares import FairShares
from halfmoon.policy.admission.tenants import Tenant, kv_salt
from halfmoon.policy.placement.place import PlacementRules
from halfmoon.rpc.credentials.api_keys import key_digest, key_id, rule_value
from services.gateway.control.active_classes import ActiveClasses, declarations_of
from services.gateway.control.active_tenants import ActiveTenants, declared_tenants
from services.gateway.control.known_rows import KnownRows
from services.gateway.http.api_keys import ApiKeys
from services.gateway.settings import GatewaySettings
from tests.services.gateway.fakes import MODEL, Fleet, Script, running_fleet
from tests.services.gateway.test_access import ask

NOW = datetime.now(UTC)


def of(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def everything_in(directory: Path) -> str:
    return " ".join(file.read_bytes().decode(errors="replace") for file in directory.iterdir())


async def status_of(fleet: Fleet, key: str) -> int:
    return int((await ask(fleet, "GET", "/v1/models", headers=of(key)))[0])


async def complete(fleet: Fleet, key: str, **more: Any) -> int:
    body = {"model": MODEL, "prompt": "hi", "max_tokens": 1, **more}
    return int((await ask(fleet, "POST", "/v1/completions", json=body, headers=of(key)))[0])


async def test_keys_of_the_ledger_come_and_go_while_the_gateway_runs(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, ledger_poll_s=0.01) as fleet:
        assert await status_of(fleet, "anything") == 200  # no keys, no tenants
        async with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
            await ledger.tenants.add_key(StoredKey(key_digest("old"), "acme", "", NOW, NOW - timedelta(hours=1)))
            await ledger.tenants.add_key(StoredKey(key_digest("one"), "acme", "", NOW))
            while await status_of(fleet, "anything") == 200:
                pass
            while await status_of(fleet, "one") != 200:
                pass
            status, _, body = await ask(fleet, "GET", "/v1/models", headers=of("old"))
            assert (status, "has expired" in body["error"]["message"]) == (401, True)
            await ledger.tenants.revoke(key_id(key_digest("one")), NOW)
            while await status_of(fleet, "one") == 200:
                pass
        assert await status_of(fleet, "anything") == 401  # the last key is gone, and one is still needed


async def test_several_keys_of_one_tenant_and_rows_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"acme sha256:{key_digest('two')}\nloner\n")
    tenants = {"acme": {"keys": ["one"], "kv_bytes": "1MiB"}}
    async with running_fleet(tmp_path, tenants=tenants, api_keys_file=file) as fleet:
        prefill, _ = await fleet.pair()
        assert [await complete(fleet, key) for key in ("one", "two", "loner")] == [200, 200, 200]
        asked = [call.generation for call in prefill.calls.prefills]
    loner = f"key-{key_id(key_digest('loner'))}"
    assert [one.tenant_salt for one in asked] == [kv_salt(Tenant(name), None) for name in ("acme", "acme", loner)]
    assert [one.tenant for one in asked] == ["acme", "acme", loner]
    assert [one.tenant_kv_quota_bytes for one in asked] == [1 << 20, 1 << 20, 0]
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        rows = connection.execute("select tenant from requests order by id").fetchall()
    connection.close()
    assert [name for (name,) in rows] == ["acme", "acme", loner]


async def test_a_rule_for_a_key_matches_and_is_kept_without_it(tmp_path: Path) -> None:
    rule = {"kind": "api_key", "value": "hm-very-secret"}
    tenant_rule = {"kind": "tenant", "value": "acme"}
    settings: dict[str, Any] = {
        "api_key": ("hm-very-secret",),
        "tenants": {"acme": {"keys": ["other"]}},
        "classes": {"gold": {"rules": [rule]}, "silver": {"rules": [tenant_rule]}},
        "slo": "off",
        "operator_token": "operator",
    }
    async with running_fleet(tmp_path, **settings) as fleet:
        await fleet.pair()
        assert [await complete(fleet, key) for key in ("hm-very-secret", "other")] == [200, 200]
        edited = {"rules": [rule], "priority": 2, "version": 1}
        put = await ask(fleet, "PUT", "/halfmoon/v1/classes/gold", json=edited, headers=of("operator"))
        assert (put[0], put[2]["rules"][0]["value"]) == (200, rule_value("hm-very-secret"))
        again = {**edited, "rules": put[2]["rules"], "version": 2}  # what was read can be written
        put = await ask(fleet, "PUT", "/halfmoon/v1/classes/gold", json=again, headers=of("operator"))
        assert put[2]["rules"][0]["value"] == rule_value("hm-very-secret")
        for path in ("classes", "class_edits"):
            _, _, shown = await ask(fleet, "GET", f"/halfmoon/v1/{path}", headers=of("operator"))
            assert "very-secret" not in json.dumps(shown)
        assert await complete(fleet, "hm-very-secret") == 200
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        rows = connection.execute("select qos_class from requests order by id").fetchall()
    connection.close()
    assert [name for (name,) in rows] == ["gold", "silver", "gold"]
    assert "very-secret" not in everything_in(tmp_path)


class AwayTenants:
    """A ledger that does not answer."""

    async def revision(self) -> int:
        raise Unavailable("away")


@pytest.mark.parametrize(
    ("host", "seen", "settings", "is_known", "is_needed"),
    [
        ("127.0.0.1", False, {}, True, False),
        ("0.0.0.0", False, {}, False, False),  # the ledger may hold keys: refuse
        ("0.0.0.0", True, {}, True, True),
        ("0.0.0.0", False, {"api_key": ("k",)}, True, True),
    ],
)
async def test_a_start_without_the_ledger_opens_nothing(
    tmp_path: Path, host: str, seen: bool, settings: dict[str, Any], is_known: bool, is_needed: bool
) -> None:
    known, keys = KnownRows(tmp_path, "tenants", "postgresql://"), ApiKeys()
    if seen:
        known.write([[key_digest("one"), "acme", "", NOW.isoformat(), None, None], ["acme", 1, {"weight": 2}]])
    chosen = GatewaySettings(state_dir=tmp_path, **settings)
    active = ActiveTenants(AwayTenants(), keys, FairShares(), known, declared_tenants(chosen))  # type: ignore[arg-type]
    active.use_known(host)
    table = keys.table
    assert (table.is_known, table.is_needed) == (is_known, is_needed)
    if seen:
        assert table.keys[key_digest("one")].tenant == "acme"
        assert table.tenant("acme").weight == 2


@pytest.mark.parametrize(
    "row", [["acme"], ["acme", 1, 5], [1, 2, 3, 4, 5, 6], ["d", "acme", "", "never", None, None], 7]
)
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_start_with_a_damaged_file_is_refused_and_not_open(tmp_path: Path, row: Any, host: str) -> None:
    known, keys = KnownRows(tmp_path, "tenants", "postgresql://"), ApiKeys()
    known.write([])
    (file,) = tmp_path.iterdir()
    file.write_text(json.dumps([["acme", 1, {}], row]))
    declared = declared_tenants(GatewaySettings(state_dir=tmp_path))
    active = ActiveTenants(AwayTenants(), keys, FairShares(), known, declared)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="row 2"):
        active.use_known(host)


async def test_a_row_of_the_ledger_that_cannot_be_read_costs_its_own_tenant_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ApiKeys()
    async with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        tenants = ledger.tenants
        for name, weight in (("acme", 2), ("newer", 3)):
            await tenants.add_key(StoredKey(key_digest(name), name, "", NOW))
            await tenants.put(name, {"weight": weight}, 0)
        declared = declared_tenants(GatewaySettings(state_dir=tmp_path))
        active = ActiveTenants(tenants, keys, FairShares(), KnownRows(tmp_path, "tenants", "x"), declared)
        await active.refresh()
        await tenants.put("newer", {"of a later release": 1}, 1)
        await tenants.put("acme", {"weight": 5}, 1)
        await active.refresh()
        assert (keys.table.tenant("acme").weight, keys.table.tenant("newer").weight) == (5, 3), "what was in force"
        fresh = ActiveTenants(tenants, ApiKeys(), FairShares(), KnownRows(tmp_path, "tenants", "x"), declared)
        await fresh.refresh()
        assert set(fresh.table.keys) == {key_digest("acme")}, "limits that are not known cannot be kept"
        assert fresh.table.is_needed
    assert [record.message for record in caplog.records].count("tenant.unread") == 2, "one for each gateway"


def test_classes_that_there_are_not_are_told_at_the_start(tmp_path: Path) -> None:
    tenants = {"acme": {"keys": ["k"], "classes": ["gold", "default"]}}
    with pytest.raises(InvalidRequest, match="tenant acme names the class 'gold'"):
        declared_tenants(GatewaySettings(state_dir=tmp_path, tenants=tenants))
    declared_tenants(GatewaySettings(state_dir=tmp_path, tenants=tenants, classes={"gold": {}}))


async def test_what_the_ledger_said_stays_in_force_when_it_falls_silent_during_the_start(tmp_path: Path) -> None:
    known, keys = KnownRows(tmp_path / "a file, so no directory", "tenants", "postgresql://"), ApiKeys()
    (tmp_path / "a file, so no directory").touch()
    async with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        declared = declared_tenants(GatewaySettings(state_dir=tmp_path))
        active = ActiveTenants(ledger.tenants, keys, FairShares(), known, declared)
        await active.refresh()
        active.use_known("0.0.0.0")
        assert keys.table.is_known
        admission = AdmissionController("off", PlacementRules(), random.Random(0))
        written = declarations_of(GatewaySettings(state_dir=tmp_path))
        classes = ActiveClasses(ledger.classes, admission, known, written)
        await classes.refresh()
        classes.use_known()
        assert [qos.name for qos in admission.classes.classes] == list(written)


async def test_what_is_not_known_yet_is_refused(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, ledger_poll_s=1000.0) as fleet:
        keys = fleet.gateway.keys
        keys.table = type(keys.table)(is_known=False)
        status, headers, body = await ask(fleet, "GET", "/v1/models")
        assert (status, headers["Retry-After"]) == (503, "1")
        assert "until the ledger answers" in body["error"]["message"]
        assert (await ask(fleet, "GET", "/metrics"))[0] == 200


@pytest.mark.parametrize("name", ["", "a b", "-a", "a/b", "x" * 65, "ä"])
def test_names_that_urls_cannot_hold(tmp_path: Path, name: str) -> None:
    settings = GatewaySettings(state_dir=tmp_path, tenants={name: {"keys": ["k"]}})
    with pytest.raises(InvalidRequest, match="tenant's name"):
        declared_tenants(settings)


@pytest.mark.parametrize("may_come_again", [True, False])
async def test_a_request_that_gives_way_to_other_tenants_is_not_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, may_come_again: bool
) -> None:
    monkeypatch.setattr(FairShares, "note_full", lambda *_: may_come_again)
    async with running_fleet(tmp_path) as fleet:
        worker = await fleet.add("b0", "both", Script("ok"))
        worker.refuse = [NoCapacity("full", retry_after_ms=1)]
        assert await complete(fleet, "anyone") == (200 if may_come_again else 429)
