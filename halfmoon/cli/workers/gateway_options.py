"""Commands about workers: where the control API is, and how they end."""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import typer
from rich.console import Console

from halfmoon.cli.profile_store import DEFAULT_STATE_DIR
from halfmoon.errors import HalfmoonError
from halfmoon.rpc.control_api import ControlApi, control_api
from halfmoon.rpc.credentials.operator_token import TOKEN_HELP
from halfmoon.rpc.tls.http_context import CA_HELP, CA_VARIABLE


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """Where the control API is, and what opens it."""

    PANEL: ClassVar[str] = "Gateway"
    gateway: Annotated[str, typer.Option(help="URL of the gateway.")] = "http://127.0.0.1:8000"
    token: Annotated[str | None, typer.Option(envvar="HALFMOON_OPERATOR_TOKEN", help=TOKEN_HELP)] = None
    state_dir: Annotated[Path, typer.Option(help="State directory of `halfmoon up`.")] = DEFAULT_STATE_DIR
    ca: Annotated[Path | None, typer.Option(envvar=CA_VARIABLE, help=CA_HELP)] = None

    def control_api(self) -> AbstractAsyncContextManager[ControlApi]:
        """A session with the gateway, in this user's name."""
        return control_api(self.gateway, _user(), self.token, self.state_dir, self.ca)


def _user() -> str:
    """This user, for the record of changes."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"[:128]


def run_command(options: GatewayOptions, work: Callable[[ControlApi], Awaitable[None]]) -> None:
    """Runs a command to its end; a HalfmoonError becomes its message and the exit status 1."""

    async def run() -> None:
        async with options.control_api() as api:
            await work(api)

    try:
        asyncio.run(run())
    except HalfmoonError as error:
        Console(stderr=True).print(f"halfmoon: {error.message}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
