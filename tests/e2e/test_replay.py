"""`halfmoon replay` starts a gateway and simulated workers, and plays a trace against them."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from tests.e2e.system import ROOT

pytestmark = pytest.mark.e2e


async def test_a_trace_against_simulated_workers(tmp_path: Path) -> None:
    rows = [
        {"timestamp": 200 * number, "input_length": 700, "output_length": 5 + number, "hash_ids": [0, number]}
        for number in range(8)
    ]
    trace, figures = tmp_path / "trace.jsonl", tmp_path / "figures.json"
    trace.write_text("\n".join(map(json.dumps, rows)))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "halfmoon.cli.app", "replay", str(trace), "--prefill", "1", "--decode", "1"),
        *("--speed", "1", "--admission", "off", "--state-dir", str(tmp_path / "state"), "--json", str(figures)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=ROOT,
    )
    printed, _ = await asyncio.wait_for(process.communicate(), 120)
    assert process.returncode == 0, printed.decode()
    (row,) = json.loads(figures.read_text())
    assert row["num_in_time"] + row["num_late"] == 8, row
    assert 0 < row["cached_share"] < 1
    assert row["ttft_s"]["p50"] > 0
