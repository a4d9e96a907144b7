"""Profiling live workers over their RPCs: simulated ones, so that nothing but the protocol is there."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest
from aiohttp import ClientSession

from halfmoon.errors import HalfmoonError, InvalidRequest, NoCapacity, Unavailable
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.profiling import measured_slowdowns as side_by_side
from halfmoon.profiling import profiler, served_load
from halfmoon.profiling.measuring import Progress, trimmed_mean
from halfmoon.profiling.probe import WorkerProbe
from halfmoon.profiling.profiler import ProfileOptions, profiled
from halfmoon.profiling.sweep import SweepLimits
from halfmoon.profiling.target import fetch_cluster
from halfmoon.sim.latency_sources.measured_profile import MeasuredSlowdown
from halfmoon.sim.latency_sources.worker_profile import WorkerProfile, coefficients
from tests.services.simulation.test_simulated_fleet import INSTANTLY, SimulatedFleet, running_fleet

LATENCY = coefficients("quick", PrefillModel(a=0.002), StepModel(d=0.004), 65_536, 1)
# a context so long that sequences decode for many seconds: on a loaded machine, too, they outlive a measurement
QUICK: WorkerProfile = replace(INSTANTLY, name="quick", latency=LATENCY, context_tokens=4_096, max_running=8)
LIMITS = SweepLimits(longest_prompt=128, largest_batch=4, longest_context=64, repeats=1, steps=3)


def options(fleet: SimulatedFleet, *workers: str, beside: bool | None = None) -> ProfileOptions:
    return ProfileOptions(fleet.gateway.http, workers=workers, transports=("grpc",), limits=LIMITS, beside=beside)


def when(stage: str, begun: asyncio.Event) -> Progress:
    def described(what: str, done: int, total: int) -> None:
        if what == stage:
            begun.set()

    return described


def test_the_usual_mean_counts_slow_ones_but_not_a_pause_of_the_machine() -> None:
    assert trimmed_mean([1.0, 1.0, 1.6]) == pytest.approx(1.2)
    assert trimmed_mean([1.0, 1.0, 1.6, 40.0]) == pytest.approx(1.2)
    assert trimmed_mean([3.0]) == 3.0


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("both", "both")])
async def test_a_profile_has_all_parts_and_leaves_nothing(
    tmp_path: Path, roles: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_load, "_REQUESTS", 4)  # of real time
    described: list[tuple[str, int, int]] = []
    async with running_fleet(tmp_path, replace(QUICK, nests_steps=True)) as fleet:
        for role in roles:
            await fleet.simulation.start(role)  # type: ignore[arg-type]
        await fleet.until(lambda: len(fleet.ready()) == 2)
        found = await profiled(options(fleet, beside=True), lambda *news: described.append(news))
        await fleet.until_idle()
    assert {one.new_tokens for one in found.prefill if not one.cached_tokens} == {16, 32, 64, 96, 128}
    assert {one.cached_tokens for one in found.prefill} == {0, 32, 64}
    assert [one.batch for one in found.step if one.is_held_out] == [3]
    assert {one.batch for one in found.step} == {1, 2, 3, 4}
    assert all(one.context_tokens >= 64 * one.batch for one in found.step)
    assert [one.num_bytes for one in found.transfer] == [4 * 64, 4 * 128]
    works = {(one.work, one.neighbour) for one in found.beside}
    kinds = ("prefill", "decode")
    every = {(a, b) for a in kinds for b in kinds if "both" in roles or a != b}
    assert works == every
    assert (found.limits.max_running, found.limits.context_tokens, found.kv_tokens) == (8, 4_096, 65_536)
    assert found.limits.nests_steps
    assert found.whole.error.prefill is not None
    assert {what for what, done, total in described if done == total} == {
        "prompts", "decode batches", "transfers", "side by side",
    }  # fmt: skip


async def test_workers_that_share_a_host_with_others_elsewhere_are_measured_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which two are compared; tests/profiling/test_measuring.py has how, without a clock."""
    compared: list[set[str]] = []

    async def fake(one: WorkerProbe, other: WorkerProbe, on_progress: Progress) -> list[MeasuredSlowdown]:
        compared.append({one.target.role, other.target.role})
        return [MeasuredSlowdown(work="prefill", neighbour="decode", slowdown=1.5)]

    monkeypatch.setattr(profiler, "measured_slowdowns", fake)
    monkeypatch.setattr(profiler, "_is_one_host", lambda workers: False)
    async with running_fleet(tmp_path, QUICK) as fleet:
        await fleet.add(1, 1)
        found = await profiled(options(fleet, beside=True), lambda *news: None)
        await fleet.until_idle()
    assert compared == [{"prefill", "decode"}]
    assert [(one.work, one.neighbour, one.slowdown) for one in found.beside] == [("prefill", "decode", 1.5)]


