"""Responses in the background: leased from the ledger, so that another gateway goes on where one has ended."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from halfmoon.background import cancelled
from halfmoon.errors import HalfmoonError, InvalidRequest, NoCapacity, Unavailable
from halfmoon.ledger.kept.stored_responses import ResponseStatus, StoredResponse, StoredResponses
from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.admission.tenants import Tenant
from services.gateway.detached_request import DetachedRequest, RunDetached
from services.gateway.http.error_responses import kind_of
from services.gateway.leased_tasks import POLL_S, LeasedTasks
from services.gateway.openai.bodies.responses_body import ResponsesBody
from services.gateway.request import GatewayRequest
from services.gateway.responses.conversations import Conversations, Turn

log = logging.getLogger(__name__)

_MOST_CLAIMS = 5  # gateways may die while they run a response, but not for ever
_MOST_UNFINISHED = 1_000  # of a tenant
_MOST_UNFINISHED_BYTES = 64 << 20  # of a tenant: they are never removed for want of room
_LONGEST_WAIT = timedelta(hours=1)  # for capacity
_LONGEST_PAUSE_S = 10.0
_FLUSH_S = 0.2
_LOOK_S = 0.2  # between looks for new events


class BackgroundResponses:
    """Runs responses in the background. `tasks` owns those that run here."""

    def __init__(
        self,
        responses: StoredResponses,
        conversations: Conversations,
        run: RunDetached,
        class_named: Callable[[str], QosClass],
        tenant_named: Callable[[str], Tenant],
        gateway_id: str,
        most: int,
    ) -> None:
        """`most`: how many it runs at once."""
        self._responses = responses
        self._conversations = conversations
        self._run_detached = run
        self._class_named = class_named
        self._tenant_named = tenant_named
        self._gateway_id = gateway_id
        self.tasks = LeasedTasks(responses.leases, gateway_id, most, self._run)

    async def submit(self, request: GatewayRequest, turn: Turn, written: ResponsesBody) -> Mapping[str, Any]:
        """Queues a response; returns it. `written` is the body as it came. Raises NoCapacity or Unavailable."""
        tenant = request.tenant.name
        num, num_bytes = await self._responses.unfinished(tenant)
        if num >= _MOST_UNFINISHED or num_bytes + turn.num_bytes > _MOST_UNFINISHED_BYTES:
            bounds = f"{_MOST_UNFINISHED} responses or {_MOST_UNFINISHED_BYTES >> 20} MiB"
            message = f"more than {bounds} would be in the background: wait for some, or cancel them"
            raise NoCapacity(message, retry_after_ms=10_000)
        body = written.model_dump(mode="json", by_alias=True, exclude_unset=True)
        job = {"body": body, "class": request.qos.name, "stream": bool(written.stream)}
        response = _queued(turn, request)
        await self._conversations.put(turn, tenant, response, "queued", job)
        self.tasks.wake()
        return (await self._responses.get(turn.response_id, tenant, datetime.now(UTC))).response

    async def cancel(self, stored: StoredResponse) -> Mapping[str, Any]:
        """The response, cancelled if it was not finished. Raises InvalidRequest for one that a client waited for."""
        if stored.job is None:
            raise InvalidRequest("Cannot cancel a synchronous response: only one with background: true.")
        if stored.is_finished:
            return stored.response
        response = {**stored.response, "status": "cancelled"}
        is_changed = await self._responses.change(stored.id, "cancelled", response)
        self.tasks.end(stored.id)
        if is_changed:
            return response
        return (await self._responses.get(stored.id, stored.tenant, datetime.now(UTC))).response

    async def events(self, stored: StoredResponse, start: int) -> AsyncIterator[Sequence[dict[str, Any]]]:
        """The events of a response that was made with `stream: true`, from number `start` on, until its end.

        Raises InvalidRequest for others, and NotFound once it is deleted.
        """
        if stored.job is None or not stored.job["stream"]:
            message = "stream: this response was not made with background: true and stream: true; ask for it as a whole"
            raise InvalidRequest(message, param="stream")
        while True:
            latest = await self._responses.get(stored.id, stored.tenant, datetime.now(UTC))
            while events := await self._responses.events(stored.id, start):
                start = events[-1]["sequence_number"] + 1
                yield events
            if latest.is_finished:
                return
            await asyncio.sleep(_LOOK_S)

    async def _run(self, response_id: str) -> None:
        stored = await self._responses.claimed(response_id, self._gateway_id)
        if stored is None or stored.job is None:
            return
        log_of = _EventLog(self._responses, response_id) if stored.job["stream"] else None
        try:
            response = await self._answer(stored, log_of)
        except HalfmoonError as error:
            response = _failed(stored, error)
        except Exception:
            log.exception("background.failed", extra={"response_id": response_id})
            response = _failed(stored, HalfmoonError("internal error: see the gateway's log"))
        finally:
            if log_of is not None:
                await log_of.close()
        if log_of is not None:
            await log_of.finish(response)
        await self._finish(stored, response)

    async def _finish(self, stored: StoredResponse, response: dict[str, Any]) -> None:
        """Writes the end of a response, however long the ledger takes to answer."""
        num_bytes = len(json.dumps(response))
        status: ResponseStatus = response["status"]
        while True:
            try:
                await self._responses.change(stored.id, status, response, holder=self._gateway_id, num_bytes=num_bytes)
                return
            except Unavailable:
                await asyncio.sleep(POLL_S)

    async def _answer(self, stored: StoredResponse, log_of: _EventLog | None) -> dict[str, Any]:
        """The finished response; waits for capacity. Raises HalfmoonError."""
        if stored.num_claims > _MOST_CLAIMS:
            raise HalfmoonError(f"{_MOST_CLAIMS} gateways died while they ran this response; send it again")
        begun = {**stored.response, "status": "in_progress"}
        await self._responses.change(stored.id, "in_progress", begun, holder=self._gateway_id)
        job: Mapping[str, Any] = stored.job or {}
        detached = DetachedRequest(
            request_id=stored.id,
            endpoint="responses",
            raw=json.dumps(job["body"]).encode(),
            tenant=self._tenant_named(stored.tenant),
            qos=self._class_named(job["class"]),
            created_at=stored.response["created_at"],  # the row was made a moment later
            may_be_held=stored.status != "queued",
            response_id=stored.id,
        )
        while True:
            events = None if log_of is None else log_of.begin()
            try:
                response = await self._run_detached(detached, events)
                return {**response, "background": True}
            except (NoCapacity, Unavailable) as error:
                if datetime.now(UTC) > stored.created_at + _LONGEST_WAIT:
                    raise
                pause_s = min((error.retry_after_ms or 1_000) / 1_000, _LONGEST_PAUSE_S)
                log.info("background.waits", extra={"response_id": stored.id, "reason": error.message})
                await asyncio.sleep(pause_s)


class _EventLog:
    """Writes the events of one response to the ledger, some at a time."""

    def __init__(self, responses: StoredResponses, response_id: str) -> None:
        self._responses = responses
        self._id = response_id
        self._events: list[dict[str, Any]] = []
        self._num_written = 0
        self._flushing: asyncio.Task[None] | None = None

    def begin(self) -> Callable[[Sequence[dict[str, Any]]], None]:
        """Takes the events of an attempt from their first on. What an earlier attempt wrote is not written again."""
        self._events = []
        self._num_written = 0
        return self._take

    async def finish(self, response: dict[str, Any]) -> None:
        """Writes the rest; a response that failed ends with an event that says so."""
        await self.close()
        with suppress(Unavailable):
            await self._write()
            if response["status"] == "failed":
                number = await self._responses.num_events(self._id)
                failed = {"type": "response.failed", "sequence_number": number, "response": response}
                await self._responses.add_events(self._id, number, [failed])

    async def close(self) -> None:
        """Writes nothing more by itself."""
        if self._flushing is not None:
            await cancelled(self._flushing)

    def _take(self, events: Sequence[dict[str, Any]]) -> None:
        self._events += events
        if self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(self._flush())

    async def _flush(self) -> None:
        await asyncio.sleep(_FLUSH_S)
        with suppress(Unavailable):
            await self._write()

    async def _write(self) -> None:
        new = self._events[self._num_written :]
        if new:
            first, self._num_written = self._num_written, len(self._events)
            try:
                await self._responses.add_events(self._id, first, new)
            except (Unavailable, asyncio.CancelledError):  # `finish` ends a flush; what is there already is not added
                self._num_written = first
                raise


def _queued(turn: Turn, request: GatewayRequest) -> dict[str, Any]:
    """A response that has not begun."""
    body = turn.body
    return {
        "id": turn.response_id,
        "object": "response",
        "created_at": int(request.created_at.timestamp()),
        "model": request.model,
        "status": "queued",
        "background": True,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "metadata": body.metadata or {},
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False and bool(body.tools),
        "previous_response_id": body.previous_response_id,
        "store": True,
        "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
        "tool_choice": "auto",
        "usage": None,
    }


def _failed(stored: StoredResponse, error: HalfmoonError) -> dict[str, Any]:
    code = kind_of(error).code or "invalid_request_error"
    return {**stored.response, "status": "failed", "error": {"code": code, "message": error.message}}
