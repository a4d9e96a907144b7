"""Edits of classes do not overwrite each other, whoever makes them."""

from __future__ import annotations

import asyncio

import pytest

from halfmoon.errors import InvalidRequest
from halfmoon.ledger.edits.stored_classes import ClassesAt, StoredClass, StoredClasses, VersionConflict
from halfmoon.ledger.ledger import open_ledger


async def put(classes: StoredClasses, name: str, definition: dict[str, object], version: int) -> int:
    found = await classes.put(name, definition, version, len)
    return next(one.version for one in found.classes if one.name == name)


async def test_versions_guard_against_lost_edits(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as ledger:
        classes = ledger.classes
        assert await put(classes, "gold", {"ttft_s": 1.0}, 0) == 1
        assert await put(classes, "gold", {"ttft_s": 2.0}, 1) == 2
        for stale in (0, 1, 3):
            with pytest.raises(VersionConflict, match="has version 2 by now"):
                await put(classes, "gold", {"ttft_s": 9.0}, stale)
        with pytest.raises(VersionConflict, match="not there"):
            await put(classes, "never", {}, 4)
        with pytest.raises(VersionConflict):
            await classes.remove("gold", 1, len)
        assert await classes.revision() == 2  # of the others nothing is left
    async with open_ledger(ledger_url) as again:
        assert await again.classes.all() == ClassesAt(2, [StoredClass("gold", 2, {"ttft_s": 2.0})])
        assert await again.classes.remove("gold", 2, len) == ClassesAt(3, [])
        assert await again.classes.all() == ClassesAt(3, [])


async def test_of_edits_at_once_one_wins(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as one, open_ledger(ledger_url) as other:
        await put(one.classes, "gold", {}, 0)
        edits = [put((one, other)[number % 2].classes, "gold", {"by": number}, 1) for number in range(6)]
        results = await asyncio.gather(*edits, return_exceptions=True)
        (stored,) = (await one.classes.all()).classes
    assert sorted(map(str, map(type, results))).count("<class 'int'>") == 1
    assert stored.definition == {"by": results.index(2)}
    assert sum(isinstance(result, VersionConflict) for result in results) == 5


async def test_classes_that_fit_alone_and_not_together_are_not_both_made(ledger_url: str) -> None:
    def check(classes: object) -> None:
        assert isinstance(classes, list)
        if sum(one.definition["reserved"] for one in classes) > 1:
            raise InvalidRequest("more than everything")

    async with open_ledger(ledger_url) as one, open_ledger(ledger_url) as other:
        edits = [
            ledger.classes.put(name, {"reserved": 0.6}, 0, check) for name, ledger in (("gold", one), ("lead", other))
        ]
        results = await asyncio.gather(*edits, return_exceptions=True)
        assert len((await one.classes.all()).classes) == 1
    assert sum(isinstance(result, InvalidRequest) for result in results) == 1
