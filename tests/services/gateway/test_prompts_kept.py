"""A gateway sends a whole request to a decode worker where that is quicker, and shows and counts why."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from halfmoon.errors import NoCapacity, Unavailable
from halfmoon.pb.gateway_pb2 import LatencyProfile
from tests.services.gateway.fakes import MODEL, FakeWorker, Fleet, Script, running_fleet, soon

STEP = [0.01, 1e-3, 0.0]


def known(prefill_s_per_token: float, **more: Any) -> dict[str, Any]:
    """Identity of a worker whose speed is known."""
    profile = LatencyProfile(kind="fake", prefill=[0.0, prefill_s_per_token, 0.0], step=STEP)
    return {"profile": profile, "step_tokens": 512, "chunk_tokens": 128, **more}


async def slow_and_quick(fleet: Fleet, script: Script | None = None) -> tuple[FakeWorker, FakeWorker]:
    """A slow prefill worker and a quick decode worker."""
    script = script or Script()
    return (
        await fleet.add("p0", "prefill", script, **known(1e-2)),
        await fleet.add("d0", "decode", script, **known(1e-3, max_running=8)),
    )


async def answer(fleet: Fleet, **more: Any) -> str:
    completion = await fleet.client.completions.create(model=MODEL, prompt="hi there", max_tokens=20, **more)
    text: str = completion.choices[0].text
    return text


async def decisions(fleet: Fleet) -> list[dict[str, Any]]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{fleet.http}/halfmoon/v1/placements") as response,
    ):
        found: list[dict[str, Any]] = await response.json()
    return found


async def test_a_decode_worker_computes_the_prompt_that_it_is_quicker_with(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, conditional_disaggregation="auto") as fleet:
        prefill, decode = await slow_and_quick(fleet)
        assert await answer(fleet) == "hello"
        metrics = await fleet.metrics()
        (decision,) = await decisions(fleet)
    (call,) = decode.calls.prefills
    assert call.decode_address == ""
    assert not prefill.calls.prefills
    assert 'pool_decisions_total{decision="disaggregation",reason="kept_short"} 1.0' in metrics
    assert 'pool_decisions_total{decision="disaggregation",reason="off"} 0.0' in metrics
    assert decision["disaggregation"] == "kept_short"
    assert (decision["prefill_worker"], decision["decode_worker"]) == ("d0", "d0")
    assert [candidate["worker_id"] for candidate in decision["candidates"]] == ["d0", "p0"]


async def test_off_hands_over(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, conditional_disaggregation="off") as fleet:
        prefill, decode = await slow_and_quick(fleet)
        assert await answer(fleet) == "hello"
        assert 'pool_decisions_total{decision="disaggregation",reason="off"} 1.0' in await fleet.metrics()
    assert [call.decode_address for call in prefill.calls.prefills] == [decode.address]
    assert not decode.calls.prefills


@pytest.mark.parametrize("error", [NoCapacity("full"), Unavailable("this worker's role is decode")])
async def test_a_decode_worker_that_refuses_is_not_asked_again(tmp_path: Path, error: NoCapacity | Unavailable) -> None:
    """It may be full, or of a release whose decode workers compute no prompts."""
    async with running_fleet(tmp_path, conditional_disaggregation="auto") as fleet:
        prefill, decode = await slow_and_quick(fleet)
        other = await fleet.add("d1", "decode", **known(9e-3))
        decode.refuse.append(error)
        assert await answer(fleet) == "hello"
    assert len(decode.calls.prefills) == 1
    assert len(other.calls.prefills) + len(prefill.calls.prefills) == 1


async def test_its_loss_in_the_middle_is_made_good(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, conditional_disaggregation="auto") as fleet:
        prefill, decode = await slow_and_quick(fleet, Script("hello", asyncio.Event(), tokens_before_gate=1))
        waiting = asyncio.ensure_future(answer(fleet))
        await soon(decode.calls.prefill_came.wait())
        await fleet.add("d1", "decode", **known(1e-3))
        decode.end_registration.set()
        prefill.script.decode_gate = None
        assert await soon(waiting) == "hello"


async def test_a_client_that_leaves_cancels_it(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, conditional_disaggregation="auto") as fleet:
        _, decode = await slow_and_quick(fleet, Script("hello", asyncio.Event(), tokens_before_gate=1))
        waiting = asyncio.ensure_future(answer(fleet))
        await soon(decode.calls.prefill_came.wait())
        waiting.cancel()
        await soon(decode.calls.cancel_came.wait())


async def test_a_kind_that_computed_no_prompt_is_as_fast_as_prefill_workers(tmp_path: Path) -> None:
    """Calibration measures no prompts on decode workers: their speed is that of prefill workers on such a device."""
    async with running_fleet(tmp_path, conditional_disaggregation="auto") as fleet:
        await fleet.add("p0", "prefill", step_tokens=0)
        unmeasured = LatencyProfile(kind="fake", prefill=[0.0] * 3, step=STEP)
        await fleet.add("d0", "decode", profile=unmeasured, step_tokens=512, chunk_tokens=128)
        await answer(fleet)
        assert [one["disaggregation"] for one in await decisions(fleet)] == ["unknown"]
        await answer(fleet)  # the first prompt has shown how fast such a device is
        assert (await decisions(fleet))[0]["disaggregation"] != "unknown"
