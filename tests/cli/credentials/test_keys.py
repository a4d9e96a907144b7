"""`halfmoon keys`: what it prints, and what is in the ledger after it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from halfmoon.cli.app import app
from halfmoon.ledger.edits.declared_classes import Declaration
from halfmoon.ledger.edits.stored_tenants import TenantsAt
from halfmoon.ledger.ledger import open_ledger
from halfmoon.rpc.credentials.api_keys import key_digest, key_id


def keys(tmp_path: Path, *arguments: str, stdin: str | None = None) -> Result:
    state = [] if arguments[0] == "digest" else ["--state-dir", str(tmp_path)]
    return CliRunner().invoke(app, ["keys", *arguments, *state], input=stdin)


def stored(tmp_path: Path) -> TenantsAt:
    async def read() -> TenantsAt:
        async with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
            return await ledger.tenants.all()

    return asyncio.run(read())


def test_a_key_is_printed_once_and_kept_by_digest(tmp_path: Path) -> None:
    added = keys(tmp_path, "add", "acme", "--label", "[cron]", "--expires-days", "1", "--kv-bytes", "1GiB")
    key = added.stdout.strip()
    assert key.startswith("hm-")
    assert "first key" in added.stderr
    (row,) = stored(tmp_path).keys
    assert (row.digest, row.tenant, row.label) == (key_digest(key), "acme", "[cron]")
    assert row.expires_at is not None
    assert (row.expires_at - row.created_at).days == 1
    shown = keys(tmp_path, "list").stdout
    assert key_id(row.digest) in shown
    assert "[cron]" in shown
    assert "kv bytes 1GiB" in shown
    assert key not in shown
    assert "first key" not in keys(tmp_path, "add", "acme").stderr
    assert b"".join(file.read_bytes() for file in tmp_path.iterdir()).find(key.encode()) == -1


def test_classes_that_there_are_not_are_refused(tmp_path: Path) -> None:
    early = keys(tmp_path, "set", "acme", "--classes", "gold")
    assert (early.exit_code, "cannot be checked" in early.stderr) == (0, True)

    async def declare() -> None:
        async with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
            await ledger.classes.declare({"gold": Declaration({}, False)}, lambda stored: None)

    asyncio.run(declare())
    for command in ("add", "set"):
        refused = keys(tmp_path, command, "acme", "--classes", "gold,golden")
        assert refused.exit_code != 0
        assert "golden" in refused.output
    assert stored(tmp_path).keys == []
    assert keys(tmp_path, "add", "acme", "--classes", "gold,default").exit_code == 0


def test_limits_change_one_by_one_and_go(tmp_path: Path) -> None:
    assert keys(tmp_path, "set", "acme", "--requests-per-minute", "60", "--classes", "gold, default").exit_code == 0
    assert keys(tmp_path, "set", "acme", "--weight", "2").exit_code == 0
    (acme,) = stored(tmp_path).tenants
    assert acme.definition == {"requests_per_minute": 60.0, "classes": ["gold", "default"], "weight": 2.0}
    keys(tmp_path, "set", "acme", "--requests-per-minute", "none", "--classes", "none")
    assert (stored(tmp_path).tenants[0].definition, stored(tmp_path).tenants[0].version) == ({"weight": 2.0}, 3)
    assert "no key" in keys(tmp_path, "list").stdout


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--kv-bytes", str(1 << 64)),  # more than a message to a worker holds
        ("--weight", "1e-308"),  # whose counter would be infinite
        ("--requests-per-minute", "1e-300"),
        ("--tokens-per-minute", "-1"),
    ],
)
def test_a_limit_that_no_gateway_could_apply_is_refused(tmp_path: Path, option: str, value: str) -> None:
    assert keys(tmp_path, "set", "acme", option, value).exit_code != 0
    assert stored(tmp_path).tenants == []


@pytest.mark.parametrize("days", ["inf", "9999999999"])
def test_a_key_ends_within_a_hundred_years(tmp_path: Path, days: str) -> None:
    refused = keys(tmp_path, "add", "acme", "--expires-days", days)
    assert refused.exit_code == 2
    assert "36500" in refused.output


def test_revoked_keys_are_listed_on_demand(tmp_path: Path) -> None:
    first, second = (key_id(key_digest(keys(tmp_path, "add", "acme").stdout.strip())) for _ in range(2))
    assert keys(tmp_path, "revoke", first).exit_code == 0
    shown = keys(tmp_path, "list").stdout
    assert (first in shown, second in shown) == (False, True)
    assert "revoked" in keys(tmp_path, "list", "--revoked").stdout
    assert keys(tmp_path, "revoke", "--tenant", "acme").exit_code == 0
    assert all(key.revoked_at for key in stored(tmp_path).keys)
    assert "no tenants" in keys(tmp_path, "list").stdout


def test_mistakes_are_named(tmp_path: Path) -> None:
    for arguments, said in (
        (("add", "a b"), "name has at most 64"),
        (("add", "acme", "--weight", "0"), "weight"),
        (("set", "acme", "--kv-bytes", "many"), "kv_bytes"),
        (("revoke", "nothing"), "no key 'nothing'"),
        (("revoke",), "name the ids"),
    ):
        result = keys(tmp_path, *arguments)
        assert result.exit_code == 2
        assert said in " ".join(result.stderr.replace("│", " ").split())


def test_the_digest_of_a_key(tmp_path: Path) -> None:
    assert keys(tmp_path, "digest", stdin="secret\n").stdout == f"sha256:{key_digest('secret')}\n"
    assert keys(tmp_path, "digest", stdin="").exit_code == 2
