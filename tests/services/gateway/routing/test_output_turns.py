"""The outputs of one request begin in turn, so that not all of them wait for their first tokens at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from halfmoon.errors import NoCapacity
from halfmoon.pb.prefill_pb2 import PrefillEvent, PrefillRequest
from halfmoon.policy.retries import MAX_REFUSALS
from services.gateway.routing import output_turns
from tests.services.gateway.fakes import MODEL, FakeWorker, Script, running_fleet, soon

AT_ONCE = 3
PROMPTS = ["a", "b", "c", "d", "e", "f", "g"]


@pytest.fixture(autouse=True)
def few_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output_turns, "MOST_BEGINNING", AT_ONCE)


@pytest.mark.parametrize("asked", [(PROMPTS, 1), ("x", 7)])
async def test_few_outputs_of_a_request_wait_for_their_first_tokens(
    tmp_path: Path, asked: tuple[list[str] | str, int]
) -> None:
    prompt, num = asked
    waiting, most, may_begin = set[str](), 0, asyncio.Event()
    num_alone = 1 if num > 1 else 0  # of several outputs of a prompt the first has its tokens before others begin

    async def counted(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        nonlocal most
        waiting.add(request.generation.request_id)
        most = max(most, len(waiting))
        if len(worker.calls.prefills) > num_alone:
            await may_begin.wait()
        waiting.remove(request.generation.request_id)
        async for event in worker.usual_prefill(request):
            yield event

    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script("ok"))
        prefill.on_prefill = counted
        asking = asyncio.ensure_future(fleet.client.completions.create(model=MODEL, prompt=prompt, n=num))
        await fleet.until_told(lambda: len(waiting) >= AT_ONCE)
        for _ in range(200):  # another one that may come has come
            await asyncio.sleep(0)
        may_begin.set()
        answer = await soon(asking)
    assert [choice.text for choice in answer.choices] == ["ok"] * 7
    assert most == AT_ONCE


async def test_outputs_wait_for_room_once_one_has_begun(tmp_path: Path) -> None:
    num_refusals = MAX_REFUSALS + 1  # more than a request alone waits for

    async def full_after_one(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        if 1 < len(worker.calls.prefills) <= 1 + num_refusals:
            raise NoCapacity("full", retry_after_ms=1)
        async for event in worker.usual_prefill(request):
            yield event

    async with running_fleet(tmp_path) as fleet:
        worker = await fleet.add("b0", "both", Script("hello"))
        worker.on_prefill = full_after_one
        answer = await soon(fleet.client.completions.create(model=MODEL, prompt="x", n=2))
        assert len(worker.calls.prefills) == 2 + num_refusals
    assert [choice.text for choice in answer.choices] == ["hello"] * 2


async def test_others_begin_while_those_before_them_decode(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        worker = await fleet.add("b0", "both", Script("hello"))
        worker.script.decode_gate = asyncio.Event()
        asking = asyncio.ensure_future(fleet.client.completions.create(model=MODEL, prompt=PROMPTS))
        await fleet.until_told(lambda: len(worker.calls.prefills) == len(PROMPTS))
        worker.script.decode_gate.set()
        answer = await soon(asking)
    assert [choice.text for choice in answer.choices] == ["hello"] * len(PROMPTS)
