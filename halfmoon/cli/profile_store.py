"""Reads and writes measured profiles in the ledger, for commands of the command line."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from halfmoon.errors import InvalidRequest
from halfmoon.sim.latency_sources.measured_profile import MeasuredProfile, read_profile, write_profile

if TYPE_CHECKING:
    from halfmoon.ledger.ledger import Ledger
    from halfmoon.ledger.measured_profiles import NamedProfile

DEFAULT_STATE_DIR = Path(".halfmoon")
StateDir = Annotated[
    Path, typer.Option(help="State directory of `halfmoon up`, which holds the ledger unless --ledger-url is given.")
]
LedgerUrl = Annotated[
    str | None, typer.Option(envvar="HALFMOON_LEDGER_URL", help="URL of the ledger: sqlite:///… or postgresql://….")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerOptions:
    """Where the ledger is."""

    PANEL: ClassVar[str] = "State"
    state_dir: StateDir = DEFAULT_STATE_DIR
    ledger_url: LedgerUrl = None


_LEDGER = "ledger:"


def ledger_at(state_dir: Path, ledger_url: str | None) -> str:
    """Returns the URL of the ledger that `halfmoon up` uses with that state directory."""
    return ledger_url or f"sqlite:///{state_dir.resolve() / 'ledger.db'}"


def ledger_in(state_dir: Path, ledger_url: str | None) -> AbstractAsyncContextManager[Ledger]:
    """Opens that ledger, as `open_ledger` does."""
    from halfmoon.ledger.ledger import open_ledger  # a third of the start of commands that need none

    return open_ledger(ledger_at(state_dir, ledger_url))


def stored_profile(name: str, state_dir: Path, ledger_url: str | None) -> MeasuredProfile:
    """Returns a profile by name. If there is none, raises InvalidRequest with the names that exist."""
    known = {stored.name: stored for stored in all_profiles(state_dir, ledger_url)}
    if name not in known:
        there = f"it has {', '.join(known)}" if known else "it has none: make one with `halfmoon profile`"
        raise InvalidRequest(f"the ledger has no profile {name!r}: {there}", param="latency")
    return read_profile(Path(_LEDGER + name), dict(known[name].profile))


def all_profiles(state_dir: Path, ledger_url: str | None) -> Sequence[NamedProfile]:
    """Returns all profiles; none if there is no ledger yet. Raises Unavailable if the ledger does not answer."""

    async def read() -> Sequence[NamedProfile]:
        async with ledger_in(state_dir, ledger_url) as ledger:
            return await ledger.measured_profiles.all()

    if ledger_url is None and not os.path.exists(state_dir / "ledger.db"):
        return ()
    return asyncio.run(read())


def keep_profile(name: str, profile: MeasuredProfile, state_dir: Path, ledger_url: str | None) -> None:
    """Stores a profile, replacing the one of that name. Raises Unavailable if the ledger does not answer."""
    from halfmoon.ledger.measured_profiles import NamedProfile

    values = profile.as_json()

    async def put() -> None:
        async with ledger_in(state_dir, ledger_url) as ledger:
            await ledger.measured_profiles.put(NamedProfile(name, datetime.now(UTC), values))

    if ledger_url is None:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    asyncio.run(put())


def profile_file(text: str, state_dir: Path, ledger_url: str | None = None) -> str:
    """Writes `ledger:NAME` to a file of the state directory and returns its path; returns any other text unchanged."""
    if not text.startswith(_LEDGER):
        return text
    name = text.removeprefix(_LEDGER)
    profile = stored_profile(name, state_dir, ledger_url)
    path = state_dir.resolve() / "profiles" / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_profile(path, profile)
    return str(path)
