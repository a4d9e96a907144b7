"""Changes by operators, which are no faults and must look like none: workers are started again one after the other."""

from __future__ import annotations

import sys
import time
from asyncio import create_subprocess_exec, subprocess
from typing import Any

from benchmarks.chaos_parts.fault import Fault
from benchmarks.chaos_parts.system import System


async def restart_all(system: System, here: Any) -> str:
    """`halfmoon restart`; the note says how long it took."""
    return await _command(system, "restart")


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
    return [Fault(name="halfmoon restart (every worker in turn)", act=restart_all)]
