"""Tenants and keys in the ledger, and what an upgrade makes of keys that earlier releases wrote in clear."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from sqlalchemy import text

from halfmoon.errors import InvalidRequest, NotFound
from halfmoon.ledger.connection.database import make_engine
from halfmoon.ledger.edits.stored_classes import VersionConflict
from halfmoon.ledger.edits.stored_tenants import StoredKey
from halfmoon.ledger.ledger import open_ledger
from halfmoon.rpc.credentials.api_keys import key_digest, rule_value
from tests.ledger.connection.test_upgrade import upgraded_to

NOW = datetime(2026, 1, 2, tzinfo=UTC)
LATER = datetime(2026, 1, 3, tzinfo=UTC)
KEY = StoredKey(key_digest("secret"), "acme", "laptop", NOW, LATER)


async def test_tenants_and_keys_are_kept(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as ledger:
        tenants = ledger.tenants
        before = await tenants.revision()
        await tenants.put("acme", {"weight": 2}, 0)
        await tenants.add_key(KEY)
        read = await tenants.all()
        assert (read.revision, await tenants.revision()) == (before + 2, before + 2)
        assert [tuple(one) for one in read.tenants] == [("acme", 1, {"weight": 2})]
        assert list(read.keys) == [KEY]
        with pytest.raises(InvalidRequest, match="exists already"):
            await tenants.add_key(KEY)
        for wrong in (0, 2):
            with pytest.raises(VersionConflict, match="has version 1"):
                await tenants.put("acme", {}, wrong)
        await tenants.put("acme", {"weight": 3}, 1)
        assert (await tenants.all()).tenants[0].version == 2


async def test_a_revoked_key_stays_revoked_and_known(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as ledger:
        tenants = ledger.tenants
        await tenants.add_key(KEY)
        assert (await tenants.revoke(KEY.digest[:16], LATER)).revoked_at == LATER
        await tenants.revoke(KEY.digest[:16], NOW)
        assert (await tenants.all()).keys == [KEY._replace(revoked_at=LATER)]
        for unknown in ("", "%", "0" * 16):
            with pytest.raises(NotFound, match="halfmoon keys list"):
                await tenants.revoke(unknown, NOW)


async def test_a_removed_tenant_loses_its_keys(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as ledger:
        tenants = ledger.tenants
        await tenants.put("acme", {}, 0)
        await tenants.add_key(KEY)
        with pytest.raises(VersionConflict):
            await tenants.remove("acme", 3, LATER)
        await tenants.remove("acme", 1, LATER)
        read = await tenants.all()
    assert (list(read.tenants), [key.revoked_at for key in read.keys]) == ([], [LATER])


async def test_keys_in_clear_are_hashed_by_the_upgrade(ledger_url: str) -> None:
    rules = '{{"priority": 1, "rules": [{{"kind": "api_key", "value": "hm-{}"}}, {{"kind": "model", "value": "m"}}]}}'
    engine = make_engine(ledger_url)
    statements = (
        f"INSERT INTO qos_classes (name, version, definition) VALUES ('gold', 3, '{rules.format('present')}')",
        "INSERT INTO class_edits (revision, edited_at, name, version, definition, before) VALUES (3, "
        f"'2026-01-01 00:00:00', 'gold', 3, '{rules.format('present')}', '{rules.format('before')}')",
        f"INSERT INTO declared_classes (name, definition) VALUES ('gold', '{rules.format('present')}')",
        "INSERT INTO declared_classes (name, definition) VALUES ('gone', NULL)",
    )
    async with engine.begin() as connection:
        await connection.run_sync(upgraded_to, "0007")
        for statement in statements:
            await connection.execute(text(statement.replace(":", r"\:")))
    await engine.dispose()
    async with open_ledger(ledger_url) as ledger:
        (gold,) = (await ledger.classes.all()).classes
        (edit,) = await ledger.classes.edits(9)
    hashed = {"kind": "api_key", "value": rule_value("hm-present")}
    rest = {"priority": 1, "max_pause_s": 0.0, "kv_policy": None}
    assert gold.definition == edit.definition == {**rest, "rules": [hashed, {"kind": "model", "value": "m"}]}
    assert edit.before is not None
    assert edit.before["rules"][0]["value"] == rule_value("hm-before")
    engine = make_engine(ledger_url)
    async with engine.begin() as connection:
        for table in ("qos_classes", "class_edits", "declared_classes"):
            assert "hm-" not in str((await connection.execute(text(f"SELECT * FROM {table}"))).all())
    await engine.dispose()
