"""Decisions of the autopilot and its mode, as both databases tell them."""

from __future__ import annotations

from datetime import timedelta

import pytest

from halfmoon.ledger.edits.stored_classes import VersionConflict
from halfmoon.ledger.history.autopilot_decisions import StoredDecision
from halfmoon.ledger.ledger import open_ledger
from tests.ledger.rows import WHEN

CHANGE = StoredDecision(
    WHEN, "act", "change_role", "decode needs more workers", "p0", "prefill", "decode", "2:1:0", "1:2:0", 0,
    0.2, 1.4, 0.4, 0.7, 0.5, "done",
)  # fmt: skip
CANNOT = CHANGE._replace(action="cannot_be_met", worker_id="", before="", after="", num_needed=5, attainment=None)


async def test_what_was_measured_comes_later(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as ledger:
        first = await ledger.autopilot_decisions.add(CHANGE)
        await ledger.autopilot_decisions.add(CANNOT)
        later = WHEN + timedelta(seconds=20)
        await ledger.autopilot_decisions.measured(first, later, 0.45, 0.8, 0.9)
        measured = CHANGE._replace(
            measured_at=later, measured_prefill=0.45, measured_decode=0.8, measured_attainment=0.9
        )
        assert await ledger.autopilot_decisions.newest(9) == [CANNOT, measured]
        assert await ledger.autopilot_decisions.newest(1) == [CANNOT]


async def test_the_newest_mode_counts(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as ledger:
        await ledger.autopilot.put("act", 0)
        with pytest.raises(VersionConflict, match="the autopilot's mode has another version by now than 0"):
            await ledger.autopilot.put("off", 0)
        await ledger.autopilot.put(None, 1)
        assert [edit.mode for edit in await ledger.autopilot.newest(9)] == [None, "act"]
        assert not await ledger.admission.newest(1)
