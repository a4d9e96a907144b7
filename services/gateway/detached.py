"""Runs requests that no connection waits for: background responses, and lines of batches."""

from __future__ import annotations

import asyncio
from typing import Any

from halfmoon.errors import HalfmoonError, NoCapacity, Unavailable
from halfmoon.rpc.context import request_scope
from halfmoon.rpc.telemetry.spans import span_scope
from services.gateway.detached_request import DetachedRequest, OnEvents
from services.gateway.generation import Generation, ReadBody
from services.gateway.http.drain_gate import DrainGate
from services.gateway.http.request_ids import digest
from services.gateway.openai.bodies.responses_body import ResponsesBody
from services.gateway.repeatable import RepeatableRequest
from services.gateway.replies.replies import EventReply
from services.gateway.request import GatewayRequest
from services.gateway.responses.conversations import Conversations
from services.gateway.telemetry.request_record import RequestRecorder

_CANCELLED = 499  # only the ledger sees it


class DetachedRuns:
    """Runs each request as one with an id of its client: whoever runs it again goes on where it was. Owns nothing."""

    def __init__(
        self,
        generation: Generation,
        conversations: Conversations,
        recorder: RequestRecorder,
        drain_gate: DrainGate,
    ) -> None:
        self._generation = generation
        self._conversations = conversations
        self._recorder = recorder
        self._drain_gate = drain_gate

    async def run(self, detached: DetachedRequest, on_events: OnEvents | None = None) -> dict[str, Any]:
        """Runs one: `RunDetached`. Records it, unless it has to be run again."""
        recorder = self._recorder
        with request_scope(detached.request_id):
            request = recorder.begin_detached(detached)
            try:
                with self._drain_gate.inside(), recorder.in_flight(), span_scope(request.span):
                    response = await self._run(request, detached, on_events)
            except (NoCapacity, Unavailable):
                recorder.postpone(request)
                raise
            except HalfmoonError as error:
                recorder.fail(request, error)
                raise
            except asyncio.CancelledError:
                recorder.end(request, "cancelled", _CANCELLED, "cancelled")
                raise
            except Exception:
                recorder.end(request, "error", 500, "internal error")
                raise
            recorder.end(request)
            return response

    async def _run(
        self, request: GatewayRequest, detached: DetachedRequest, on_events: OnEvents | None
    ) -> dict[str, Any]:
        generation = self._generation
        body, _ = await generation.parse(request, detached.raw)
        generation.identify(request, body, None)
        key = digest("detached", detached.request_id, detached.tenant.name)
        request.repeat = RepeatableRequest(key, digest(detached.raw.decode(errors="replace")), detached.created_at)
        read, turn = ReadBody(body, len(detached.raw)), None
        if isinstance(body, ResponsesBody):
            turn = await self._conversations.begin(request, body, len(detached.raw), detached.response_id)
            read = ReadBody(turn.body, turn.num_bytes)
        await generation.prepare(request, read, finds=detached.may_be_held)
        if on_events is not None:
            events = EventReply(generation.reply_format(request), request.usage, on_events)
            await generation.run(request, events)
            return events.finish()
        reply = generation.whole_reply(request)
        await generation.run(request, reply)
        response = reply.body(request.generation.num_choices, request.generation.best_of)
        if turn is not None and turn.is_kept and detached.response_id is None:
            await self._conversations.keep(turn, request.tenant.name, response)
        return response
