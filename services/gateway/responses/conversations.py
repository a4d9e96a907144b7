"""Conversations that clients go on with by the id of their last response."""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from halfmoon.errors import InvalidRequest, Unavailable
from halfmoon.ledger.kept.stored_responses import StoredResponse, StoredResponses, expiry
from services.gateway.http.error_responses import PreviousNotFound, shortened
from services.gateway.http.request_ids import digest
from services.gateway.openai.bodies.responses_body import Item, ResponsesBody
from services.gateway.request import GatewayRequest
from services.gateway.responses.items import input_items, parsed_items, shown_items

log = logging.getLogger(__name__)

KeepMode = Literal["default", "asked", "off"]

MOST_TURNS = 1_000  # of a conversation
_MOST_ITEMS = 10_000
_QUICK_ITEMS = 200  # read on the event loop
_CONTINUED = ("completed", "incomplete")


@dataclass(frozen=True, slots=True)
class Turn:
    """A request of a conversation: what the model gets, and what will be kept of it."""

    body: ResponsesBody  # with all earlier turns in its input
    num_bytes: int  # of all of it
    response_id: str
    input: Sequence[dict[str, Any]]  # this turn's own
    previous: Sequence[str] = ()  # ids of the turns before, oldest first
    is_kept: bool = False


class Conversations:
    """Reads and keeps turns. Owns nothing."""

    def __init__(
        self,
        responses: StoredResponses,
        mode: KeepMode,
        keep_days: float,
    ) -> None:
        """`mode`: whether a response is kept by default, where a request asks for it, or never."""
        self._responses = responses
        self._mode = mode
        self._keep_days = keep_days

    async def begin(
        self, request: GatewayRequest, body: ResponsesBody, num_bytes: int, response_id: str | None = None
    ) -> Turn:
        """The turn that a body asks for; `response_id` is that of a response that is kept already.

        Raises InvalidRequest, PreviousNotFound, and Unavailable when the ledger does not answer.
        """
        is_kept = self._is_kept(body)
        if body.background and not is_kept:
            why = "store must not be false" if self._mode == "default" else "send store: true"
            raise InvalidRequest(f"background responses have to be kept: {why}", param="background")
        key = response_id.removeprefix("resp_") if response_id else _key(request) if is_kept else request.request_id
        request.reply_id, request.is_kept = key, is_kept
        own = input_items(body)
        turns = await self._turns(body, request.tenant.name)
        kept = [item for turn in turns for item in (*turn.input, *turn.response["output"])]
        before = await _parsed(kept)
        if len(before) + len(own) > _MOST_ITEMS:
            raise InvalidRequest(f"the conversation has more than {_MOST_ITEMS} items: begin another", param="input")
        whole = body.model_copy(update={"store": is_kept, "input": [*before, *own] if before else body.input})
        return Turn(
            body=whole,
            num_bytes=num_bytes + sum(turn.num_bytes for turn in turns),
            response_id=f"resp_{key}",
            input=shown_items(own, key) if is_kept else (),
            previous=[turn.id for turn in turns],
            is_kept=is_kept,
        )

    async def keep(self, turn: Turn, tenant: str, response: dict[str, Any]) -> None:
        """Keeps a finished response. Where the ledger does not answer it says `store: false`, and is not kept."""
        try:
            await self.put(turn, tenant, response, response["status"])
        except Unavailable as error:
            response["store"] = False
            log.warning("response.not_kept", extra={"response_id": turn.response_id, "reason": error.message})

    async def put(
        self, turn: Turn, tenant: str, response: dict[str, Any], status: str, job: dict[str, Any] | None = None
    ) -> None:
        """Adds a response, unless it is there. Raises Unavailable."""
        now = datetime.now(UTC)
        stored = StoredResponse(
            id=turn.response_id,
            tenant=tenant,
            previous_id=turn.previous[-1] if turn.previous else None,
            status=status,
            created_at=now,
            expires_at=expiry(now, self._keep_days),
            num_bytes=len(json.dumps([list(turn.input), response, job])),
            input=turn.input,
            response=response,
            job=job,
        )
        await self._responses.put(stored, renewed=turn.previous)

    def _is_kept(self, body: ResponsesBody) -> bool:
        if self._mode == "off" and (body.previous_response_id or body.background):
            param = "previous_response_id" if body.previous_response_id else "background"
            why = "no responses are kept here (gateway.store_responses is off); send the whole conversation as input"
            raise InvalidRequest(f"{param}: {why}", param=param)
        if self._mode == "off":
            return False
        return body.store is True or (body.store is None and self._mode == "default")

    async def _turns(self, body: ResponsesBody, tenant: str) -> Sequence[StoredResponse]:
        """All turns before this one, oldest first."""
        wanted = body.previous_response_id
        if wanted is None:
            return ()
        turns = await self._responses.chain(wanted, tenant, datetime.now(UTC), MOST_TURNS)
        if not turns:
            raise _not_found(f"Previous response with id {shortened(wanted, 80)!r} not found.")
        for turn in turns:
            if turn.status not in _CONTINUED:
                message = f"the response {turn.id} is {turn.status}: go on from one that is completed"
                raise InvalidRequest(message, param="previous_response_id")
        if turns[0].previous_id is not None and len(turns) < MOST_TURNS:
            raise _not_found(
                f"the conversation of {shortened(wanted, 80)!r} is broken: its turn {turns[0].previous_id}, which "
                f"{turns[0].id} went on from, was deleted; send the conversation as input"
            )
        if turns[0].previous_id is not None:
            message = f"the conversation has more than {MOST_TURNS} turns: begin another"
            raise InvalidRequest(message, param="previous_response_id")
        return turns


def _not_found(message: str) -> PreviousNotFound:
    return PreviousNotFound(message, param="previous_response_id")


def _key(request: GatewayRequest) -> str:
    """What a response's id is made of: nobody can choose or guess it, and a repeat of the request has the same."""
    repeat = request.repeat
    if repeat is None:
        return secrets.token_hex(24)
    return digest("response", repeat.key.hex(), repeat.body_digest.hex()).hex()


async def _parsed(kept: list[Any]) -> list[Item]:
    return parsed_items(kept) if len(kept) <= _QUICK_ITEMS else await asyncio.to_thread(parsed_items, kept)
