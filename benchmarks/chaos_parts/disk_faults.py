"""Faults of disks: full, read-only, gone. Full and read-only disks are tmpfs mounts, which take root."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from benchmarks.chaos_parts.fault import WORKERS, Fault, Surroundings
from benchmarks.chaos_parts.system import System

_FULL_S = 10.0
_CHUNK_BYTES = 1 << 16


def _not_root() -> str | None:
    return None if os.geteuid() == 0 else "mounting takes root"


@asynccontextmanager
async def _mounted(folder: Path, size: str) -> AsyncIterator[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@asynccontextmanager
async def small_state_dir(state_dir: Path) -> AsyncIterator[Surroundings]:
    """The whole state directory on a disk of 96 MB."""
    async with _mounted(state_dir, "96m") as disk:
        yield Surroundings(here=disk)


@asynccontextmanager
async def small_store_disk(state_dir: Path) -> AsyncIterator[Surroundings]:
    """The store's disk tier on a disk of 48 MB."""
    async with _mounted(state_dir.parent / f"{state_dir.name}-store", "48m") as disk:
        yield Surroundings(("--disk-dir", str(disk / "tier")), here=disk)


@asynccontextmanager
async def ledger_disk(state_dir: Path) -> AsyncIterator[Surroundings]:
    """The SQLite ledger on a disk of its own."""
    async with _mounted(state_dir.parent / f"{state_dir.name}-ledger", "8m") as disk:
        yield Surroundings(("--ledger-url", f"sqlite:///{disk / 'ledger.db'}"), here=disk)


async def fill(system: System, disk: Path) -> str:
    """Leaves no room on the disk for ten seconds, then frees what was filled."""
    ballast, written = disk / "ballast", 0
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            written += file.write(bytes(_CHUNK_BYTES))
    try:
        for _ in range(int(_FULL_S)):  # what others free meanwhile is taken, too
            await asyncio.sleep(1.0)
            with ballast.open("ab", buffering=0) as file, suppress(OSError):
                while True:
                    written += file.write(bytes(_CHUNK_BYTES))
    finally:
        ballast.unlink()
    state = "halfmoon up ended" if system.process.returncode is not None else "halfmoon up lived on"
    return f"{written >> 20} MB filled; {state}"


async def lock_ledger(system: System, disk: Path) -> str:
    """Makes the ledger's file immutable for ten seconds: SQLite then sees a read-only database."""
    files = [str(path) for path in disk.iterdir() if path.is_file()]
    done = subprocess.run(["chattr", "+i", *files], capture_output=True, text=True)
    if done.returncode:
        return await _make_read_only(disk)
    await asyncio.sleep(_FULL_S)
    subprocess.run(["chattr", "-i", *files], check=True)
    return ""


async def _make_read_only(disk: Path) -> str:
    """Takes the permission to write for ten seconds, by a read-only mount over the folder."""
    subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
    done = subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], capture_output=True, text=True)
    await asyncio.sleep(_FULL_S)
    subprocess.run(["umount", "--lazy", str(disk)], check=True)
    return "files opened before stay writable" if not done.returncode else done.stderr.strip()


async def remove_store_directory(system: System, here: Any) -> str:
    """Removes the disk tier's directory under the running store."""
    folders = [path for path in system.state_dir.iterdir() if path.is_dir() and "kv" in path.name]
    for folder in folders:
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
    return "removed " + " ".join(folder.name for folder in folders)


async def remove_ledger(system: System, here: Any) -> str:
    """Removes the SQLite ledger's files under the running gateways."""
    files = list(system.state_dir.glob("ledger.db*"))
    for file in files:
        file.unlink(missing_ok=True)
    return f"removed {len(files)} files"


def disk_faults() -> list[Fault]:
    """All faults of disks, in the table's order."""
    return [
        Fault(name="the store's disk directory removed", act=remove_store_directory, ends_system=True),
        Fault(
            name="the store's disk full",
            act=fill,
            around=small_store_disk,
            arguments=(*WORKERS, "--disk-bytes", "40MiB"),
            missing=_not_root,
        ),
        Fault(
            name="the state directory's disk full",
            act=fill,
            around=small_state_dir,
            arguments=(*WORKERS, "--disk-bytes", "40MiB"),
            missing=_not_root,
            ends_system=True,
        ),
        Fault(name="the ledger's files removed", act=remove_ledger, ends_system=True),
        Fault(name="the ledger's disk full", act=fill, around=ledger_disk, missing=_not_root),
        Fault(name="the ledger read-only", act=lock_ledger, around=ledger_disk, missing=_not_root, ends_system=True),
    ]
