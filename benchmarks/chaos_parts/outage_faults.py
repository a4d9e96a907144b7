"""Faults of what Halfmoon depends on (PostgreSQL, Redis), of clients that leave, and of the clock."""

from __future__ import annotations

import asyncio
import random
import shutil
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from benchmarks.chaos_parts.fault import SIMULATED, WORKERS, Fault, Surroundings
from benchmarks.chaos_parts.system import System
from benchmarks.gateway.disconnects import disconnect, random_case

_AWAY_S = 10.0
_NUM_ABORTS = 200
_ABORT_TOKENS = 40
_STEP_S = 3600
_FAKETIME = sorted(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"))


@asynccontextmanager
async def postgresql(state_dir: Path) -> AsyncIterator[Surroundings]:
    """A PostgreSQL server of its own for the ledger."""
    from tests.ledger.postgresql import find_programs, running_postgresql

    programs = find_programs()
    assert programs is not None
    with running_postgresql(programs) as server:
        yield Surroundings(("--ledger-url", server.new_database()), here=server)


def _no_postgresql() -> str | None:
    from tests.ledger.postgresql import find_programs

    return None if find_programs() else "PostgreSQL is not installed"


async def stop_postgresql(system: System, server: Any) -> str:
    """Stops the server for ten seconds."""
    await asyncio.to_thread(server.stop)
    await asyncio.sleep(_AWAY_S)
    await asyncio.to_thread(server.start)
    return ""


_REDIS = shutil.which("valkey-server") or shutil.which("redis-server")


@asynccontextmanager
async def redis(state_dir: Path) -> AsyncIterator[Surroundings]:
    """A Redis or Valkey server of its own as the store's cold tier."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    options = ("--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(state_dir.parent))
    assert _REDIS is not None
    process = await asyncio.create_subprocess_exec(_REDIS, *options, stdout=asyncio.subprocess.DEVNULL)
    try:
        yield Surroundings(("--cold-url", f"redis://127.0.0.1:{port}/0"), here=process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def kill_redis(system: System, process: Any) -> str:
    """Kills the cold tier's server for good."""
    process.kill()
    await process.wait()
    return ""


async def abort(system: System, here: Any) -> str:
    """200 clients of all endpoints that leave at a random moment."""
    kinds = await disconnect(
        system.url, lambda rng: random_case(rng, "demo", _ABORT_TOKENS), _NUM_ABORTS, 1.0, random.randrange(1 << 30)
    )
    return f"{kinds.total()} clients left"


@asynccontextmanager
async def fake_clock(state_dir: Path) -> AsyncIterator[Surroundings]:
    """A wall clock that a file shifts, for every process of the system (libfaketime). Monotonic time stays."""
    shift = state_dir.parent / f"{state_dir.name}.clock"
    shift.write_text("+0\n")
    variables = {
        "LD_PRELOAD": str(_FAKETIME[-1]),
        "FAKETIME_TIMESTAMP_FILE": str(shift),
        "FAKETIME_CACHE_DURATION": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
    }
    yield Surroundings(environment=variables, here=shift)


async def step_clock(system: System, shift: Path) -> str:
    """An hour forward, two back, and right again."""
    for offset_s in (_STEP_S, -_STEP_S, 0):
        shift.write_text(f"{offset_s:+d}\n")
        await asyncio.sleep(4.0)
    return ""


def outage_faults() -> list[Fault]:
    """These faults, in the table's order."""
    return [
        Fault(name="PostgreSQL away for 10 s", act=stop_postgresql, around=postgresql, missing=_no_postgresql),
        Fault(
            name="the cold tier's Redis killed",
            act=kill_redis,
            around=redis,
            arguments=(*WORKERS[:-1], "32MiB"),
            missing=lambda: None if _REDIS else "Redis is not installed",
            ends_system=True,
        ),
        Fault(name="200 clients leave", act=abort),
        Fault(
            name="the wall clock steps by an hour, both ways",
            act=step_clock,
            around=fake_clock,
            arguments=(*SIMULATED, "--prefill", "2", "--decode", "2"),  # libfaketime slows real engines tenfold
            missing=lambda: None if _FAKETIME else "libfaketime is not installed",
        ),
    ]
