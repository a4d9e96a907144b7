"""When workers are asked for the answer to an id, and when a gateway knows that there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.gateway.cluster import held_answers
from services.gateway.cluster.held_answers import HeldAnswers
from services.gateway.cluster.seen_ids import SeenIds
from tests.services.gateway.fakes import running_fleet


@pytest.mark.parametrize(
    ("num_gateways", "keep_answers_s", "is_old", "asks"),
    [
        (1, 60.0, True, False),
        (1, 60.0, False, True),  # it may have been restarted
        (1, 1e12, True, True),
        (2, 60.0, True, True),
        (0, 0.0, True, True),  # workers of an earlier release do not say
    ],
)
async def test_workers_are_asked_where_others_may_have_begun_the_answer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_gateways: int,
    keep_answers_s: float,
    is_old: bool,
    asks: bool,
) -> None:
    monkeypatch.setattr(held_answers, "_ASK_S", 60.0)  # however busy the machine is
    async with running_fleet(tmp_path) as fleet:
        said: dict[str, Any] = {"num_gateways": num_gateways, "keep_answers_s": keep_answers_s}
        worker = await fleet.add("b0", "both", **said)
        seen = SeenIds(-1e9 if is_old else fleet.cluster.clock())
        held = HeldAnswers(fleet.cluster, 0.0, 600.0, seen)
        assert await held.find(b"new", is_meant=True) == []
        assert worker.calls.finds == ([b"new"] if asks else [])
        await held.find(b"new", is_meant=False)
        assert worker.calls.finds[-1:] == [b"new"], "what came before is looked for"


async def test_a_worker_that_does_not_answer_holds_up_no_id_of_a_proxy(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        worker = await fleet.add("b0", "both", num_gateways=2)
        worker.finds_answered.clear()
        held = HeldAnswers(fleet.cluster, 0.0, 600.0)
        assert await held.find(b"traced", is_meant=False) == []
        assert worker.calls.finds == [b"traced"]
        worker.finds_answered.set()


def test_what_was_forgotten_may_have_been_there() -> None:
    seen = SeenIds(0.0, max_ids=2)
    assert [seen.note(key, at_s) for key, at_s in ((b"a", 1.0), (b"b", 2.0), (b"a", 3.0))] == [False, False, True]
    assert seen.has_all_since(0.0)
    assert not seen.note(b"c", 4.0)
    assert (seen.has_all_since(1.9), seen.has_all_since(2.0)) == (False, True)
    assert not seen.note(b"b", 5.0)
