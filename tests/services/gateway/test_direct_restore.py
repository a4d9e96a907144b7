"""A request that lost its decode worker goes on at another one that restores it from the pool, if that is quicker."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal

import aiohttp
import pytest

from halfmoon.errors import NoCapacity
from halfmoon.pb.gateway_pb2 import BlockEvents, DecisionCount, LatencyProfile, WorkerLoad
from halfmoon.pb.prefill_pb2 import KVSource
from tests.services.gateway.cluster.test_store_watch import KEYS
from tests.services.gateway.fakes import MODEL, FakeWorker, Fleet, Script, running_fleet, soon
from tests.services.gateway.test_gateway_admission import PROMPT
from tests.services.gateway.test_prompts_kept import decisions

MODELLED = LatencyProfile(kind="fake", prefill=[0.0, 1.0, 0.0], step=[1.0, 0.0, 0.0])  # slow: a pause changes nothing
KNOWN: dict[str, Any] = {"profile": MODELLED, "step_tokens": 512, "chunk_tokens": 64, "can_fetch": True}
HELD = b"".join(key[:8] for key in KEYS[:6])


async def holder(fleet: Fleet, name: str = "p0", *, waiting: int = 1000, role: Any = "prefill") -> FakeWorker:
    """A busy worker that has most of the prompt."""
    worker = await fleet.add(name, role, **KNOWN)
    worker.loads.put_nowait(BlockEvents(sequence=1, is_snapshot=True, stored=HELD))
    worker.loads.put_nowait(WorkerLoad(sequence=1, free_blocks=100, waiting_prefill_tokens=waiting))
    membership, number = fleet.cluster.membership, fleet.cluster.worker(name).member.holder
    await fleet.until_told(lambda: membership.index.num_blocks(number) == 6)
    await fleet.until_told(lambda: fleet.cluster.worker(name).member.load.free_blocks == 100)
    return worker


class Gate(asyncio.Event):
    """A gate that stays shut and says when somebody stands before it."""

    def __init__(self) -> None:
        super().__init__()
        self.reached = asyncio.Event()

    async def wait(self) -> Literal[True]:
        self.reached.set()
        return await super().wait()


def silent(num_tokens: int = 2) -> Script:
    return Script("hello", Gate(), tokens_before_gate=num_tokens)


async def dying(fleet: Fleet, name: str = "d0", num_tokens: int = 2) -> FakeWorker:
    """A decode worker that falls silent after a few tokens."""
    return await fleet.add(name, "decode", silent(num_tokens), **KNOWN)


def asking(fleet: Fleet, **more: Any) -> asyncio.Task[Any]:
    return asyncio.create_task(fleet.client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=20, **more))


async def until_silent(worker: FakeWorker) -> None:
    """Returns once the worker has sent all that it will send."""
    gate = worker.script.decode_gate
    assert isinstance(gate, Gate)
    await soon(gate.reached.wait())
    (queue,) = worker.steps.values()
    await soon(queue.join())


async def cache_decisions(fleet: Fleet) -> list[dict[str, Any]]:
    """What the console's Cache page is told."""
    async with aiohttp.ClientSession() as session, session.get(f"{fleet.http}/halfmoon/v1/cache") as response:
        found: list[dict[str, Any]] = (await response.json())["decisions"]
    return found


async def text_of(task: asyncio.Task[Any]) -> str:
    text: str = (await soon(task)).choices[0].text
    return text


