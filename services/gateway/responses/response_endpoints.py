"""The endpoints of responses that are kept. A tenant sees its own; another's are not there."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import NoReturn

from aiohttp import web

from halfmoon.errors import InvalidRequest
from halfmoon.ledger.kept.stored_responses import StoredResponse, StoredResponses
from services.gateway.http.api_keys import tenant_of
from services.gateway.http.pages import page_of, requested_page, shown_page
from services.gateway.http.received_request import query_number
from services.gateway.replies.sse_body import SSEBody, sse
from services.gateway.responses.background import BackgroundResponses


class ResponseEndpoints:
    """Serves responses that are kept. Owns nothing.

    All of them raise NotFound, and Unavailable when the ledger does not answer.
    """

    def __init__(self, responses: StoredResponses, background: BackgroundResponses) -> None:
        self._responses = responses
        self._background = background

    async def get(self, request: web.Request) -> web.StreamResponse:
        """GET /v1/responses/{id}, with `stream=true&starting_after=N` the rest of a background response's events."""
        stored = await self._stored(request)
        if request.query.get("stream", "false").lower() not in ("true", "1"):
            return web.json_response(stored.response)
        after = query_number(request, "starting_after", -1, 10**9 - 1, 0) if "starting_after" in request.query else -1
        return await self.stream(request, stored, after + 1)

    async def stream_new(self, request: web.Request, response_id: str) -> web.StreamResponse:
        """All events of a background response that this request has just begun. Raises ClientGone."""
        stored = await self._responses.get(response_id, tenant_of(request).name, datetime.now(UTC))
        return await self.stream(request, stored, 0)

    async def stream(self, request: web.Request, stored: StoredResponse, start: int) -> web.StreamResponse:
        """The events of a background response from number `start` on. Raises ClientGone."""
        body = SSEBody(request)
        async for events in self._background.events(stored, start):
            await body.begin()
            body.write(b"".join(map(sse, events)))
        await body.begin()
        return await body.end()

    async def input_items(self, request: web.Request) -> web.Response:
        """GET /v1/responses/{id}/input_items: the items of this turn."""
        stored = await self._stored(request)
        page = requested_page(request)
        return web.json_response(shown_page(page_of(stored.input, page), page))

    async def delete(self, request: web.Request) -> web.Response:
        """DELETE /v1/responses/{id}. One that runs in the background ends."""
        response_id = request.match_info["response_id"]
        await self._responses.delete(response_id, tenant_of(request).name, datetime.now(UTC))
        self._background.tasks.end(response_id)
        return web.json_response({"id": response_id, "object": "response", "deleted": True})

    async def cancel(self, request: web.Request) -> web.Response:
        """POST /v1/responses/{id}/cancel: ends a background response; one that has ended stays as it is."""
        return web.json_response(await self._background.cancel(await self._stored(request)))

    async def refuse_conversations(self, request: web.Request) -> NoReturn:
        """/v1/conversations."""
        raise InvalidRequest("conversation objects are not kept: go on by previous_response_id", param="conversation")

    async def _stored(self, request: web.Request) -> StoredResponse:
        return await self._responses.get(request.match_info["response_id"], tenant_of(request).name, datetime.now(UTC))
