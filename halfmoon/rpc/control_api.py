"""The control API of a running gateway, as commands and services use it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp

from halfmoon.errors import InvalidRequest, Unavailable
from halfmoon.rpc.credentials.operator_token import client_token
from halfmoon.rpc.tls.http_context import client_context, unreached

_TIMEOUT_S = 30.0
_POLL_S = 0.2

Worker = Mapping[str, Any]


class ControlApi:
    """Owns a session with one gateway. Changes are made in the name `by`, for the record."""

    def __init__(self, session: aiohttp.ClientSession, url: str, by: str) -> None:
        self._session = session
        self._url = url
        self._by = by

    async def workers(self) -> list[Worker]:
        """The members, as GET /halfmoon/v1/cluster shows them. Raises Unavailable or InvalidRequest."""
        found: list[Worker] = (await self.get("/halfmoon/v1/cluster"))["workers"]
        return found

    async def get(self, path: str) -> Mapping[str, Any]:
        """What the gateway shows at a path. Raises Unavailable or InvalidRequest."""
        return await self._ask("GET", path)

    async def post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the gateway answers to a body. Raises Unavailable or InvalidRequest."""
        return await self._ask("POST", path, body)

    async def put(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """What the gateway answers to a new value. Raises Unavailable or InvalidRequest."""
        return await self._ask("PUT", path, body)

    async def change(self, name: str, what: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """POST /halfmoon/v1/workers/{name}/{what}. Raises Unavailable or InvalidRequest."""
        return await self._ask("POST", f"/halfmoon/v1/workers/{quote(name, safe='')}/{what}", {"by": self._by, **body})

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
            raise Unavailable(f"{self._url} does not answer: {unreached(error)}") from error
        if response.status >= 400:
            raise InvalidRequest(str(answer.get("error", {}).get("message", answer)))
        return answer


@asynccontextmanager
async def control_api(
    url: str, by: str, token: str | None, state_dir: Path, ca: Path | None = None, *, reconnects: bool = False
) -> AsyncIterator[ControlApi]:
    """A session with a gateway; with `reconnects` each call may reach another one behind the same address.

    Raises InvalidRequest for a token or authorities that cannot be read.
    """
    url = url.rstrip("/")
    token = client_token(token, url, state_dir)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    connector = aiohttp.TCPConnector(ssl=client_context(ca, url) or True, force_close=reconnects)
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:
        yield ControlApi(session, url, by)
