"""An answer moves to another decode worker when its own one leaves, and its client sees nothing of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.errors import HalfmoonError, NotFound, Unavailable
from halfmoon.pb.gateway_pb2 import LatencyProfile, WorkerLoad
from halfmoon.pb.prefill_pb2 import KVSource, PrefillEvent, PrefillRequest
from services.gateway.progress import Progress
from services.gateway.routing.decode_move import DecodeMove
from tests.services.gateway.fakes import FakeWorker, Fleet, Script, running_fleet, soon
from tests.services.gateway.test_access import ask
from tests.services.gateway.test_direct_restore import KNOWN, Gate, text_of, until_silent
from tests.services.gateway.test_failures import last_row
from tests.services.gateway.test_gateway_admission import PROMPT
from tests.services.gateway.test_prompts_kept import decisions

TEXT = "a long answer of many tokens, which goes on and on"


async def leaving(fleet: Fleet, num_tokens: int = 12) -> tuple[FakeWorker, FakeWorker, asyncio.Task[Any]]:
    """A decode worker that drains in the middle of an answer, another one, and the client."""
    await fleet.add("p0", "prefill", Script(TEXT), **KNOWN)
    first = await fleet.add("d0", "decode", Script(TEXT, Gate(), tokens_before_gate=num_tokens), **KNOWN)
    answer = asyncio.create_task(fleet.client.completions.create(model="bytes", prompt=PROMPT, max_tokens=60))
    await until_silent(first)
    second = await fleet.add("d1", "decode", Script(TEXT), **KNOWN)
    return first, second, answer


async def drain(fleet: Fleet, name: str = "d0") -> None:
    assert (await ask(fleet, "POST", f"/halfmoon/v1/workers/{name}/drain", json={}))[0] == 200


def refusing_ahead(error: HalfmoonError) -> Callable[[FakeWorker, PrefillRequest], AsyncIterator[PrefillEvent]]:
    """A worker's prefills, but for those of tokens that are computed ahead."""

    async def prefill(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        if request.keeps_partial:
            raise error
        async for event in worker.usual_prefill(request):
            yield event

    return prefill


async def test_its_blocks_go_ahead_and_it_follows(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        first, second, answer = await leaving(fleet)
        await drain(fleet)
        assert await text_of(answer) == TEXT
        (decision,) = await decisions(fleet)
        row = await last_row(fleet, "ok")
        metrics = await fleet.metrics()
        await soon(first.calls.cancel_came.wait())
    copy, ahead, moved = second.calls.prefills
    source = KVSource(address=first.address, kind=KVSource.WORKER, num_blocks=copy.sources[0].num_blocks)
    assert (copy.is_copy, list(copy.sources)) == (True, [source])
    assert len(copy.generation.prompt_token_ids) == 8 * source.num_blocks + 1
    assert (moved.is_copy, moved.decode_address, list(moved.sources)) == (False, "", [source])
    tokens = [*moved.generation.prompt_token_ids, *moved.generation.output_token_ids]
    assert tokens[: len(copy.generation.prompt_token_ids)] == copy.generation.prompt_token_ids
    assert (ahead.is_copy, ahead.keeps_partial, copy.keeps_partial) == (True, True, False)
    assert tokens == ahead.generation.prompt_token_ids
    assert ahead.sources == copy.sources
    assert bytes(moved.generation.output_token_ids).decode() == TEXT[:13]
    assert (row["num_retries"], row["decode_worker"]) == (0, "d1")
    assert [(move["prefill_worker"], move["decode_worker"]) for move in decision["moves"]] == [("d1", "d1")]
    assert 'pool_decisions_total{decision="move",reason="moved"} 1.0' in metrics


async def test_it_moves_off_a_worker_that_is_to_prefill(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        _, second, answer = await leaving(fleet)
        assert (await ask(fleet, "POST", "/halfmoon/v1/workers/d0/role", json={"role": "prefill"}))[0] == 200
        assert await text_of(answer) == TEXT
    assert [call.is_copy for call in second.calls.prefills] == [True, True, False]


async def test_a_worker_that_joins_later_takes_it(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.add("p0", "prefill", Script(TEXT), **KNOWN)
        first = await fleet.add("d0", "decode", Script(TEXT, Gate(), tokens_before_gate=12), **KNOWN)
        answer = asyncio.create_task(fleet.client.completions.create(model="bytes", prompt=PROMPT, max_tokens=60))
        await until_silent(first)
        assert (await ask(fleet, "POST", "/halfmoon/v1/workers/d0/drain", json={"force": True}))[0] == 200
        await fleet.add("d1", "decode", Script(TEXT), **KNOWN)
        assert await text_of(answer) == TEXT


@pytest.mark.parametrize("error", [NotFound("nothing"), Unavailable("gone")])
async def test_what_cannot_be_loaded_finishes_where_it_is(tmp_path: Path, error: Exception) -> None:
    async def refuse(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        raise error
        yield PrefillEvent()

    async with running_fleet(tmp_path) as fleet:
        first, second, answer = await leaving(fleet)
        second.on_prefill = refuse
        await drain(fleet)
        await soon(second.calls.prefill_came.wait())
        assert first.script.decode_gate is not None
        first.script.decode_gate.set()
        assert await text_of(answer) == TEXT
    assert all(call.is_copy for call in second.calls.prefills)


async def test_it_moves_off_a_worker_that_is_much_busier(tmp_path: Path) -> None:
    """Both stay; the other's steps are far shorter, and the answer has long to go."""
    slow = {**KNOWN, "profile": LatencyProfile(kind="slow", prefill=[0.0, 1.0, 0.0], step=[1.0, 1.0, 0.0])}
    async with running_fleet(tmp_path, hot_spots=True) as fleet:
        await fleet.add("p0", "prefill", Script(TEXT), **slow)
        first = await fleet.add("d0", "decode", Script(TEXT, Gate(), tokens_before_gate=12), **slow)
        answer = asyncio.create_task(fleet.client.completions.create(model="bytes", prompt=PROMPT, max_tokens=60))
        await until_silent(first)
        second = await fleet.add("d1", "decode", Script(TEXT), **slow)
        second.loads.put_nowait(WorkerLoad(free_blocks=100))
        first.loads.put_nowait(WorkerLoad(free_blocks=50, num_running=20, context_tokens=2_000))
        assert await text_of(answer) == TEXT
        metrics = await fleet.metrics()
        row = await last_row(fleet, "ok")
    assert [call.is_copy for call in second.calls.prefills] == [True, True, False]
    assert (row["num_retries"], row["decode_worker"]) == (0, "d1")
    assert 'pool_decisions_total{decision="hot_spot",reason="moved"} 1.0' in metrics


async def test_without_being_asked_nothing_moves_off_busy_workers(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        first, second, answer = await leaving(fleet)
        second.loads.put_nowait(WorkerLoad(free_blocks=100))
        first.loads.put_nowait(WorkerLoad(free_blocks=50, num_running=20, context_tokens=2_000))
        await fleet.until_told(lambda: fleet.cluster.worker("d0").member.load.num_running == 20)
        assert first.script.decode_gate is not None
        first.script.decode_gate.set()
        assert await text_of(answer) == TEXT
    assert second.calls.prefills == []


async def test_a_worker_that_keeps_whole_blocks_only_computes_the_rest_when_it_is_there(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        _, second, answer = await leaving(fleet)
        second.on_prefill = refusing_ahead(NotFound("nothing to load"))
        await drain(fleet)
        assert await text_of(answer) == TEXT
    assert [call.keeps_partial for call in second.calls.prefills] == [False, True, False]


async def test_an_answer_is_not_moved_to_a_worker_that_fails_to_compute_ahead(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        first, second, answer = await leaving(fleet)
        second.on_prefill = refusing_ahead(Unavailable("gone"))
        await drain(fleet)
        await soon(second.calls.prefill_ended.wait())
        assert first.script.decode_gate is not None
        first.script.decode_gate.set()
        assert await text_of(answer) == TEXT
        row = await last_row(fleet, "ok")
    assert all(call.is_copy for call in second.calls.prefills)
    assert (row["num_retries"], row["decode_worker"]) == (0, "d0")


async def test_a_worker_that_dies_while_another_one_computes_ahead_costs_no_token(tmp_path: Path) -> None:
    is_ahead, goes_on = asyncio.Event(), asyncio.Event()

    async def hang(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        if request.keeps_partial:
            is_ahead.set()
            await goes_on.wait()
        async for event in worker.usual_prefill(request):
            yield event

    async with running_fleet(tmp_path) as fleet:
        first, second, answer = await leaving(fleet)
        second.on_prefill = hang
        await drain(fleet)
        await soon(is_ahead.wait())
        first.steps[fleet.cluster.gateway_id].put_nowait(Unavailable("killed"))
        assert await text_of(answer) == TEXT
        row = await last_row(fleet, "ok")
        goes_on.set()
    assert (row["num_retries"], row["decode_worker"]) == (1, "d1")


async def test_an_answer_goes_on_elsewhere_if_the_worker_that_it_moves_to_has_just_left(tmp_path: Path) -> None:
    left: list[str] = []

    async def leave(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        """Leaves once its KV is all there."""
        if request.keeps_partial:
            left.append(worker.worker_id)
            fleet.cluster.remove(fleet.cluster.worker(worker.worker_id), Unavailable("killed"))
        async for event in worker.usual_prefill(request):
            yield event

    async with running_fleet(tmp_path) as fleet:
        _, second, answer = await leaving(fleet)
        third = await fleet.add("d2", "decode", Script(TEXT), **KNOWN)
        second.on_prefill = third.on_prefill = leave
        await drain(fleet)
        assert await text_of(answer) == TEXT
        row = await last_row(fleet, "ok")
    assert (row["num_retries"], len(left), {*left, row["decode_worker"]}) == (1, 1, {"d1", "d2"})


class Prepared(DecodeMove):
    """A move whose blocks are there already."""

    def __init__(self, routing: Any, put: Any) -> None:
        layout = SimpleNamespace(block_tokens=64)
        member = SimpleNamespace(identity=SimpleNamespace(layout=layout, address="d0"), worker_id="d0")
        placement: Any = object()
        super().__init__(cast("Any", None), routing, cast("Any", SimpleNamespace(member=member)), put, None)
        self._target = placement

    async def _prepare(self) -> str:
        return "moved"


def routing_of(gaps_s: list[float]) -> Any:
    progress = Progress(0.0)
    progress.gaps_s = gaps_s
    return SimpleNamespace(
        note_move=lambda outcome, is_hot: None, output=SimpleNamespace(progress=progress), num_tokens=70
    )


@pytest.mark.parametrize("num_together", [1, 1_000_000])
async def test_it_changes_over_just_behind_a_token(num_together: int) -> None:
    """However many come together."""
    put: list[Any] = []
    move = Prepared(routing_of([20.0, *[0.0] * (num_together - 1)]), put.append)
    task = asyncio.create_task(move.run())
    for _ in range(5):
        await asyncio.sleep(0)
    assert not put
    move.note_token()
    await task
    assert len(put) == 1


async def test_a_token_that_does_not_come_is_not_waited_for() -> None:
    put: list[Any] = []
    await Prepared(routing_of([1e-6]), put.append).run()
    assert len(put) == 1


class Copying(DecodeMove):
    """A move whose copies take no time; `copied` has how many blocks each was of."""

    def __init__(self, num_tokens: int, put: Any) -> None:
        gone = asyncio.get_running_loop().create_future()
        identity = SimpleNamespace(layout=SimpleNamespace(block_tokens=64), address="d0")
        member = SimpleNamespace(identity=identity, worker_id="d0", is_leaving=True)
        source: Any = SimpleNamespace(member=member, gone=gone, move_turns=asyncio.Semaphore())
        target = SimpleNamespace(decode=SimpleNamespace(worker_id="d1", holder=0))
        self.routing = routing_of([3600.0])
        self.routing.num_tokens, self.routing.room_tokens = num_tokens, 1000
        self.routing.move_target = lambda member, before: target
        self.copied: list[int | None] = []
        self.outcomes: list[str] = []
        self.routing.note_move = lambda outcome, is_hot: self.outcomes.append(outcome)
        super().__init__(cast("Any", None), self.routing, source, put, None)

    async def _copy(self, target: Any, num_blocks: int | None) -> None:
        self.copied.append(num_blocks)

    async def tokens(self, number: int) -> None:
        for _ in range(number):
            self.routing.num_tokens += 1
            self.note_token()
            for _ in range(5):
                await asyncio.sleep(0)


@pytest.mark.parametrize(("tail", "num_tokens", "copied"), [(8, 2, [2, None]), (9, 57, [2, 3]), (60, 6, [2, 3])])
async def test_in_the_middle_of_a_block_it_waits_for_the_end(tail: int, num_tokens: int, copied: list[int]) -> None:
    put: list[Any] = []
    move = Copying(128 + tail, put.append)
    task = asyncio.create_task(move.run())
    for _ in range(5):
        await asyncio.sleep(0)
    await move.tokens(num_tokens - 1)
    assert not put
    await move.tokens(1)
    await task
    assert (len(put), move.copied) == (1, copied)


class CatchingUp(Copying):
    """A move to a worker that computes ahead while so many tokens come in each call."""

    def __init__(self, num_tokens: int, put: Any, coming: list[int]) -> None:
        super().__init__(num_tokens, put)
        self.coming = coming
        self.computed: list[int] = []

    async def _copy(self, target: Any, num_blocks: int | None) -> None:
        await super()._copy(target, num_blocks)
        if num_blocks is None:
            self.computed.append(self.routing.num_tokens)
            await self.tokens(self.coming.pop(0))


@pytest.mark.parametrize(
    ("tail", "coming", "computed"),
    [(2, [], []), (3, [2], [132]), (8, [0], [137]), (8, [3, 2], [137, 141]), (8, [60, 9, 9], [137, 198, 208])],
)
async def test_it_computes_ahead_until_little_is_missing(tail: int, coming: list[int], computed: list[int]) -> None:
    put: list[Any] = []
    move = CatchingUp(128 + tail, put.append, coming)
    task = asyncio.create_task(move.run())
    for _ in range(5):
        await asyncio.sleep(0)
    for _ in range(len(computed) + 1):
        assert not put
        await move.tokens(1)
        for _ in range(5 * 60):
            await asyncio.sleep(0)
    await task
    (moving,) = put
    assert (move.computed, moving.num_there) == (computed, computed[-1] if computed else 128)


@settings(max_examples=100, deadline=None)
@given(
    start=st.integers(1, 200),
    coming=st.lists(st.integers(0, 40), min_size=12, max_size=12),
    fails=st.lists(
        st.sampled_from([None, None, None, NotFound("nothing"), Unavailable("gone")]), min_size=12, max_size=12
    ),
)
def test_whatever_comes_meanwhile_the_worker_has_what_it_is_said_to_have(
    start: int, coming: list[int], fails: list[Exception | None]
) -> None:
    """A move ends: it goes where the tokens that are said to be there were copied or computed, or it stays."""

    async def go() -> None:
        put: list[Any] = []

        class Failing(Copying):
            there = 0

            async def _copy(self, target: Any, num_blocks: int | None) -> None:
                num_tokens = self.routing.num_tokens if num_blocks is None else num_blocks * 64
                await self.tokens(coming.pop() if coming else 0)
                error = fails.pop() if fails else None
                if error is not None:
                    raise error
                self.there = max(self.there, num_tokens)

        move = Failing(start, put.append)
        move.routing.held_blocks = lambda holder: move.there // 64
        task = asyncio.create_task(move.run())
        for _ in range(800):
            if task.done():
                break
            await move.tokens(1)
        await task
        assert len(put) == (move.outcomes == ["moved"])
        for one in put:
            assert one.num_there <= move.there
            assert one.num_there <= move.routing.num_tokens

    asyncio.run(go())


async def test_a_block_that_the_worker_would_rather_compute_is_computed_ahead() -> None:
    put: list[Any] = []

    class Near(CatchingUp):
        async def _copy(self, target: Any, num_blocks: int | None) -> None:
            await super()._copy(target, num_blocks)
            if num_blocks is not None:
                raise NotFound("nothing to load")

    move = Near(192 + 2, put.append, [0])
    move.routing.held_blocks = lambda holder: 2
    task = asyncio.create_task(move.run())
    for _ in range(5):
        await asyncio.sleep(0)
    await move.tokens(1)
    await move.tokens(1)
    await task
    assert (move.copied, move.computed, put[0].num_there) == ([3, None], [195], 195)
