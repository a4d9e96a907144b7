"""/v1/files: what batches read and write. Bytes go to the ledger, which all gateways share; names are only shown."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from aiohttp import BodyPartReader, web
from aiohttp.http_exceptions import HttpProcessingError

from halfmoon.errors import HalfmoonError, InvalidRequest
from halfmoon.ledger.kept.stored_files import CHUNK_BYTES, StoredFile, StoredFiles, absent_file
from services.gateway.http.api_keys import tenant_of
from services.gateway.http.pages import requested_page, shown_page
from services.gateway.http.rate_limits import RateLimits
from services.gateway.replies.sse_body import ClientGone

_CHUNK_WAIT_S = 60.0  # for the next bytes of an upload
_BROKEN = (ValueError, AssertionError, EOFError, HttpProcessingError, web.RequestPayloadError, ConnectionError)
_LONGEST_S = 3_600.0
_MOST_FIELDS = 16
_MOST_FIELD_BYTES = 1_024
_MOST_NAME_CHARS = 128
_FORM_BYTES = 1 << 16  # around the file
_MOST_LISTED = 10_000
_LEAST_EXPIRY_S = 3_600


def new_file(tenant: str, filename: str, purpose: str, expires_at: datetime) -> StoredFile:
    """A file that has no bytes yet, with a random id."""
    return StoredFile(f"file-{secrets.token_hex(12)}", tenant, filename, purpose, 0, datetime.now(UTC), expires_at)


class FileEndpoints:
    """Serves files. A tenant sees its own; another's are not there. Owns nothing."""

    def __init__(
        self, files: StoredFiles, limits: RateLimits, max_bytes: int, tenant_max_bytes: int, keep_days: float
    ) -> None:
        """`max_bytes` of one file, `tenant_max_bytes` of all of a tenant's."""
        self._files = files
        self._limits = limits
        self._max_bytes = max_bytes
        self._tenant_max_bytes = tenant_max_bytes
        self._keep = timedelta(days=keep_days)

    async def upload(self, request: web.Request) -> web.Response:
        """POST /v1/files: a form with `purpose` (batch) and `file`. Raises InvalidRequest, or 415 if compressed."""
        self._limits.take_request(tenant_of(request))
        if request.content_type != "multipart/form-data":
            raise InvalidRequest("send a form (multipart/form-data) with the fields purpose and file")
        if request.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
            raise web.HTTPUnsupportedMediaType(
                text="uploads may not be compressed: leave the header Content-Encoding out"
            )
        if (request.content_length or 0) > self._max_bytes + _FORM_BYTES:
            raise self._too_large()
        now = datetime.now(UTC)
        new = new_file(tenant_of(request).name, "", "batch", now + self._keep)
        await self._files.begin(new)
        is_done = False
        try:
            async with asyncio.timeout(_LONGEST_S):
                filename, fields = await self._receive(request, new.id)
            stored = await self._files.finish(new.id, filename, self._expiry(fields, now))
            is_done = True
        except TimeoutError as error:
            text = f"the upload took longer than {_LONGEST_S:g} s, or nothing came for {_CHUNK_WAIT_S:g} s"
            raise web.HTTPRequestTimeout(text=text) from error
        finally:
            if not is_done:
                with suppress(HalfmoonError):
                    await asyncio.shield(self._files.discard(new.id))
        return web.json_response(_shown(stored))

    async def list(self, request: web.Request) -> web.Response:
        """GET /v1/files, with `purpose`, `limit`, `order` and `after`."""
        tenant, purpose = tenant_of(request).name, request.query.get("purpose")
        page = requested_page(request, _MOST_LISTED, _MOST_LISTED)
        rows = await self._files.page(tenant, datetime.now(UTC), page, purpose)
        return web.json_response(shown_page([_shown(stored) for stored in rows], page))

    async def get(self, request: web.Request) -> web.Response:
        """GET /v1/files/{id}."""
        return web.json_response(_shown(await self._stored(request)))

    async def content(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/files/{id}/content: its bytes. Raises NotFound, also if it is deleted meanwhile, and ClientGone."""
        stored = await self._stored(request)
        num_left = stored.num_bytes
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        response.content_length = stored.num_bytes
        try:
            await response.prepare(request)
            async for data in self._files.chunks(stored.id):
                await response.write(data)
                num_left -= len(data)
            if num_left:
                raise absent_file(stored.id)
            await response.write_eof()
        except ConnectionError as error:
            raise ClientGone from error
        return response

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /v1/files/{id}. Raises InvalidRequest for one that a batch still reads."""
        file_id = request.match_info["file_id"]
        await self._files.delete(file_id, tenant_of(request).name, datetime.now(UTC))
        return web.json_response({"id": file_id, "object": "file", "deleted": True})

    async def _stored(self, request: web.Request) -> StoredFile:
        return await self._files.get(request.match_info["file_id"], tenant_of(request).name, datetime.now(UTC))

    async def _receive(self, request: web.Request, file_id: str) -> tuple[str, dict[str, str]]:
        """Writes the file's bytes as they come; returns its name and the other fields."""
        fields: dict[str, str] = {}
        filename: str | None = None
        try:
            async for part in _parts(request):
                name = part.name or ""
                if len(fields) >= _MOST_FIELDS:
                    raise InvalidRequest(f"the form has more than {_MOST_FIELDS} fields")
                if name != "file":
                    fields[name] = await _text(part, name)
                elif filename is not None:
                    raise InvalidRequest("file: send one file at a time", param="file")
                else:
                    filename = _shown_name(part.filename)
                    await self._write(part, file_id)
        except _BROKEN as error:
            raise InvalidRequest("the form could not be read: it is broken or ends too early") from error
        if filename is None:
            raise InvalidRequest("missing parameter: file", param="file")
        if fields.get("purpose") != "batch":
            raise InvalidRequest("purpose: only batch is supported", param="purpose")
        return filename, fields

    async def _write(self, part: BodyPartReader, file_id: str) -> None:
        number, num_bytes = 0, 0
        async for data in _chunks(lambda: asyncio.wait_for(part.read_chunk(CHUNK_BYTES), _CHUNK_WAIT_S), part):
            num_bytes += len(data)
            if num_bytes > self._max_bytes:
                raise self._too_large()
            await self._files.append(file_id, number, data, self._tenant_max_bytes)
            number += 1

    def _expiry(self, fields: dict[str, str], now: datetime) -> datetime:
        """When the file goes: as the client asks in `expires_after`, but no later than files are kept."""
        seconds = fields.get("expires_after[seconds]")
        if seconds is None:
            return now + self._keep
        if not (seconds.isascii() and seconds.isdigit() and len(seconds) <= 9 and int(seconds) >= _LEAST_EXPIRY_S):
            message = f"expires_after.seconds must be a number of at least {_LEAST_EXPIRY_S}"
            raise InvalidRequest(message, param="expires_after")
        return now + min(self._keep, timedelta(seconds=int(seconds)))

    def _too_large(self) -> web.HTTPRequestEntityTooLarge:
        text = f"the file is larger than {self._max_bytes} bytes (gateway.file_max_bytes): split it"
        return web.HTTPRequestEntityTooLarge(self._max_bytes, text=text)


async def _parts(request: web.Request) -> AsyncIterator[BodyPartReader]:
    reader = await request.multipart()
    while (part := await asyncio.wait_for(reader.next(), _CHUNK_WAIT_S)) is not None:
        if not isinstance(part, BodyPartReader):
            raise InvalidRequest("the form may not have forms in it")
        yield part


async def _text(part: BodyPartReader, name: str) -> str:
    """A short field."""
    data = bytearray()
    while not part.at_eof():
        data += await asyncio.wait_for(part.read_chunk(), _CHUNK_WAIT_S)
        if len(data) > _MOST_FIELD_BYTES:
            raise InvalidRequest(f"{name[:64]}: at most {_MOST_FIELD_BYTES} bytes", param=name[:64])
    return data.decode(errors="replace")


async def _chunks(read: Callable[[], Any], part: BodyPartReader) -> AsyncIterator[bytes]:
    """The bytes of a part in whole chunks: the network brings small ones."""
    waiting = bytearray()
    while not part.at_eof():
        waiting += await read()
        if len(waiting) >= CHUNK_BYTES:
            yield bytes(waiting)
            waiting.clear()
    if waiting:
        yield bytes(waiting)


def _shown_name(given: str | None) -> str:
    """The last part of a path, printable. It is never used as a path."""
    last = (given or "").replace("\\", "/").rpartition("/")[2]
    return "".join(char if char.isprintable() else "_" for char in last)[:_MOST_NAME_CHARS] or "file"


def _shown(stored: StoredFile) -> dict[str, Any]:
    return {
        "id": stored.id,
        "object": "file",
        "bytes": stored.num_bytes,
        "created_at": int(stored.created_at.timestamp()),
        "expires_at": int(stored.expires_at.timestamp()),
        "filename": stored.filename,
        "purpose": stored.purpose,
        "status": "processed",
        "status_details": None,
    }