async def test_two_live_workers_are_compared_in_what_each_can_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "_ROUNDS", 1)  # of real time
    async with running_fleet(tmp_path, QUICK) as fleet:
        await fleet.add(1, 1)
        async with ClientSession() as session, AsyncExitStack() as probes:
            cluster = await fetch_cluster(session, fleet.gateway.http)
            one, other = [await probes.enter_async_context(WorkerProbe(each, ("grpc",))) for each in cluster.workers]
            assert (one._salt + other._salt).isascii(), "other bytes may name a KV policy"
            found = await side_by_side.measured_slowdowns(one, other, lambda *news: None)
        await fleet.until_idle()
    assert {(one.work, one.neighbour) for one in found} == {("prefill", "decode"), ("decode", "prefill")}


async def test_a_measurement_waits_if_prompts_come_faster_than_their_receiver_ends_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_steps = coefficients("slow steps", PrefillModel(a=0.0005), StepModel(d=0.02), 65_536, 1)
    monkeypatch.setattr(side_by_side, "_ROUNDS", 1)  # of real time
    async with (
        running_fleet(tmp_path, replace(QUICK, latency=slow_steps)) as fleet,
        ClientSession() as control,
        AsyncExitStack() as probes,
    ):
        await fleet.add(1, 1)
        workers = sorted((await fetch_cluster(control, fleet.gateway.http)).workers, key=lambda one: one.role)
        decode, prefill = [await probes.enter_async_context(WorkerProbe(one, ("grpc",))) for one in workers]
        found = await side_by_side.measured_slowdowns(prefill, decode, lambda *news: None)
        await fleet.until_idle()
    assert {(one.work, one.neighbour) for one in found} == {("prefill", "decode"), ("decode", "prefill")}


@pytest.mark.parametrize("stage", ["prompts", "decode batches", "transfers", "side by side"])
async def test_an_interrupted_profile_leaves_nothing(tmp_path: Path, stage: str) -> None:
    """Ctrl-C cancels the task: here a moment after a stage began, when its work is on the workers."""
    begun = asyncio.Event()
    async with running_fleet(tmp_path, QUICK) as fleet:
        await fleet.add(1, 1)
        members = fleet.gateway.cluster.membership.members
        work = profiled(options(fleet, beside=True), when(stage, begun))
        profiling = asyncio.create_task(work)
        reached = asyncio.create_task(begun.wait())
        await asyncio.wait([reached, profiling], return_when=asyncio.FIRST_COMPLETED)
        if profiling.done():
            await profiling  # has failed, and says why
        if stage != "prompts":
            await fleet.until(lambda: any(one.load.num_running for one in members()) or profiling.done())
        profiling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await profiling
        await fleet.until_idle()


async def test_a_busy_worker_is_not_measured(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, QUICK) as fleet:
        await fleet.add(1, 1)
        asking = asyncio.create_task(fleet.text(400))
        members = fleet.gateway.cluster.membership.members
        await fleet.until(lambda: any(one.load.num_running for one in members()))
        with pytest.raises(NoCapacity, match=r"busy \(1 requests\)"):
            await profiled(options(fleet), lambda *news: None)
        asking.cancel()


async def test_others_may_be_busy_where_no_load_is_served(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, QUICK) as fleet:
        await fleet.add(1, 2)
        asking = asyncio.create_task(fleet.text(480))
        members = fleet.gateway.cluster.membership.members

        def idle() -> list[str]:
            return [one.worker_id for one in members() if not (one.load.num_running or one.load.num_held)]

        await fleet.until(lambda: len(idle()) == 2 and any(one.load.num_running for one in members()))
        found = await profiled(options(fleet, *idle(), beside=False), lambda *news: None)
        asking.cancel()
    assert found.prefill
    assert not found.beside


async def test_what_cannot_be_measured_is_refused(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, QUICK) as fleet:
        await fleet.add(1, 1)
        ids = {one.role: one.worker_id for one in fleet.gateway.cluster.membership.members()}
        for names, error, text in (
            (["nobody"], InvalidRequest, ids["prefill"]),
            ([ids["prefill"]], InvalidRequest, "needs a worker that takes decode"),
            ([ids["decode"]], InvalidRequest, "needs a worker that takes prefill"),
        ):
            with pytest.raises(error, match=text):
                await profiled(options(fleet, *names), lambda *news: None)
    with pytest.raises(Unavailable, match="no halfmoon gateway"):
        await profiled(ProfileOptions("http://127.0.0.1:1"), lambda *news: None)


async def test_a_worker_that_dies_meanwhile_ends_the_profile(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, QUICK) as fleet:
        await fleet.add(1, 1)
        (decode,) = [one for one in fleet.simulation.workers() if one.role == "decode"]
        begun = asyncio.Event()
        work = profiled(options(fleet), when("decode batches", begun))
        profiling = asyncio.create_task(work)
        await begun.wait()
        await fleet.simulation.kill(decode)
        with pytest.raises(HalfmoonError):
            await profiling
