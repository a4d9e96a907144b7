"""Adapters as models of the API: which requests they serve, under which salt, and on which workers."""

from __future__ import annotations

import dataclasses
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from halfmoon.errors import Incompatible
from halfmoon.kv.keys import adapter_of, adapter_salt
from tests.services.gateway import fakes
from tests.services.gateway.fakes import MODEL, Fleet, running_fleet, served_model
from tests.services.gateway.test_access import ask

SQL, FR = "a1" * 16, "b2" * 16


@pytest.fixture(autouse=True)
def _adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dataclasses.replace(served_model(), adapters={"sql": SQL, "fr": FR})
    monkeypatch.setattr(fakes, "served_model", lambda aliases: model)


async def complete(fleet: Fleet, model: str | None, **more: Any) -> str:
    body = {"prompt": "hi", "max_tokens": 1, **({} if model is None else {"model": model}), **more}
    _, _, answer = await ask(fleet, "POST", "/v1/completions", json=body)
    return str(answer["model"])


async def test_each_name_is_a_model_with_kv_of_its_own(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        worker = await fleet.add("w", "both", adapter_fingerprints=[SQL, FR])
        cards = (await ask(fleet, "GET", "/v1/models"))[2]["data"]
        assert [(card["id"], card["parent"]) for card in cards] == [(MODEL, None), ("sql", MODEL), ("fr", MODEL)]
        assert (await ask(fleet, "GET", "/v1/models/sql"))[0] == 200
        assert [await complete(fleet, name) for name in (MODEL, None, "sql", "fr")] == [MODEL, MODEL, "sql", "fr"]
        forged = adapter_salt(SQL, b"").decode("latin-1")
        await complete(fleet, MODEL, cache_salt=forged)
        await complete(fleet, "sql", cache_salt="own")
        status, _, answer = await ask(fleet, "POST", "/v1/completions", json={"model": "no", "prompt": "hi"})
        assert (status, "'sql', 'fr'" in answer["error"]["message"]) == (404, True)
        salts = [call.generation.tenant_salt for call in worker.calls.prefills]
    assert salts == [
        b"",
        b"",
        adapter_salt(SQL, b""),
        adapter_salt(FR, b""),
        forged.encode(),
        adapter_salt(SQL, b"own"),
    ]
    assert [adapter_of(salt) for salt in salts] == ["", "", SQL, FR, "", SQL]
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        rows = connection.execute("select model from requests where status = 'ok' order by id").fetchall()
    assert [model for (model,) in rows] == [MODEL, MODEL, "sql", "fr", MODEL, "sql"]


async def test_a_worker_without_an_adapter_is_refused_by_its_name(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        worker = fakes.FakeWorker("w", "both", fakes.Script(), fleet)
        worker.address = "127.0.0.1:1"
        worker.changes = {"adapter_fingerprints": [SQL, "c3" * 16]}
        with pytest.raises(Incompatible, match="lacks the adapter 'fr'"):
            await worker.register(fleet.gateway.address)
