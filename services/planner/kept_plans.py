"""Stores plans in a ledger that may have been unavailable when the planner started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from halfmoon.ledger.ledger import Ledger
from halfmoon.ledger.plans import NewPlan, StoredPlan


class KeptPlans(Protocol):
    """A store of plans. Its methods raise Unavailable while it does not answer."""

    async def add(self, plan: NewPlan) -> StoredPlan: ...

    async def newest(self, limit: int) -> Sequence[StoredPlan]: ...

    async def of_id(self, plan_id: int) -> StoredPlan: ...


class PlansOfLedger:
    """The ledger's table of plans. Joins the ledger at the first use that it answers."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    async def add(self, plan: NewPlan) -> StoredPlan:
        """Stores a new plan."""
        await self._ledger.join()
        return await self._ledger.plans.add(plan)

    async def newest(self, limit: int) -> Sequence[StoredPlan]:
        """Returns at most `limit` plans, newest first."""
        await self._ledger.join()
        return await self._ledger.plans.newest(limit)

    async def of_id(self, plan_id: int) -> StoredPlan:
        """Returns one plan. Raises NotFound."""
        await self._ledger.join()
        return await self._ledger.plans.of_id(plan_id)
