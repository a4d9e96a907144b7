"""The control API's tenants and keys: for operators only, in force at once, and never showing a key again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from halfmoon.rpc.credentials.api_keys import key_digest, key_id
from tests.services.gateway.fakes import MODEL, Fleet, running_fleet
from tests.services.gateway.test_access import ask
from tests.services.gateway.test_tenants import everything_in, status_of

TOKEN = "operator"
PATH = "/halfmoon/v1/tenants"


async def control(fleet: Fleet, method: str, path: str = "", token: str = TOKEN, **options: Any) -> tuple[int, Any]:
    headers = {"Authorization": f"Bearer {token}"}
    status, _, body = await ask(fleet, method, PATH + path, headers=headers, **options)
    return status, body


async def test_a_key_is_made_used_listed_and_revoked(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, operator_token=TOKEN) as fleet:
        await fleet.pair()
        assert (await control(fleet, "GET"))[1] == {"tenants": [], "is_key_needed": False}
        status, made = await control(fleet, "POST", "/acme/keys", json={"label": "cron", "expires_days": 2})
        key = made["key"]
        assert (status, made["label"], made["key_id"]) == (201, "cron", key_id(key_digest(key)))
        assert [await status_of(fleet, sent) for sent in (key, "other")] == [200, 401]
        limits = {"requests_per_minute": 100, "kv_bytes": 1 << 20, "classes": ["default"], "weight": 2}
        status, put = await control(fleet, "PUT", "/acme", json=limits)
        assert (status, put["version"], put["kv_bytes"], put["weight"]) == (200, 1, 1 << 20, 2)
        body = {"model": MODEL, "prompt": "hi", "max_tokens": 1}
        for sent in (key, key, "other"):
            await ask(fleet, "POST", "/v1/completions", json=body, headers={"Authorization": f"Bearer {sent}"})
        _, shown = await control(fleet, "GET")
        (acme,) = shown["tenants"]
        assert (acme["name"], acme["version"], acme["requests_per_minute"], acme["classes"]) == (
            "acme", 1, 100, ["default"]
        )  # fmt: skip
        assert [one["key_id"] for one in acme["keys"]] == [made["key_id"]]
        status, refused = await control(fleet, "DELETE", f"/other/keys/{made['key_id']}")
        assert (status, "of tenant other" in refused["error"]["message"]) == (404, True)
        assert await status_of(fleet, key) == 200
        assert (await control(fleet, "DELETE", f"/acme/keys/{made['key_id']}"))[0] == 204
        assert await status_of(fleet, key) == 401
        assert (await control(fleet, "DELETE", "/acme?version=7"))[0] == 409
        assert (await control(fleet, "DELETE", "/acme?version=1"))[0] == 204
        assert key not in json.dumps(shown)
        assert key_digest(key) not in json.dumps(shown)
    assert key not in everything_in(tmp_path)


async def test_usage_is_that_of_all_requests_since_yesterday(tmp_path: Path) -> None:
    tenants = {"acme": {"keys": ["k"], "requests_per_minute": 2}}
    async with running_fleet(tmp_path, operator_token=TOKEN, tenants=tenants) as fleet:
        await fleet.pair()
        body = {"model": MODEL, "prompt": "hello", "max_tokens": 3, "ignore_eos": True}
        for _ in range(3):
            await ask(fleet, "POST", "/v1/completions", json=body, headers={"Authorization": "Bearer k"})
        while (usage := (await control(fleet, "GET"))[1]["tenants"][0]["usage"]) is None or usage["num_requests"] < 3:
            pass
    assert usage == {
        "num_requests": 3, "num_refused": 1, "prompt_tokens": 10, "cached_tokens": 0, "output_tokens": 6
    }  # fmt: skip


async def test_only_operators_may(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, operator_token=TOKEN, api_key=("k",)) as fleet:
        for token in ("k", "", "x"):
            assert (await control(fleet, "GET", token=token))[0] == 401
            assert (await control(fleet, "POST", "/evil/keys", token=token, json={}))[0] == 401
    async with running_fleet(tmp_path / "open") as fleet:  # loopback, no token: the rest of the control API is open
        status, body = await control(fleet, "POST", "/evil/keys", json={})
        assert status == 401
        assert "no operator token" in body["error"]["message"]
        assert (await ask(fleet, "GET", "/halfmoon/v1/classes"))[0] == 200


async def test_what_the_configuration_declares_is_shown_and_not_edited(tmp_path: Path) -> None:
    tenants = {"acme": {"keys": ["k"], "tokens_per_minute": 5}}
    async with running_fleet(tmp_path, operator_token=TOKEN, tenants=tenants) as fleet:
        ((acme,), is_needed) = (await control(fleet, "GET"))[1].values()
        assert (acme["is_declared"], acme["tokens_per_minute"], is_needed) == (True, 5, True)
        assert [(one["key_id"], one["is_declared"]) for one in acme["keys"]] == [(key_id(key_digest("k")), True)]
        status, body = await control(fleet, "PUT", "/acme", json={})
        assert (status, "change it there" in body["error"]["message"]) == (400, True)
        status, made = await control(fleet, "POST", "/acme/keys", json={})  # the next key of a declared tenant
        assert status == 201
        assert await status_of(fleet, made["key"]) == 200


async def test_wrong_bodies_and_names_are_refused(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, operator_token=TOKEN) as fleet:
        limits: tuple[tuple[str, dict[str, Any]], ...] = (
            ("/acme", {"weight": 0}),
            ("/acme", {"classes": []}),
            ("/acme", {"classes": ["a"], "default_class": "b"}),
            ("/acme", {"secret": 1}),
            ("/acme", {"classes": ["gold"]}),
            ("/acme", {"default_class": "gold"}),
            ("/a%20b", {}),
        )
        for path, wrong in limits:
            assert (await control(fleet, "PUT", path, json=wrong))[0] == 400
        _, refused = await control(fleet, "PUT", "/acme", json={"classes": ["a"], "default_class": "b"})
        assert refused["error"]["message"] == "default_class 'b' must be one of classes"
        assert (await control(fleet, "PUT", "/acme", json={"version": 4}))[0] == 409
        for body in (
            {"expires_days": 0},
            {"label": "x" * 200},
            {"label": "a\0"},
            {"label": "\x1b[2J"},
            {"key": "mine"},
        ):
            assert (await control(fleet, "POST", "/acme/keys", json=body))[0] == 400
        for path in ("/acme/keys/none", "/acme/keys/%25"):
            assert (await control(fleet, "DELETE", path))[0] == 404
