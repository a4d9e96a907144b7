"""Who may use the control API: tenants may not, wherever their keys come from."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from halfmoon.cli.profile_store import ledger_at
from halfmoon.errors import InvalidRequest
from halfmoon.ledger.edits.stored_tenants import StoredKey
from halfmoon.ledger.ledger import open_ledger
from halfmoon.rpc.credentials.api_keys import key_digest
from halfmoon.rpc.credentials.operator_token import client_token, made_token
from tests.services.gateway.fakes import Fleet, running_fleet
from tests.services.gateway.test_access import ask

CLASS = "/halfmoon/v1/classes/gold"


async def statuses(fleet: Fleet, token: str | None) -> tuple[int, int]:
    """Of reading and of editing the classes."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    got = (await ask(fleet, "GET", "/halfmoon/v1/classes", headers=headers))[0]
    return got, (await ask(fleet, "PUT", CLASS, headers=headers, json={}))[0]


@pytest.mark.parametrize("source", ["environment", "file", "tenants", "ledger"])
async def test_no_tenants_key_opens_the_control_api_on_loopback(tmp_path: Path, source: str) -> None:
    settings: dict[str, Any] = {}
    match source:
        case "environment":
            settings = {"api_key": ("k",)}
        case "file":
            (tmp_path / "keys").write_text("acme k\n")
            settings = {"api_keys_file": tmp_path / "keys"}
        case "tenants":
            settings = {"tenants": {"acme": {"keys": ["k"]}}}
        case "ledger":
            async with open_ledger(ledger_at(tmp_path, None)) as ledger:
                await ledger.tenants.add_key(StoredKey(key_digest("k"), "acme", "", datetime.now(UTC), None))
    async with running_fleet(tmp_path, **settings) as fleet:
        assert await statuses(fleet, "k") == (401, 401)
        _, _, body = await ask(fleet, "GET", "/halfmoon/v1/cluster", headers={"Authorization": "Bearer k"})
        assert "HALFMOON_GATEWAY_OPERATOR_TOKEN" in body["error"]["message"]
        assert (await ask(fleet, "GET", "/v1/models", headers={"Authorization": "Bearer k"}))[0] == 200


async def test_the_token_of_the_state_directory_opens_it(tmp_path: Path) -> None:
    token = made_token(tmp_path)
    async with running_fleet(tmp_path, api_key=("k",)) as fleet:
        assert [await statuses(fleet, sent) for sent in ("k", None, token)] == [(401, 401), (401, 401), (200, 200)]


async def test_without_keys_loopback_is_open_until_there_is_one(tmp_path: Path) -> None:
    token = made_token(tmp_path)
    headers = {"Authorization": f"Bearer {token}"}
    async with running_fleet(tmp_path) as fleet:
        assert await statuses(fleet, None) == (200, 200)
        assert (await ask(fleet, "POST", "/halfmoon/v1/tenants/acme/keys", json={}))[0] == 401
        status, _, made = await ask(fleet, "POST", "/halfmoon/v1/tenants/acme/keys", json={}, headers=headers)
        assert status == 201
        for sent in (made["key"], None):
            assert await statuses(fleet, sent) == (401, 401)
        assert (await ask(fleet, "GET", "/halfmoon/v1/classes", headers=headers))[0] == 200


def test_commands_find_the_token_and_send_it_to_this_machine_only(tmp_path: Path) -> None:
    assert client_token(None, "http://127.0.0.1:8000", tmp_path) is None
    assert client_token(None, "http://127.0.0.1:8000", tmp_path / (300 * "x")) is None
    token = made_token(tmp_path)
    for url in ("http://127.0.0.1:8000", "http://localhost:1", "https://[::1]:2/"):
        assert client_token(None, url, tmp_path) == token
        assert client_token("given", url, tmp_path) == "given"
    for url in ("http://10.0.0.1:8000", "http://evil.example", "http://127.0.0.1.evil.example"):
        assert client_token(None, url, tmp_path) is None
    (tmp_path / "operator_token").write_text("")
    with pytest.raises(InvalidRequest, match="is empty"):
        client_token(None, "http://127.0.0.1:8000", tmp_path)
