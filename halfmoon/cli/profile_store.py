"""Measured profiles in the ledger of a state directory, for commands that are not services."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from halfmoon.errors import InvalidRequest
from halfmoon.ledger.ledger import open_ledger
from halfmoon.ledger.measured_profiles import NamedProfile
from halfmoon.sim.latency_sources.measured_profile import MeasuredProfile, read_profile, write_profile

DEFAULT_STATE_DIR = Path(".halfmoon")
StateDir = Annotated[Path, typer.Option(help="where the ledger is, unless --ledger-url says otherwise")]
LedgerUrl = Annotated[str | None, typer.Option(help="the ledger: sqlite:///… or postgresql://…")]

_LEDGER = "ledger:"


def ledger_at(state_dir: Path, ledger_url: str | None) -> str:
    """The URL of the ledger that `halfmoon up` with that state directory has."""
    return ledger_url or f"sqlite:///{state_dir.resolve() / 'ledger.db'}"


def stored_profile(name: str, state_dir: Path, ledger_url: str | None) -> MeasuredProfile:
    """By name. Raises InvalidRequest naming those that there are."""
    known = {one.name: one for one in all_profiles(state_dir, ledger_url)}
    if name not in known:
        there = f"it has {', '.join(known)}" if known else "it has none: make one with `halfmoon profile`"
        raise InvalidRequest(f"the ledger has no profile {name!r}: {there}", param="latency")
    return read_profile(Path(_LEDGER + name), dict(known[name].profile))


def all_profiles(state_dir: Path, ledger_url: str | None) -> Sequence[NamedProfile]:
    """Nothing where there is no ledger yet. Raises Unavailable when it does not answer."""

    async def read() -> Sequence[NamedProfile]:
        async with open_ledger(ledger_at(state_dir, ledger_url)) as ledger:
            return await ledger.measured_profiles.all()

    if ledger_url is None and not (state_dir / "ledger.db").exists():
        return ()
    return asyncio.run(read())


def keep_profile(name: str, profile: MeasuredProfile, state_dir: Path, ledger_url: str | None) -> None:
    """In the place of the one of that name. Raises Unavailable when the ledger does not answer."""
    values = profile.as_json()

    async def put() -> None:
        async with open_ledger(ledger_at(state_dir, ledger_url)) as ledger:
            await ledger.measured_profiles.put(NamedProfile(name, datetime.now(UTC), values))

    if ledger_url is None:
        state_dir.mkdir(parents=True, exist_ok=True)
    asyncio.run(put())


def profile_file(text: str, state_dir: Path, ledger_url: str | None = None) -> str:
    """What other processes can read: a profile of the ledger as a file of the state directory, all else as it is."""
    if not text.startswith(_LEDGER):
        return text
    name = text.removeprefix(_LEDGER)
    found = stored_profile(name, state_dir, ledger_url)
    path = state_dir.resolve() / "profiles" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_profile(path, found)
    return str(path)
