"""Renders chat templates that come with requests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from halfmoon.errors import InvalidRequest, ServiceFailed
from services.gateway.sandbox.sandbox import Sandbox
from services.gateway.sandbox.tenant_turns import TenantTurns

_TURNS = ""  # templates of all tenants have one's turns at the processes: schemas never wait for more than one of them
_MOST_WAIT_S = 10.0  # for the other tenants' templates


class RequestTemplates:
    """Owns whose template is next. Renders them in the sandbox, for threads. Belongs to one event loop."""

    def __init__(self, sandbox: Sandbox, loop: asyncio.AbstractEventLoop) -> None:
        self._sandbox = sandbox
        self._loop = loop
        self._turns = TenantTurns(1)

    def render(self, tenant: str, source: str, variables: Mapping[str, Any]) -> str:
        """The text, as soon as it is the tenant's turn: not to be called on the event loop.

        Raises InvalidRequest for a template that fails, or needs more time or memory than is allowed, and Unavailable
        if the turn does not come within ten seconds.
        """
        return asyncio.run_coroutine_threadsafe(self._rendered(tenant, source, variables), self._loop).result()

    async def _rendered(self, tenant: str, source: str, variables: Mapping[str, Any]) -> str:
        try:
            async with self._turns.turn(tenant, _MOST_WAIT_S), self._sandbox.turn(_TURNS) as ask:
                answer = await ask({"template": source, "variables": variables})
        except ServiceFailed:
            why = "chat_template: rendering it takes more time or memory than is allowed"
            raise InvalidRequest(why, param="chat_template") from None
        if "text" not in answer:
            raise InvalidRequest(f"chat_template: {answer['problem']}", param="chat_template")
        text: str = answer["text"]
        return text
