"""`halfmoon kv` against a store that runs as a process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from halfmoon.cli import app
from halfmoon.rpc.chain import Chain
from halfmoon.rpc.kvstore_client import KVStoreClient
from services.kvstore.identity import block_id
from tests.services.kvstore.blocks import LAYOUT, content, key

IDS = [block_id(key(n)) for n in range(3)]


@contextmanager
def store(directory: Path) -> Iterator[str]:
    command = [sys.executable, "-m", "services.kvstore", "--disk-dir", str(directory)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        try:
            events = [json.loads(process.stderr.readline()) for _ in range(2)]
            yield events[1]["address"]
        finally:
            process.terminate()
            process.stderr.read()


def fill(address: str) -> None:
    async def filling() -> None:
        it = KVStoreClient(address)
        for depth in range(3):
            chain = Chain(key(depth - 1) if depth else b"", depth)
            await it.put(key(depth), LAYOUT, content(key(depth)), chain, deadline_s=20)
        await it.close()

    asyncio.run(filling())


def test_an_operators_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run = CliRunner()
    with store(tmp_path) as address:
        monkeypatch.setenv("HALFMOON_STORE", address)
        fill(address)
        stats = run.invoke(app, ["kv", "stats"])
        assert stats.exit_code == 0
        assert "dram" in stats.output
        assert "stored 3, missed 0" in stats.output
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


def test_what_goes_wrong_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = CliRunner()
    assert run.invoke(app, ["kv", "drop", "xyz"]).exit_code == 2
    with store(tmp_path) as address:
        short = run.invoke(app, ["kv", "drop", "00", "--address", address])
        assert short.exit_code == 1
        assert "24 bytes" in short.stderr
