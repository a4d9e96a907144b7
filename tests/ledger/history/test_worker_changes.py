"""Who changed which worker, as both databases tell it."""

from __future__ import annotations

from halfmoon.ledger.history.worker_changes import WorkerChange
from halfmoon.ledger.ledger import open_ledger
from tests.ledger.rows import WHEN


async def test_the_newest_first(ledger_url: str) -> None:
    changes = [
        WorkerChange(WHEN, "d0", "decode", "prefill", 1, "ann@host", False, "g"),
        WorkerChange(WHEN, "d0", "prefill", "drained", 1, "console", True, "g"),
    ]
    async with open_ledger(ledger_url) as ledger:
        for change in changes:
            await ledger.worker_changes.add(change)
    async with open_ledger(ledger_url) as again:
        assert await again.worker_changes.newest(9) == changes[::-1]
        assert await again.worker_changes.newest(1) == changes[1:]
