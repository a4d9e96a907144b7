"""Processes of vLLM end with their worker, from the moment at which they read their settings."""

from __future__ import annotations

import asyncio
import pickle
import sys
from pathlib import Path

import pytest

from halfmoon.vllm_engine.reports import Lifeline, ReportListener

ROOT = Path(__file__).parents[2]
READ_SETTINGS = "import pickle, sys, threading; pickle.load(sys.stdin.buffer); print('read'); threading.Event().wait()"


@pytest.mark.parametrize("is_gone_before", [False, True])
async def test_who_has_read_it_ends_with_its_owner(is_gone_before: bool) -> None:
    listener = ReportListener(lambda _: None, lambda: None)
    listener.start()
    written = pickle.dumps({"lifeline": pickle.loads(pickle.dumps(Lifeline(listener.path)))})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-u", "-c", READ_SETTINGS),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    if is_gone_before:
        listener.close()
    process.stdin.write(written)
    process.stdin.close()
    said = await process.stdout.readline()
    assert b"read\n".startswith(said) if is_gone_before else said == b"read\n"  # it may end within the line
    if not is_gone_before:
        listener.close()
    assert await process.wait() == 1
