"""`halfmoon kv` against a store that runs as a process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from halfmoon.catalog.block_identity import block_id
from halfmoon.cli.app import app
from halfmoon.errors import Unavailable
from halfmoon.kv.owner import SHARED, KVOwner
from halfmoon.rpc.store.chain import Chain
from halfmoon.rpc.store.kvstore_client import KVStoreClient
from halfmoon.up.specs.stores import remember_stores
from services.gateway.control.store_view import StoreView
from tests.services.kvstore.blocks import LAYOUT, content, key

IDS = [block_id(key(n)) for n in range(3)]


PATIENCE_S = 20.0  # for what the store does after its answer


@contextmanager
def store(directory: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "services.kvstore", "--disk-dir", str(directory)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        try:
            events = map(json.loads, process.stderr)
            yield next(event["address"] for event in events if event["event"] == "service.ready")
        finally:
            process.terminate()
            process.stderr.read()


def fill(address: str) -> None:
    async def filling() -> None:
        it = KVStoreClient(address)
        for depth in range(3):
            owner = KVOwner("acme", 1 << 20) if depth == 2 else SHARED
            chain = Chain(key(depth - 1) if depth else b"", depth, owner=owner)
            await it.put(key(depth), LAYOUT, content(key(depth)), chain, deadline_s=20)
        await it.close()

    asyncio.run(filling())


async def emptied(address: str) -> list[dict[str, Any]]:
    """What a gateway's operator does, pinned blocks and all."""
    view = StoreView(lambda: {address})
    try:
        return await view.empty()
    finally:
        await view.close()


def test_an_operators_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")  # no id is cut short
    run = CliRunner()
    with store(tmp_path) as address:
        monkeypatch.setenv("HALFMOON_STORE", address)
        fill(address)
        begun_s = time.monotonic()
        while True:
            stats = run.invoke(app, ["kv", "stats"])
            assert stats.exit_code == 0
            if "2.2" in stats.output or time.monotonic() - begun_s > PATIENCE_S:  # as it is kept, with its codec
                break
        assert "dram" in stats.output
        assert "stored 3, missed 0" in stats.output
        assert [line.split() for line in stats.output.splitlines() if "acme" in line] == [
            ["acme", "1", "2.2", "KiB", "1.0", "MiB", "0"]
        ]
        acmes = run.invoke(app, ["kv", "ls", "--tenant", "acme"]).output
        assert [block.hex() in acmes for block in IDS] == [False, False, True]
        shared = run.invoke(app, ["kv", "ls", "--tenant", ""]).output
        assert [block.hex() in shared for block in IDS] == [True, True, False]
        listed = run.invoke(app, ["kv", "ls", "--limit", "2", "--tier", "dram"])
        assert [block.hex() in listed.output for block in IDS] == [True, True, False]
        assert IDS[2].hex() in run.invoke(app, ["kv", "ls", "--after", IDS[1].hex()]).output
        assert run.invoke(app, ["kv", "pin", IDS[0].hex()]).output == "pinned 1 of 1\n"
        absent = run.invoke(app, ["kv", "pin", "--unpin", "ff" * 24])
        assert (absent.exit_code, absent.output) == (1, "unpinned 0 of 1\n")
        verified = run.invoke(app, ["kv", "verify", "--tier", "dram"])
        assert (verified.exit_code, verified.output) == (0, "dram: 3 read, 0 damaged and dropped\n")
        assert run.invoke(app, ["kv", "drop", IDS[1].hex()]).output == "dropped 2\n"
        assert IDS[1].hex() not in run.invoke(app, ["kv", "ls"]).output
        assert asyncio.run(emptied(address)) == [{"address": address, "num_dropped": 1}]
        assert IDS[0].hex() not in run.invoke(app, ["kv", "ls"]).output


@pytest.mark.parametrize("limit", ["0", "9" * 20])
def test_a_limit_that_no_store_can_take_is_refused(limit: str) -> None:
    assert CliRunner().invoke(app, ["kv", "ls", "--address", "127.0.0.1:1", "--limit", limit]).exit_code == 2


def test_an_address_with_brackets_is_printed_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreached(*_: object) -> None:
        raise Unavailable("no way there")

    monkeypatch.setattr("halfmoon.cli.kv.Peer", unreached)
    result = CliRunner().invoke(app, ["kv", "stats", "--address", "[fd00::1]:7003"])
    assert (result.exit_code, result.stderr) == (1, "[fd00::1]:7003: no way there\n")


@pytest.mark.parametrize("text", ["xyz", "00", "ff" * 25])
def test_what_is_not_an_id_is_said(text: str) -> None:
    for command in (["drop", text], ["pin", text], ["ls", "--after", text]):
        refused = CliRunner().invoke(app, ["kv", *command, "--address", "127.0.0.1:1"])
        assert refused.exit_code == 2
        assert "48 hexadecimal digits" in " ".join(refused.stderr.replace("│", "").split())


def test_the_store_of_halfmoon_up_is_found_and_what_cannot_be_one_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    run = CliRunner()
    for address, why in ((None, "no store is known"), ("here", "not host:port"), ("here:99999", "not host:port")):
        refused = run.invoke(app, ["kv", "stats", *(["--address", address] if address else [])])
        assert (refused.exit_code, why in refused.stderr) == (2, True), refused.stderr
    state = tmp_path / ".halfmoon"
    state.mkdir()
    remember_stores(state, ["127.0.0.1:1"], print)
    away = run.invoke(app, ["kv", "stats"])
    assert away.exit_code == 1
    assert "127.0.0.1:1" in away.stderr
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    remember_stores(elsewhere, ["127.0.0.1:2"], print)
    assert "127.0.0.1:2" in run.invoke(app, ["kv", "stats", "--state-dir", str(elsewhere)]).stderr
    remember_stores(state, ["127.0.0.1:1", "127.0.0.1:2"], print)
    several = run.invoke(app, ["kv", "stats"])
    assert several.exit_code == 2
    assert "127.0.0.1:1, 127.0.0.1:2" in several.stderr
