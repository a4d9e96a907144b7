"""Checks constraints before a worker sees them, and remembers the results."""

from __future__ import annotations

from collections import OrderedDict
from hashlib import sha256

from halfmoon.engine.request import Constraint
from halfmoon.errors import InvalidRequest, ServiceFailed
from services.gateway.sandbox.sandbox import Ask, Sandbox

_MOST_RESULTS = 4_096
_MOST_CHARS = 1 << 20

_Key = tuple[str, bytes]


class ConstraintChecker:
    """Owns the latest results. Constraints are compiled in the sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._results: OrderedDict[_Key, str | None] = OrderedDict()

    async def check(self, constraint: Constraint, tenant: str) -> None:
        """Raises InvalidRequest, with the reason, for a constraint that cannot be used.

        Tenants take turns. Raises Unavailable if the tenant's does not come within ten seconds.
        """
        if len(constraint.source) > _MOST_CHARS:
            raise InvalidRequest(f"it has more than {_MOST_CHARS} characters")
        key = constraint.kind, sha256(constraint.source.encode(errors="surrogatepass")).digest()
        if key not in self._results:
            async with self._sandbox.turn(tenant) as ask:
                if key not in self._results:
                    self._results[key] = await _problem(constraint, ask)
                    if len(self._results) > _MOST_RESULTS:
                        self._results.popitem(last=False)
        self._results.move_to_end(key)
        problem = self._results[key]
        if problem is not None:
            raise InvalidRequest(problem)


async def _problem(constraint: Constraint, ask: Ask) -> str | None:
    try:
        problem: str | None = (await ask({"kind": constraint.kind, "source": constraint.source}))["problem"]
    except ServiceFailed:
        return (
            f"the {constraint.kind.replace('_', ' ')} cannot be used: it is too complex: compiling it takes "
            "more stack, memory or time than is allowed"
        )
    return problem
