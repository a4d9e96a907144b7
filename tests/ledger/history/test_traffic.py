"""What was asked lately, as both databases tell it."""

from __future__ import annotations

from datetime import timedelta

from halfmoon.ledger.history.traffic import Arrival
from halfmoon.ledger.ledger import open_ledger
from tests.ledger.rows import WHEN, row


async def test_arrivals_in_their_order_without_failures(ledger_url: str) -> None:
    at = [WHEN + timedelta(seconds=number) for number in range(6)]
    async with open_ledger(ledger_url) as ledger:
        ledger.record(row(1, created_at=at[1], prompt_tokens=10, output_tokens=12, num_outputs=3, status="ok"))
        ledger.record(row(0, created_at=at[0], prompt_tokens=9, output_tokens=1, num_outputs=1, status="ok"))
        ledger.record(row(2, created_at=at[2], prompt_tokens=11, output_tokens=0, num_outputs=None, status="rejected"))
        ledger.record(row(3, created_at=at[3], prompt_tokens=12, status="error"))
        ledger.record(row(4, created_at=at[4], prompt_tokens=0, status="ok"))
        ledger.record(
            row(5, created_at=at[5], prompt_tokens=0, output_tokens=0, status="rejected", refused_unread=True)
        )
    async with open_ledger(ledger_url) as again:
        found = await again.traffic.since(at[1], 9)
        assert found == [Arrival(at[1], 10, 4), Arrival(at[2], 11, 0), Arrival(at[5], 0, 0)]
        assert await again.traffic.since(at[0], 1) == [Arrival(at[5], 0, 0)]