async def test_the_next_decode_worker_loads_from_the_holders(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, first = await holder(fleet), await dying(fleet)
        answer = asking(fleet)
        await until_silent(first)
        second = await fleet.add("d1", "decode", **KNOWN)
        first.end_registration.set()
        assert await text_of(answer) == "hello"
        metrics = await fleet.metrics()
        (decision,) = await decisions(fleet)
        for worker in (prefill, second):
            count = DecisionCount(decision="restore", reason="load", count=2)
            worker.loads.put_nowait(WorkerLoad(sequence=2, free_blocks=99, decisions=[count]))
        members = fleet.cluster.membership.members
        await fleet.until_told(lambda: all(one.load.free_blocks == 99 for one in members()))
        counted = await cache_decisions(fleet)
    assert {"decision": "restore", "reason": "load", "count": 4} in counted
    assert {"decision": "direct_restore", "reason": "kept_loaded", "count": 1} in counted
    assert len(prefill.calls.prefills) == 1
    (call,) = second.calls.prefills
    assert call.decode_address == ""
    assert bytes(call.generation.output_token_ids) == b"hel"
    assert list(call.sources) == [KVSource(address=prefill.address, kind=KVSource.WORKER, num_blocks=6)]
    assert 'pool_decisions_total{decision="direct_restore",reason="kept_loaded"} 1.0' in metrics
    assert 'pool_decisions_total{decision="disaggregation",reason="off"} 1.0' in metrics
    assert 'pool_decisions_total{decision="decode_worker",reason="computes_prompt"} 1.0' in metrics
    assert 'pool_decisions_total{decision="prefill_worker",reason="only"} 1.0' in metrics
    assert [(move["prefill_worker"], move["decode_worker"]) for move in decision["moves"]] == [("d1", "d1")]


async def test_switched_off_the_prefill_worker_hands_over_again(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, conditional_disaggregation="off") as fleet:
        prefill, first = await holder(fleet), await dying(fleet)
        answer = asking(fleet)
        await until_silent(first)
        second = await fleet.add("d1", "decode", **KNOWN)
        first.end_registration.set()
        assert await text_of(answer) == "hello"
    assert [call.decode_address for call in prefill.calls.prefills] == [first.address, second.address]
    assert not second.calls.prefills


async def test_an_idle_prefill_worker_that_has_the_prompt_gets_it_again(tmp_path: Path) -> None:
    """It is not to blame, so another prefill worker, which would have to compute the prompt, is not asked."""
    async with running_fleet(tmp_path, conditional_disaggregation="off") as fleet:
        other = await fleet.add("p1", "prefill", **{**KNOWN, "can_fetch": False})
        prefill, first = await holder(fleet, waiting=0), await dying(fleet)
        answer = asking(fleet)
        await until_silent(first)
        await fleet.add("d1", "decode", **KNOWN)
        first.end_registration.set()
        assert await text_of(answer) == "hello"
    assert len(prefill.calls.prefills) == 2
    assert not other.calls.prefills


async def test_a_lost_worker_is_no_source(tmp_path: Path) -> None:
    """Its token stream broke; that it has left is not known yet, nor what it held."""
    async with running_fleet(tmp_path) as fleet:
        first = await holder(fleet, "d0", waiting=0, role="decode")
        first.script = silent()
        await fleet.add("p0", "prefill", **KNOWN)
        answer = asking(fleet)
        await until_silent(first)
        second = await fleet.add("d1", "decode", **KNOWN)
        (queue,) = first.steps.values()
        queue.put_nowait(NoCapacity("the stream breaks"))
        assert await text_of(answer) == "hello"
        calls = [call for worker in fleet.by_address.values() for call in worker.calls.prefills]
    assert {call.decode_address for call in calls} <= {first.address, second.address, ""}
    assert not any(call.sources for call in calls[1:])


async def test_it_goes_on_while_no_prefill_worker_is_there(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, first = await holder(fleet), await dying(fleet)
        answer = asking(fleet)
        await until_silent(first)
        second = await fleet.add("d1", "decode", **KNOWN)
        prefill.end_registration.set()
        await fleet.until(lambda: "p0" not in fleet.placeable())
        first.end_registration.set()
        assert await text_of(answer) == "hello"
    assert [call.decode_address for call in second.calls.prefills] == [""]


async def test_the_second_one_dies_as_well(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await holder(fleet)
        first = await dying(fleet)
        answer = asking(fleet)
        await until_silent(first)
        second = await dying(fleet, "d1", num_tokens=0)
        first.end_registration.set()
        await until_silent(second)
        third = await fleet.add("d2", "decode", **KNOWN)
        second.end_registration.set()
        assert await text_of(answer) == "hello"
    assert bytes(third.calls.prefills[0].generation.output_token_ids) == b"hell"


@pytest.mark.parametrize("num_refusals", [1, 2])
async def test_one_that_has_no_room_is_passed_by(tmp_path: Path, num_refusals: int) -> None:
    async with running_fleet(tmp_path) as fleet:
        await holder(fleet)
        first = await dying(fleet)
        answer = asking(fleet)
        await until_silent(first)
        others = [await fleet.add(name, "decode", **KNOWN) for name in ("d1", "d2")]
        for other in others[:num_refusals]:
            other.refuse.append(NoCapacity("full", retry_after_ms=1))
        first.end_registration.set()
        assert await text_of(answer) == "hello"
