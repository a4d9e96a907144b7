"""The autopilot in the control API: what it sees, how it stands, and its mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from halfmoon.pb.gateway_pb2 import WorkerLoad
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.models.refinement import WorkerLatency
from halfmoon.policy.scaling.observed_json import observation_from
from tests.services.gateway.fakes import Fleet, running_fleet
from tests.services.gateway.test_access import ask
from tests.services.gateway.test_failures import chat

PATH = "/halfmoon/v1/autopilot"


async def observe(fleet: Fleet, **status: Any) -> Any:
    status_code, _, answer = await ask(fleet, "POST", f"{PATH}/observation", json={"seconds": 60, "status": status})
    assert status_code == 200
    return answer


async def test_it_sees_workers_and_what_ended(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, num_gateways=3) as fleet:
        await fleet.pair()
        assert await chat(fleet) == "hello"
        await fleet.until_idle()
        traffic = fleet.gateway.routing.telemetry.traffic
        now_s = fleet.cluster.clock() + 2  # whole seconds count
        seen = traffic.observation(fleet.cluster.membership.members(), 60, now_s)
        answer = await observe(fleet)
    assert (seen.traffic.num_requests, seen.traffic.num_ended, seen.traffic.num_in_ttft) == (1, 1, 1)
    shown = observation_from(answer["observation"], 0.0)
    assert [(worker.worker_id, worker.role, worker.epoch) for worker in shown.workers] == [
        ("p0", "prefill", 0),
        ("d0", "decode", 0),
    ]
    assert (answer["num_gateways"], answer["mode"], shown.speed) == (3, None, seen.speed)


async def test_the_speed_of_decodes_is_that_of_workers_that_decode(tmp_path: Path) -> None:
    """Prefill workers measured a decode or two, in case that their role changes."""
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair()
        members = [fleet.cluster.worker(name).member for name in ("p0", "d0")]
        for member, step in zip(members, (StepModel(9.0), StepModel(0.1, 0.01)), strict=True):
            member.latency = WorkerLatency(PrefillModel(), step)
        seen = fleet.gateway.routing.telemetry.traffic.observation(members, 60, fleet.cluster.clock())
    assert seen.speed.step == StepModel(0.1, 0.01)


async def test_a_prompt_that_is_computed_does_not_count_as_an_answer(tmp_path: Path) -> None:
    """It is counted where its place is reserved, on the decode worker."""
    async with running_fleet(tmp_path) as fleet:
        prefill, decode = await fleet.pair()
        prefill.loads.put_nowait(
            WorkerLoad(sequence=3, num_running=3, num_prefilling=2, context_tokens=3000, free_blocks=40)
        )
        decode.loads.put_nowait(
            WorkerLoad(sequence=3, num_running=4, num_reserved=2, context_tokens=800, free_blocks=40)
        )
        members = [fleet.cluster.worker(name).member for name in ("p0", "d0")]
        await fleet.until_told(lambda: all(member.load.sequence == 3 for member in members))
        workers = (await observe(fleet))["observation"]["workers"]
    seen = {worker["worker_id"]: (worker["num_running"], worker["context_tokens"]) for worker in workers}
    assert seen == {"p0": (1, 3000), "d0": (6, 800)}


async def test_targets_are_those_of_the_classes_with_requests(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair()
        put = await ask(fleet, "PUT", "/halfmoon/v1/classes/default", json={"ttft_s": 30.0, "tbt_s": 5.0})
        assert put[0] == 200
        assert (await observe(fleet))["observation"]["ttft_s"] is None
        await chat(fleet)
        await fleet.until_idle()
        shown = (await observe(fleet))["observation"]
    assert (shown["ttft_s"], shown["tpot_s"]) == (30.0, 5.0)


async def test_the_mode_is_an_operators(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        assert (await ask(fleet, "GET", PATH))[2]["mode"] is None  # no planner has been here
        await observe(fleet, own_mode="observe", reason="all is well")
        shown = (await ask(fleet, "GET", PATH))[2]
        assert (shown["mode"], shown["set"], shown["status"]["reason"]) == ("observe", None, "all is well")
        assert shown["status_at"]
        status, _, shown = await ask(fleet, "PUT", PATH, json={"mode": "act"})
        assert (status, shown["mode"], shown["version"], shown["decisions"]) == (200, "act", 1, [])
        assert (await observe(fleet))["mode"] == "act"
        assert (await ask(fleet, "PUT", PATH, json={"mode": "off"}))[0] == 409
        assert (await ask(fleet, "PUT", PATH, json={"mode": "on", "version": 1}))[0] == 400
        assert (await ask(fleet, "PUT", PATH, json={"mode": None, "version": 1}))[2]["mode"] is None
        assert (await observe(fleet))["mode"] is None
