"""Classes of a configuration and edits of operators: which of the two is in force."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from sqlalchemy import text

from halfmoon.errors import InvalidRequest
from halfmoon.ledger.connection.database import make_engine
from halfmoon.ledger.edits.declared_classes import Declaration
from halfmoon.ledger.edits.stored_classes import StoredClass, StoredClasses
from halfmoon.ledger.ledger import open_ledger
from tests.ledger.connection.test_upgrade import upgraded_to

FILE = {"gold": Declaration({"ttft_s": 1.0})}
CHANGED = {"gold": Declaration({"ttft_s": 2.0})}
BUILT_IN = {"default": Declaration({"ttft_s": 30.0}, is_built_in=True)}


async def started(classes: StoredClasses, declarations: dict[str, Declaration]) -> dict[str, object]:
    """What is in force after a start with these."""
    found = await classes.declare(declarations, len)
    assert found == await classes.all()
    return {one.name: one.definition["ttft_s"] for one in found.classes}


async def edit(classes: StoredClasses, name: str, ttft_s: float) -> None:
    version = next((one.version for one in (await classes.all()).classes if one.name == name), 0)
    await classes.put(name, {"ttft_s": ttft_s}, version, len)


async def remove(classes: StoredClasses, name: str) -> None:
    (version,) = (one.version for one in (await classes.all()).classes if one.name == name)
    await classes.remove(name, version, len)


async def test_a_class_of_the_file_is_written_once_and_again_when_its_text_changes(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as ledger:
        classes = ledger.classes
        assert await started(classes, FILE) == {"gold": 1.0}
        revision = await classes.revision()
        assert await started(classes, FILE) == {"gold": 1.0}
        assert await classes.revision() == revision, "a start without news is no edit"
        await edit(classes, "gold", 7.0)
        assert await started(classes, FILE) == {"gold": 7.0}, "the operator's later edit stays"
        assert await started(classes, CHANGED) == {"gold": 2.0}, "until the text changes"
        assert await started(classes, FILE) == {"gold": 1.0}, "back, too"
        assert (await classes.all()).classes[0].version == 4


async def test_a_new_field_is_no_news_of_the_text(ledger_url: str) -> None:
    engine = make_engine(ledger_url)
    async with engine.begin() as connection:
        await connection.run_sync(upgraded_to, "0012")
        for statement in (
            "INSERT INTO qos_classes (name, version, definition) VALUES ('gold', 3, '{\"ttft_s\"\\: 7.0}')",
            "INSERT INTO declared_classes (name, definition) VALUES ('gold', '{\"ttft_s\"\\: 1.0}')",
        ):
            await connection.execute(text(statement))
    await engine.dispose()
    async with open_ledger(ledger_url) as ledger:
        declared = {"gold": Declaration({"ttft_s": 1.0, "max_pause_s": 0.0, "kv_policy": None})}
        assert await started(ledger.classes, declared) == {"gold": 7.0}


async def test_what_an_operator_removed_does_not_come_back_with_the_next_start(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as ledger:
        classes = ledger.classes
        for declared, name in ((FILE, "gold"), (BUILT_IN, "default")):
            assert name in await started(classes, declared)
            await remove(classes, name)
            assert name not in await started(classes, declared)
            assert name not in await started(classes, declared)


async def test_a_text_that_is_gone_takes_its_class_with_it_unless_an_operator_edited_that(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as ledger:
        classes = ledger.classes
        assert await started(classes, {**FILE, "lead": Declaration({"ttft_s": 9.0})}) == {"gold": 1.0, "lead": 9.0}
        await edit(classes, "gold", 7.0)
        assert await started(classes, {}) == {"gold": 7.0}


async def test_the_built_in_class_replaces_nothing_of_an_operator(ledger_url: str) -> None:
    later = {"default": Declaration({"ttft_s": 20.0}, is_built_in=True)}
    async with open_ledger(ledger_url) as ledger:
        classes = ledger.classes
        await edit(classes, "default", 3.0)
        assert await started(classes, BUILT_IN) == {"default": 3.0}
        await remove(classes, "default")
        assert await started(classes, later) == {}, "it was there, and somebody removed it"
        assert await started(classes, {"default": Declaration({"ttft_s": 5.0})}) == {"default": 5.0}, "a file may"
        assert await started(classes, later) == {"default": 20.0}, "what the file said is not an operator's"


async def test_slo_off_takes_the_built_in_class_away_and_without_it_it_is_there_again(ledger_url: str) -> None:
    async with open_ledger(ledger_url) as ledger:
        classes = ledger.classes
        assert await started(classes, BUILT_IN) == {"default": 30.0}
        assert await started(classes, {}) == {}
        assert await started(classes, {}) == {}
        assert await started(classes, BUILT_IN) == {"default": 30.0}


async def test_declarations_that_do_not_fit_change_nothing(ledger_url: str) -> None:
    def refuse(classes: Sequence[StoredClass]) -> None:
        raise InvalidRequest("more than everything")

    async with open_ledger(ledger_url) as ledger:
        with pytest.raises(InvalidRequest):
            await ledger.classes.declare(FILE, refuse)
        assert (await ledger.classes.all()).classes == []
        assert await started(ledger.classes, FILE) == {"gold": 1.0}
