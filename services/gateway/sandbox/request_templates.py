"""Renders chat templates that come with requests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from halfmoon.errors import InvalidRequest, ServiceFailed
from services.gateway.sandbox.sandbox import Sandbox

_TURNS = ""  # templates of all tenants have one's turns: schemas never wait for more than one of them


class RequestTemplates:
    """Renders them in the sandbox, for threads. Belongs to one event loop."""

    def __init__(self, sandbox: Sandbox, loop: asyncio.AbstractEventLoop) -> None:
        self._sandbox = sandbox
        self._loop = loop

    def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """The text, as soon as there is time for it: not to be called on the event loop.

        Raises InvalidRequest for a template that fails, or needs more time or memory than is allowed.
        """
        return asyncio.run_coroutine_threadsafe(self._rendered(source, variables), self._loop).result()

    async def _rendered(self, source: str, variables: Mapping[str, Any]) -> str:
        try:
            async with self._sandbox.turn(_TURNS) as ask:
                answer = await ask({"template": source, "variables": variables})
        except ServiceFailed:
            why = "chat_template: rendering it takes more time or memory than is allowed"
            raise InvalidRequest(why, param="chat_template") from None
        if "text" not in answer:
            raise InvalidRequest(f"chat_template: {answer['problem']}", param="chat_template")
        text: str = answer["text"]
        return text
