"""Several prefill workers are asked for one prompt, and let go at its first token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from halfmoon.errors import StalePlacement, Unavailable
from halfmoon.pb.gateway_pb2 import LatencyProfile
from halfmoon.pb.prefill_pb2 import PrefillEvent, PrefillRequest
from halfmoon.pb.types_pb2 import KVLayout
from tests.services.gateway.fakes import FakeWorker, Fleet, running_fleet, soon

LAYOUT = KVLayout(num_layers=16, num_kv_heads=1, head_dim=8, dtype="float32", block_tokens=8)
SLOW = LatencyProfile(kind="slow", prefill=[0.0, 1e-2, 0.0], step=[0.01, 0.0, 0.0])
PROMPT = "a" * 160  # as many tokens


async def fleet_of(fleet: Fleet, num_prefills: int, **changed: Any) -> list[FakeWorker]:
    """Prefill workers that may share a prompt, and one that decodes."""
    identity = {"profile": SLOW, "step_tokens": 64, "layer_passes": 2, "can_fetch": True, "layout": LAYOUT, **changed}
    workers = [await fleet.add(f"p{number}", "prefill", **identity) for number in range(num_prefills)]
    await fleet.add("d0", "decode", layout=LAYOUT)
    return workers


async def asked(fleet: Fleet, **more: Any) -> str:
    body = {"model": "bytes", "prompt": PROMPT, "max_tokens": 8, **more}
    text: str = (await fleet.client.completions.create(**body)).choices[0].text
    return text


def parted(workers: Sequence[FakeWorker]) -> tuple[FakeWorker, list[FakeWorker]]:
    """The worker that serves the prompt, and its helpers in their order."""
    (serving,) = (worker for worker in workers if worker.calls.prefills and worker.calls.prefills[0].decode_address)
    helpers = {worker.address: worker for worker in workers if worker is not serving and worker.calls.prefills}
    addresses = serving.calls.prefills[0].shares.addresses
    return serving, [helpers[address] for address in addresses[:-1]]


async def placements(fleet: Fleet) -> list[dict[str, Any]]:
    async with aiohttp.ClientSession() as session, session.get(f"{fleet.http}/halfmoon/v1/placements") as response:
        found: list[dict[str, Any]] = await response.json()
        return found


async def computing(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
    """A helper computes until it is let go; the serving worker answers once all others were asked."""
    if not request.decode_address:
        await asyncio.Event().wait()
    for address in request.shares.addresses:
        await worker.fleet.by_address[address].calls.prefill_came.wait()
    async for event in worker.usual_prefill(request):
        yield event


async def test_all_idle_workers_get_their_part_and_are_let_go(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, max_prefill_degree=8) as fleet:
        workers = await fleet_of(fleet, 3)
        for worker in workers:
            worker.on_prefill = computing
        assert await asked(fleet) == "hello"
        serving, helpers = parted(workers)
        for helper in helpers:
            await soon(helper.calls.prefill_ended.wait())
        metrics, (placement,) = await fleet.metrics(), await placements(fleet)
        view = fleet.cluster.membership.view()
        assert [one.waiting_prefill_tokens for one in view.workers] == [0] * 4
    (whole,) = serving.calls.prefills
    assert (len(whole.shares.addresses), whole.shares.addresses[-1], whole.shares.own) == (3, serving.address, 2)
    assert whole.shares.segment_ends[-1] == 160
    assert 0.5 < whole.shares.round_s < 0.75
    assert whole.shares.queue_s == 0.0
    for number, helper in enumerate(helpers):
        (part,) = helper.calls.prefills
        assert part.shares.own == number
        assert list(part.shares.segment_ends) == list(whole.shares.segment_ends)
        assert len(part.generation.prompt_token_ids) == whole.shares.segment_ends[number]
        assert part.generation.request_id == whole.generation.request_id
        assert (part.generation.sampling.max_tokens, part.generation.HasField("repeatable")) == (1, False)
    assert 'halfmoon_gateway_shared_prompts_total{degree="3"} 1.0' in metrics
    assert 'halfmoon_gateway_pool_decisions_total{decision="sharing",reason="shared"} 1.0' in metrics
    assert placement["sharing"] == "shared"
    assert placement["helpers"] == [helper.worker_id for helper in helpers]
    assert placement["predicted"]["ttft_s"] < 0.75


async def test_while_they_compute_helpers_are_not_idle(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, max_prefill_degree=8) as fleet:
        workers = await fleet_of(fleet, 3)
        gate = asyncio.Event()

        async def gated(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
            await gate.wait()
            async for event in worker.usual_prefill(request):
                yield event

        for worker in workers:
            worker.on_prefill = gated
        first = asyncio.ensure_future(asked(fleet))
        for worker in workers:
            await soon(worker.calls.prefill_came.wait())
        assert all(one.waiting_prefill_tokens for one in fleet.cluster.membership.view().workers if one.can_prefill)
        second = asyncio.ensure_future(asked(fleet))
        await fleet.until_told(lambda: sum(len(worker.calls.prefills) for worker in workers) == 4)
        gate.set()
        assert await first == await second == "hello"
        assert [one["sharing"] for one in await placements(fleet)] == ["none_idle", "shared"]


async def test_a_helper_that_refuses_or_is_lost_costs_no_attempt(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, max_prefill_degree=8) as fleet:
        workers = await fleet_of(fleet, 2)

        async def refusing(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
            if not request.decode_address:
                raise StalePlacement("it is to decode by now")
            async for event in computing(worker, request):
                yield event

        for worker in workers:
            worker.on_prefill = refusing
        assert await asked(fleet) == "hello"
        _, (helper,) = parted(workers)
        assert len(helper.calls.prefills) == 1
        (placement,) = await placements(fleet)
        assert placement["moves"] == []


async def test_a_request_whose_serving_worker_is_lost_goes_on_alone(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, max_prefill_degree=8) as fleet:
        workers = await fleet_of(fleet, 2)
        has_failed = False

        async def failing(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
            nonlocal has_failed
            if request.decode_address and not has_failed:
                has_failed = True
                raise Unavailable("it died")
            async for event in computing(worker, request):
                yield event

        for worker in workers:
            worker.on_prefill = failing
        assert await asked(fleet) == "hello"
        requests = [request for worker in workers for request in worker.calls.prefills if request.decode_address]
        assert sorted(request.HasField("shares") for request in requests) == [False, True]
        for worker in workers:
            await soon(worker.calls.prefill_ended.wait())


@pytest.mark.parametrize(
    ("settings", "identity", "body", "reason"),
    [
        ({}, {}, {}, None),
        ({"max_prefill_degree": 2}, {"layer_passes": 0}, {}, "unable"),
        ({"max_prefill_degree": 2}, {"can_fetch": False}, {}, "not_faster"),
        ({"max_prefill_degree": 2}, {}, {"prompt": "short"}, "too_short"),
        ({"max_prefill_degree": 2}, {}, {"echo": True, "logprobs": 1}, "needs_one"),
        ({"max_prefill_degree": 2}, {}, {"extra_body": {"kv_policy": "sinks:8+16"}}, "needs_one"),
    ],
)
async def test_others_are_computed_by_one(
    tmp_path: Path, settings: dict[str, Any], identity: dict[str, Any], body: dict[str, Any], reason: str | None
) -> None:
    async with running_fleet(tmp_path, **settings) as fleet:
        workers = await fleet_of(fleet, 2, **identity)
        await asked(fleet, **body)
        (request,) = (request for worker in workers for request in worker.calls.prefills)
        assert not request.HasField("shares")
        (placement,) = await placements(fleet)
    assert (placement["sharing"], placement["helpers"]) == (reason, [])


async def test_a_worker_whose_kv_is_of_another_dtype_is_not_asked(tmp_path: Path) -> None:
    """Its bytes are as many, and it would refuse."""
    async with running_fleet(tmp_path, max_prefill_degree=2) as fleet:
        for number, dtype in enumerate(("int8", "fp8")):
            layout = KVLayout(dtype=dtype)
            layout.MergeFrom(KVLayout(num_layers=16, num_kv_heads=1, head_dim=8, block_tokens=8))
            identity: dict[str, Any] = {
                "profile": SLOW,
                "step_tokens": 64,
                "layer_passes": 2,
                "can_fetch": True,
                "layout": layout,
            }
            await fleet.add(f"p{number}", "prefill", **identity)
        await fleet.add("d0", "decode", layout=LAYOUT)
        await asked(fleet)
        (placement,) = await placements(fleet)
    assert (placement["sharing"], placement["helpers"]) == ("none_idle", [])
