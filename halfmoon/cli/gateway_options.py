"""Commands that ask a running gateway: where it is, what opens it, and how they end."""

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
from halfmoon.errors import HalfmoonError, Unavailable
from halfmoon.rpc.control_api import ControlApi, control_api
from halfmoon.rpc.credentials.operator_token import TOKEN_HELP, client_token
from halfmoon.rpc.tls.http_context import CA_HELP, CA_VARIABLE
from halfmoon.up.state.written_state import running_services

_DEFAULT_URL = "http://127.0.0.1:8000"
GATEWAY_HELP = f"URL of the gateway. Default: that of what runs with the state directory, else {_DEFAULT_URL}."


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """Where the gateway is, and what opens it."""

    PANEL: ClassVar[str] = "Gateway"
    gateway: Annotated[str | None, typer.Option(help=GATEWAY_HELP)] = None
    token: Annotated[str | None, typer.Option(envvar="HALFMOON_OPERATOR_TOKEN", help=TOKEN_HELP)] = None
    state_dir: Annotated[Path, typer.Option(help="State directory of `halfmoon up`.")] = DEFAULT_STATE_DIR
    ca: Annotated[Path | None, typer.Option(envvar=CA_VARIABLE, help=CA_HELP)] = None

    @property
    def url(self) -> str:
        """Of the gateway, without a slash at its end."""
        return gateway_url(self.gateway, self.state_dir)

    @property
    def operator_token(self) -> str | None:
        """The token that the gateway is sent. Raises InvalidRequest for a file that cannot be read."""
        return client_token(self.token, self.url, self.state_dir)

    def control_api(self) -> AbstractAsyncContextManager[ControlApi]:
        """A session with the gateway, in this user's name."""
        return control_api(self.url, _user(), self.token, self.state_dir, self.ca)


def gateway_url(given: str | None, state_dir: Path) -> str:
    """The URL of the gateway that a command asks: the given one, else that of what runs with the state directory."""
    listed = running_services(state_dir) if given is None else None
    return (given or (listed and listed.url) or _DEFAULT_URL).rstrip("/")


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
        elsewhere = isinstance(error, Unavailable) and options.gateway is None
        advice = ". If it is elsewhere, name it by --gateway, or its --state-dir" if elsewhere else ""
        Console(stderr=True).out(f"halfmoon: {error.message}{advice}", highlight=False)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
