"""What happens beside the requests must not end the gateway, nor take its workers away."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from halfmoon.errors import DataLoss
from halfmoon.pb.gateway_pb2 import WorkerLoad, WorkerMessage
from halfmoon.pb.prefill_pb2 import FirstToken, PrefillEvent, PrefillRequest
from halfmoon.pb.types_pb2 import KVLayout
from halfmoon.policy.models.latency import PrefillSample
from services.gateway.cluster.cluster import running_cluster
from services.gateway.cluster.membership import Membership
from services.gateway.cluster.token_router import GatewayStopping
from tests.services.gateway.fakes import FINGERPRINT, LAYOUT, MODEL, FakeWorker, Fleet, Script, running_fleet, soon


async def says_hello(fleet: Fleet) -> bool:
    answer = await fleet.client.completions.create(model=MODEL, prompt="hi")
    return bool(answer.choices[0].text == "hello")


async def test_a_side_task_that_fails_is_logged_and_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise RuntimeError("a bug")

    async with running_cluster("g", Membership(FINGERPRINT, 1000.0)) as cluster:
        await asyncio.wait({cluster.spawn(fail())})
        await asyncio.sleep(0)
    assert [record.message for record in caplog.records] == ["task.failed"]


async def test_a_cancellation_for_a_worker_whose_channel_is_closed(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        worker = await fleet.add("b0", "both")
        gone = fleet.cluster.worker("b0")
        worker.end_registration.set()
        await fleet.until(lambda: not fleet.placeable())
        await gone.peer.close()
        fleet.cluster.ends.cancel(gone, "r.1")
        await fleet.add("b1", "both")
        assert await says_hello(fleet)


async def test_a_cancellation_is_told_until_it_is_heard(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        worker = await fleet.add("b0", "both")
        worker.refuse_cancels = [DataLoss("busy"), DataLoss("busy")]
        fleet.cluster.ends.cancel(fleet.cluster.worker("b0"), "r.1")
        await soon(worker.calls.cancel_came.wait())
        assert worker.calls.cancelled == ["r.1"]


async def test_a_worker_of_another_dtype_is_named_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    other = KVLayout()
    other.CopyFrom(LAYOUT)
    other.dtype = "bfloat16"
    async with running_fleet(tmp_path) as fleet:
        await fleet.add("b0", "both")
        await fleet.add("b1", "both", layout=other)
        await fleet.add("b2", "both")
    said = [vars(record) for record in caplog.records if record.message == "worker.other_dtype"]
    assert [(one["worker_id"], one["dtypes"]) for one in said] == [("b1", ["float32", "bfloat16"])]
    assert "share no cached blocks" in said[0]["reason"]


async def test_what_comes_after_the_end_does_no_harm(tmp_path: Path) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    async with running_fleet(tmp_path) as fleet:
        await fleet.add("b0", "both")
        late = fleet.cluster.worker("b0")
    fleet.cluster.ends.cancel(late, "r.1")
    fleet.cluster.remove(late, DataLoss("late"))
    with pytest.raises(GatewayStopping):
        fleet.cluster.spawn(never())


async def test_workers_are_told_whom_they_may_hand_over_to(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill = await fleet.add("p0", "prefill")
        first, second = await fleet.add("d0", "decode"), await fleet.add("d1", "decode")
        await soon(prefill.until_told({first.address, second.address}))
        second.end_registration.set()
        await soon(prefill.until_told({first.address}))
        await soon(first.until_told({first.address}))  # it may prefill later


async def test_everybody_is_told_the_stores_of_the_pool(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill = await fleet.add("p0", "prefill")
        await soon(prefill.until_stores([]))
        other = await fleet.add("p1", "prefill", kv_store="127.0.0.1:2")
        await soon(prefill.until_stores(["127.0.0.1:2"]))
        other.end_registration.set()
        await soon(prefill.until_stores([]))
    async with running_fleet(tmp_path, kv_store=("127.0.0.1:1",)) as fleet:
        decode = await fleet.add("d0", "decode", kv_store="127.0.0.1:2")
        await soon(decode.until_stores(["127.0.0.1:1", "127.0.0.1:2"]))


async def test_a_token_stream_that_cannot_be_read_is_opened_again(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.add("b0", "both", Script("hello"))
        deliver, fleet.cluster.router.deliver = fleet.cluster.router.deliver, None  # type: ignore[assignment]
        worker = fleet.by_address[fleet.cluster.worker("b0").member.identity.address]
        worker.steps[fleet.cluster.gateway_id].put_nowait(DataLoss("the stream breaks; the next one cannot be read"))
        async with asyncio.timeout(20):
            while fleet.placeable():  # noqa: ASYNC110 (a broken token stream is no change of the membership)
                await asyncio.sleep(0)
        fleet.cluster.router.deliver = deliver  # type: ignore[method-assign]
        await fleet.until(lambda: fleet.placeable() == {"b0"})
        assert await says_hello(fleet)


async def test_a_token_stream_that_ends_before_a_drain_is_opened_again(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        worker = await fleet.add("b0", "both", Script("hello"))
        worker.steps[fleet.cluster.gateway_id].put_nowait(None)
        async with asyncio.timeout(20):
            while fleet.placeable():  # noqa: ASYNC110 (a broken token stream is no change of the membership)
                await asyncio.sleep(0)
        await fleet.until(lambda: fleet.placeable() == {"b0"})
        assert await says_hello(fleet)


async def test_a_drained_worker_stays_until_its_last_tokens_are_read(tmp_path: Path) -> None:
    drains, has_drained, gate = asyncio.Event(), asyncio.Event(), asyncio.Event()
    script = Script("hello", gate, tokens_before_gate=1)
    async with running_fleet(tmp_path) as fleet:
        prefill, decode = await fleet.add("p0", "prefill", script), FakeWorker("d0", "decode", script, fleet)
        await fleet.serve(decode)

        async def messages() -> AsyncIterator[WorkerMessage]:
            yield WorkerMessage(identity=decode.identity())
            await drains.wait()
            yield WorkerMessage(load=WorkerLoad(draining=True))
            has_drained.set()

        async def register() -> None:
            async for _ in fleet.cluster.Register(messages(), cast(Any, None)):
                pass

        membership = asyncio.ensure_future(register())
        await fleet.until(lambda: "d0" in fleet.placeable())
        answer = asyncio.ensure_future(fleet.client.completions.create(model=MODEL, prompt="hi", max_tokens=6))
        await soon(prefill.calls.prefill_ended.wait())
        drains.set()
        await soon(has_drained.wait())
        for _ in range(100):
            await asyncio.sleep(0)
        assert not membership.done()
        gate.set()
        assert (await soon(answer)).choices[0].text == "hello"
        decode.steps[fleet.cluster.gateway_id].put_nowait(None)
        await soon(membership)
        assert not [worker for worker in fleet.cluster.workers() if worker.member.worker_id == "d0"]
    assert len(prefill.calls.prefills) == 1


async def test_a_drained_worker_that_stands_still_is_expired(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, heartbeat_interval_s=0.05) as fleet:
        worker = await fleet.add("b0", "both")
        gone = fleet.cluster.worker("b0").gone
        worker.loads.put_nowait(WorkerLoad(draining=True))
        await fleet.until_told(lambda: not fleet.placeable())
        worker.end_registration.set()
        assert "missed heartbeats" in (await soon(asyncio.shield(gone))).message


async def test_a_prompt_of_a_prefill_worker_that_has_drained_is_not_computed_again(tmp_path: Path) -> None:
    is_read = asyncio.Event()

    async def late(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        await is_read.wait()
        async for event in worker.usual_prefill(request):
            yield event

    async with running_fleet(tmp_path) as fleet:
        first, _ = await fleet.pair()
        first.on_prefill = late
        answer = asyncio.ensure_future(says_hello(fleet))
        await soon(first.calls.prefill_came.wait())
        second = await fleet.add("p1", "prefill")
        gone, member = fleet.cluster.worker("p0").gone, fleet.cluster.worker("p0").member
        first.loads.put_nowait(WorkerLoad(draining=True))
        await fleet.until_told(lambda: member.load.draining)
        first.end_registration.set()
        await soon(asyncio.shield(gone))
        is_read.set()
        assert await soon(answer)
    assert not second.calls.prefills


async def test_an_answer_that_has_all_but_its_first_token_outlives_its_decode_worker(tmp_path: Path) -> None:
    is_gone = asyncio.Event()

    async def late(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        worker.hand_over(request)
        await is_gone.wait()
        yield PrefillEvent(first_token=FirstToken(token=worker.script.token(request.generation, 0)))

    async with running_fleet(tmp_path) as fleet:
        prefill, decode = await fleet.pair()
        prefill.on_prefill = late
        answer = asyncio.ensure_future(says_hello(fleet))
        await soon(prefill.calls.prefill_came.wait())
        await fleet.until_told(lambda: bool(decode.decoding))
        await asyncio.wait(decode.decoding)
        await soon(decode.steps[fleet.cluster.gateway_id].join())
        gone, member = fleet.cluster.worker("d0").gone, fleet.cluster.worker("d0").member
        decode.loads.put_nowait(WorkerLoad(draining=True))
        await fleet.until_told(lambda: member.load.draining)
        decode.steps[fleet.cluster.gateway_id].put_nowait(None)
        decode.end_registration.set()
        await soon(asyncio.shield(gone))
        is_gone.set()
        assert await soon(answer)
    assert len(prefill.calls.prefills) == 1


async def test_a_gateway_that_stood_still_expires_nobody(tmp_path: Path) -> None:
    async def beat(worker: FakeWorker) -> None:
        for sequence in range(1, 10_000):
            worker.loads.put_nowait(WorkerLoad(sequence=sequence, free_blocks=100))
            await asyncio.sleep(0.05)

    async with running_fleet(tmp_path, heartbeat_interval_s=0.2) as fleet:
        worker = await fleet.add("b0", "both")
        member = fleet.cluster.worker("b0").member
        beating = asyncio.ensure_future(beat(worker))
        time.sleep(1)  # noqa: ASYNC251 (the process stands still; its workers' reports wait in the sockets)
        async with asyncio.timeout(20):
            while member.load.sequence < 5 and fleet.placeable():  # noqa: ASYNC110 (a report is no event)
                await asyncio.sleep(0)
        assert fleet.placeable() == {"b0"}
        assert fleet.cluster.worker("b0").member is member
        beating.cancel()


async def test_a_worker_that_stands_still_is_expired_all_the_same(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, heartbeat_interval_s=0.05) as fleet:
        await fleet.add("b0", "both")
        gone = fleet.cluster.worker("b0").gone
        assert "missed heartbeats" in (await soon(asyncio.shield(gone))).message


async def test_a_restored_prompt_teaches_nothing_of_computing(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.add("p0", "prefill")
        membership = fleet.cluster.membership
        [member] = membership.members()
        for number in range(20):
            membership.note_prefilled("", member, PrefillSample(10.0 + number, 0, 0.01 * (10 + number)), 0.0)
        before = member.latency.prefill
        for number in range(20):  # most of whose seconds were a slow link's
            sample = PrefillSample(10.0, 40.0 + number, 5.0)
            membership.note_prefilled("", member, sample, 0.0, was_restored=True)
        assert member.latency.prefill == before


async def test_a_change_reaches_the_view_also_if_nobody_asks_for_it(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.add("b0", "both")
        membership, (member,) = fleet.cluster.membership, fleet.cluster.membership.members()
        view = membership.view()
        membership.report(member, WorkerLoad(free_blocks=7), fleet.cluster.clock())
        await fleet.until_told(lambda: view.workers[0].free_blocks == 7)
