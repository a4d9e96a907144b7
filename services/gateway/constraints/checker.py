"""Checks constraints before a worker sees them, and remembers the results."""

from __future__ import annotations

import logging
from collections import OrderedDict
from hashlib import sha256
from types import TracebackType
from typing import Self

from halfmoon.engine.request import Constraint
from halfmoon.errors import InvalidRequest, ServiceFailed
from services.gateway.constraints.check_process import CheckProcess
from services.gateway.constraints.tenant_turns import TenantTurns

log = logging.getLogger(__name__)

_NUM_PROCESSES = 2
_MOST_WAIT_S = 10.0  # for a process
_MOST_RESULTS = 4_096
_MOST_CHARS = 1 << 20

_Key = tuple[str, bytes]


class ConstraintChecker:
    """Owns the processes that compile constraints, started when first needed, and the latest results."""

    def __init__(self) -> None:
        self._turns = TenantTurns(_NUM_PROCESSES)
        self._idle: list[CheckProcess] = []
        self._results: OrderedDict[_Key, str | None] = OrderedDict()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        while self._idle:
            await self._idle.pop().end()

    async def check(self, constraint: Constraint, tenant: str) -> None:
        """Raises InvalidRequest, with the reason, for a constraint that cannot be used.

        Tenants take turns. Raises Unavailable if the tenant's does not come within ten seconds.
        """
        if len(constraint.source) > _MOST_CHARS:
            raise InvalidRequest(f"it has more than {_MOST_CHARS} characters")
        key = constraint.kind, sha256(constraint.source.encode(errors="surrogatepass")).digest()
        if key not in self._results:
            async with self._turns.turn(tenant, _MOST_WAIT_S):
                if key not in self._results:
                    self._results[key] = await self._problem(constraint)
                    if len(self._results) > _MOST_RESULTS:
                        self._results.popitem(last=False)
        self._results.move_to_end(key)
        problem = self._results[key]
        if problem is not None:
            raise InvalidRequest(problem)

    async def _problem(self, constraint: Constraint) -> str | None:
        """What a process says. If one that checked others before dies, a fresh one tries: it may have died of those."""
        while True:
            process = self._idle.pop() if self._idle else await CheckProcess.start()
            was_fresh = process.is_fresh
            try:
                problem = await process.problem(constraint)
            except ServiceFailed as death:
                log.warning("constraint.check_died", extra={"kind": constraint.kind, "reason": death.message})
                if not was_fresh:
                    continue
                return (
                    f"the {constraint.kind.replace('_', ' ')} cannot be used: it is too complex: compiling it takes "
                    "more stack, memory or time than is allowed"
                )
            self._idle.append(process)
            return problem
