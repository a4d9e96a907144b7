"""Edits of classes do not overwrite each other."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from sqlalchemy import create_engine

from halfmoon.errors import Unavailable
from halfmoon.ledger.classes import StoredClass, StoredClasses, VersionConflict
from halfmoon.ledger.ledger import open_ledger


async def test_versions_guard_against_lost_edits(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'ledger.db'}"
    async with open_ledger(url) as ledger:
        classes = ledger.classes
        assert await classes.put("gold", {"ttft_s": 1.0}, 0) == 1
        assert await classes.put("gold", {"ttft_s": 2.0}, 1) == 2
        for stale in (0, 1, 3):
            with pytest.raises(VersionConflict):
                await classes.put("gold", {"ttft_s": 9.0}, stale)
        with pytest.raises(VersionConflict):
            await classes.put("never", {}, 4)
        with pytest.raises(VersionConflict):
            await classes.remove("gold", 1)
    async with open_ledger(url) as again:
        assert await again.classes.all() == [StoredClass("gold", 2, {"ttft_s": 2.0})]
        await again.classes.remove("gold", 2)
        assert await again.classes.all() == []


async def test_of_edits_at_once_one_wins(tmp_path: Path) -> None:
    async with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        await ledger.classes.put("gold", {}, 0)
        edits = [ledger.classes.put("gold", {"by": number}, 1) for number in range(5)]
        results = await asyncio.gather(*edits, return_exceptions=True)
        (stored,) = await ledger.classes.all()
    assert sorted(map(str, map(type, results))).count("<class 'int'>") == 1
    assert stored.definition == {"by": results.index(2)}
    assert sum(isinstance(one, VersionConflict) for one in results) == 4


async def test_a_database_that_does_not_answer(tmp_path: Path) -> None:
    classes = StoredClasses(create_engine(f"sqlite:///{tmp_path / 'empty.db'}"))
    with pytest.raises(Unavailable):
        await classes.all()
