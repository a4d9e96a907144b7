"""The processes of the sandbox, and whose turn it is to ask them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, Self

from halfmoon.errors import ServiceFailed
from services.gateway.sandbox.sandbox_process import SandboxProcess
from services.gateway.sandbox.tenant_turns import TenantTurns

log = logging.getLogger(__name__)

_NUM_PROCESSES = 2
_MOST_WAIT_S = 10.0  # for a process

Ask = Callable[[Mapping[str, Any]], Awaitable[dict[str, Any]]]
"""Answers a question. Raises ServiceFailed if the process died of it."""


class Sandbox:
    """Owns the processes, started when first needed."""

    def __init__(self) -> None:
        self._turns = TenantTurns(_NUM_PROCESSES)
        self._idle: list[SandboxProcess] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        while self._idle:
            await self._idle.pop().end()

    @asynccontextmanager
    async def turn(self, tenant: str) -> AsyncIterator[Ask]:
        """Inside the block, the caller may ask. Raises Unavailable after ten seconds of waiting for it."""
        async with self._turns.turn(tenant, _MOST_WAIT_S):
            yield self._answer

    async def _answer(self, question: Mapping[str, Any]) -> dict[str, Any]:
        """If a process that answered others before dies, a fresh one tries: it may have died of those."""
        while True:
            process = self._idle.pop() if self._idle else await SandboxProcess.start()
            was_fresh = process.is_fresh
            try:
                answer = await process.answer(question)
            except ServiceFailed as death:
                log.warning("sandbox.died", extra={"asked": sorted(question), "reason": death.message})
                if was_fresh:
                    raise
                continue
            self._idle.append(process)
            return answer
