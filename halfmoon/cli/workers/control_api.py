"""The control API of a running gateway, as commands about workers use it."""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar
from urllib.parse import quote

import aiohttp
import typer
from rich.console import Console

from halfmoon.cli.profile_store import DEFAULT_STATE_DIR
from halfmoon.errors import HalfmoonError, InvalidRequest, Unavailable
from halfmoon.rpc.credentials.operator_token import TOKEN_HELP, client_token
from halfmoon.rpc.tls.http_context import CA_HELP, CA_VARIABLE, client_context

_TIMEOUT_S = 30.0
_POLL_S = 0.2

Worker = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """Where the control API is, and what opens it."""

    PANEL: ClassVar[str] = "Gateway"
    gateway: Annotated[str, typer.Option(help="URL of the gateway.")] = "http://127.0.0.1:8000"
    token: Annotated[str | None, typer.Option(envvar="HALFMOON_OPERATOR_TOKEN", help=TOKEN_HELP)] = None
    state_dir: Annotated[Path, typer.Option(help="State directory of `halfmoon up`.")] = DEFAULT_STATE_DIR
    ca: Annotated[Path | None, typer.Option(envvar=CA_VARIABLE, help=CA_HELP)] = None


class ControlApi:
    """Owns a session with one gateway."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self._session = session
        self._url = url

    async def workers(self) -> list[Worker]:
        """The members, as GET /halfmoon/v1/cluster shows them. Raises Unavailable or InvalidRequest."""
        found: list[Worker] = (await self._ask("GET", "/halfmoon/v1/cluster"))["workers"]
        return found

    async def change(self, name: str, what: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """POST /halfmoon/v1/workers/{name}/{what}, in this user's name. Raises Unavailable or InvalidRequest."""
        return await self._ask("POST", f"/halfmoon/v1/workers/{quote(name, safe='')}/{what}", {"by": _user(), **body})

    async def until(self, holds: Callable[[list[Worker]], bool], within_s: float, why: str) -> None:
        """Returns once it holds of the members. Raises Unavailable with `why` after `within_s`."""
        try:
            async with asyncio.timeout(within_s):
                while not holds(await self.workers()):  # noqa: ASYNC110
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            raise Unavailable(f"{why} within {within_s:g} s") from None

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Mapping[str, Any]:
        try:
            async with self._session.request(method, self._url + path, json=body) as response:
                answer: Mapping[str, Any] = await response.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise Unavailable(f"{self._url} does not answer: {error}") from error
        if response.status >= 400:
            raise InvalidRequest(str(answer.get("error", {}).get("message", answer)))
        return answer


def _user() -> str:
    """This user, for the record of changes."""
    try:
        name = getpass.getuser()
    except (OSError, KeyError):  # a container's user may have no name
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}"[:128]


@asynccontextmanager
async def control_api(options: GatewayOptions) -> AsyncIterator[ControlApi]:
    """A session with the gateway. Raises InvalidRequest for a token or authorities that cannot be read."""
    url = options.gateway.rstrip("/")
    token = client_token(options.token, url, options.state_dir)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connector = aiohttp.TCPConnector(ssl=client_context(options.ca, url) or True)
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        yield ControlApi(session, url)


def run_command(options: GatewayOptions, work: Callable[[ControlApi], Awaitable[None]]) -> None:
    """Runs a command to its end; a HalfmoonError becomes its message and the exit status 1."""

    async def run() -> None:
        async with control_api(options) as api:
            await work(api)

    try:
        asyncio.run(run())
    except HalfmoonError as error:
        Console(stderr=True).print(f"halfmoon: {error.message}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
