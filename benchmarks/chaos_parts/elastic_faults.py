"""Changes by operators, which are no faults and must look like none: workers are started again one after the other."""

from __future__ import annotations

import asyncio
import sys
import time
from asyncio import create_subprocess_exec, subprocess
from typing import Any

import aiohttp

from benchmarks.chaos_parts.fault import Fault
from benchmarks.chaos_parts.system import System

_BETWEEN_S = 2.0  # two changes


async def restart_all(system: System, here: Any) -> str:
    """`halfmoon restart`; the note says how long it took."""
    return await _command(system, "restart")


async def exchange_roles(system: System, here: Any) -> str:
    """A prefill worker and a decode worker change places and back; the note says how long each change took."""
    first = {worker["role"]: worker["worker_id"] for worker in await system.workers()}
    steps = ((first["decode"], "prefill"), (first["prefill"], "decode"))
    back = ((first["decode"], "decode"), (first["prefill"], "prefill"))
    took = []
    for worker_id, role in (*steps, *back):
        began_s = time.monotonic()
        failure = await change_role(system, worker_id, role)
        if failure:
            return failure
        took.append(f"{1000 * (time.monotonic() - began_s):.0f}")
        await asyncio.sleep(_BETWEEN_S)
    return f"roles changed within {', '.join(took)} ms"


async def change_role(system: System, worker_id: str, role: str) -> str:
    """Changes it by force: the dwell is not what is measured. Returns why it failed."""
    url = f"{system.url}/halfmoon/v1/workers/{worker_id}/role"
    async with aiohttp.ClientSession() as session, session.post(url, json={"role": role, "force": True}) as response:
        return "" if response.status == 200 else await response.text()


async def _command(system: System, *words: str) -> str:
    began_s = time.monotonic()
    where = ("--gateway", system.url, "--state-dir", str(system.state_dir))
    process = await create_subprocess_exec(
        *(sys.executable, "-m", "halfmoon.cli.app", *words, *where), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    printed, _ = await process.communicate()
    took = f"`halfmoon {' '.join(words)}` took {time.monotonic() - began_s:.1f} s"
    return took if process.returncode == 0 else f"{took} and failed: {printed.decode()[-200:]}"


def elastic_faults() -> list[Fault]:
    """All of them, in the table's order."""
    return [
        Fault(name="halfmoon restart (every worker in turn)", act=restart_all),
        Fault(name="halfmoon role (two workers change places and back)", act=exchange_roles, after_s=3.0),
    ]
