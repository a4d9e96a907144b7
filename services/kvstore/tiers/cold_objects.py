"""The cold tier in an object store or shared folder, through obstore: S3 and compatible, GCS, Azure, file://."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import NotFoundError
from obstore.store import LocalStore, from_url

from halfmoon.errors import InvalidRequest, NotFound


class ObjectStoreClient:
    """Owns a connection pool. Credentials and endpoints come from the environment (AWS_ENDPOINT_URL and the like)."""

    def __init__(self, url: str, **config: Any) -> None:
        """Opens the store. Raises InvalidRequest if the URL names none."""
        try:
            if urlsplit(url).scheme == "file":
                directory = Path(unquote(urlsplit(url).path))
                directory.mkdir(parents=True, exist_ok=True)
                self._store: Any = LocalStore(directory)
            else:
                self._store = from_url(url, client_options={"allow_http": True}, retry_config=_NO_RETRIES, **config)
        except Exception as err:
            raise InvalidRequest(f"the cold tier's URL {url!r} cannot be used: {err}", param="cold_url") from err

    async def put(self, name: str, data: bytes) -> None:
        """See ColdClient."""
        await obstore.put_async(self._store, name, data, use_multipart=False)

    async def get(self, name: str) -> bytes:
        """See ColdClient."""
        try:
            result = await obstore.get_async(self._store, name)
            return bytes(await result.bytes_async())
        except (NotFoundError, FileNotFoundError) as err:
            raise NotFound("the object store has no such block") from err

    async def delete(self, name: str) -> None:
        """See ColdClient."""
        try:
            await obstore.delete_async(self._store, name)
        except (NotFoundError, FileNotFoundError):
            return

    async def list(self, prefix: str) -> AsyncIterator[tuple[str, int]]:
        """See ColdClient."""
        async for batch in obstore.list(self._store, prefix=prefix):
            for item in batch:
                yield item["path"], item["size"]

    async def close(self) -> None:
        """Does nothing: obstore closes its connections itself."""


_NO_RETRIES: Any = {"max_retries": 0}  # the breaker decides when to try again
