"""A gateway over simulated workers: many of them, many streams, deaths. The protocol is the real one, end to end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.sim.answer_model import AnswerModel
from halfmoon.sim.latency_sources.worker_profile import INSTANT, PROFILES, WorkerProfile, coefficients
from halfmoon.worker.simulated.simulation import SimulatedCluster, SimulatedModel, Simulation, running_simulation
from services.gateway.service import RunningGateway, running_gateway
from services.gateway.settings import GatewaySettings
from tests.services.gateway.fakes import FINGERPRINT, MODEL, VOCAB_SIZE, served_model

INSTANTLY = PROFILES[INSTANT]
SLOWLY = replace(INSTANTLY, name="slow", latency=coefficients("slow", PrefillModel(), StepModel(d=0.05), 16_000_000, 1))
PATIENCE_S = 60  # for what must happen; never slept
PROMPT = list(b"the moon was half hidden ")


@dataclass
class SimulatedFleet:
    """A gateway, and workers that can be started and killed."""

    gateway: RunningGateway
    simulation: Simulation
    session: aiohttp.ClientSession

    async def add(self, num_prefill: int, num_decode: int) -> None:
        for _ in range(num_prefill):
            await self.simulation.start("prefill")
        for _ in range(num_decode):
            await self.simulation.start("decode")
        await self.until(lambda: len(self.ready()) == num_prefill + num_decode)

    def ready(self) -> list[Any]:
        members = self.gateway.cluster.membership.members()
        return [one for one in members if one.role == "prefill" or one.listening]

    async def until(self, holds: Any) -> None:
        """Waits until `holds`, which is no event."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0)

    async def until_idle(self) -> None:
        """Until every worker has said that nothing is left on it."""

        def is_idle(load: Any) -> bool:
            return not (load.num_running or load.num_waiting or load.num_reserved or load.num_held)

        members = self.gateway.cluster.membership.members()
        before = {one.worker_id: one.load.sequence for one in members}
        await self.until(
            lambda: all(
                one.load.sequence > before[one.worker_id] + 1
                and is_idle(one.load)
                and one.load.free_blocks == one.identity.total_blocks
                for one in self.gateway.cluster.membership.members()
            )
        )

    async def text(self, max_tokens: int, prompt: list[int] | None = None, **parameters: Any) -> str:
        body = {
            "model": MODEL,
            "prompt": prompt or PROMPT,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        url = f"{self.gateway.http}/v1/completions"
        found = ""
        async with self.session.post(url, json={**body, **parameters}) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    assert "error" not in event, event
                    found += event["choices"][0]["text"]
        return found


@asynccontextmanager
async def running_fleet(
    tmp_path: Path, profile: WorkerProfile, stores: tuple[str, ...] = (), **settings: Any
) -> AsyncIterator[SimulatedFleet]:
    """With workers that repeat the prompt, so that an answer shows what is lost or doubled."""
    options: dict[str, Any] = {"heartbeat_interval_s": 5.0, "drain_s": 0.0, **settings}
    answers = AnswerModel(VOCAB_SIZE, text="echo")
    model = SimulatedModel(MODEL, FINGERPRINT, profile, block_tokens=8, answers=answers)
    served = replace(served_model(), context_tokens=4096)
    chosen = GatewaySettings(port=0, state_dir=tmp_path, slo="off", **options)
    connector = aiohttp.TCPConnector(limit=0)
    async with running_gateway(chosen, served) as gateway, aiohttp.ClientSession(connector=connector) as session:
        cluster = SimulatedCluster(gateway.address, report_s=0.1, stores=stores)
        async with running_simulation(model, cluster) as simulation:
            yield SimulatedFleet(gateway, simulation, session)


def echo(num_tokens: int, prompt: list[int] = PROMPT) -> str:
    return bytes(prompt[index % len(prompt)] for index in range(num_tokens)).decode()


async def test_64_and_64_workers_of_one_process_serve(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, INSTANTLY, placement="random") as fleet:
        await fleet.add(64, 64)
        answers = await asyncio.gather(*(fleet.text(20 + index) for index in range(64)))
    assert answers == [echo(20 + index) for index in range(64)]


@pytest.mark.slow
async def test_a_thousand_streams_at_once(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, INSTANTLY) as fleet:
        await fleet.add(2, 2)
        answers = await asyncio.gather(*(fleet.text(8) for _ in range(1000)))
        assert answers == [echo(8)] * 1000
        await fleet.until_idle()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_requests_of_a_killed_worker_move(tmp_path: Path, role: str) -> None:
    async with running_fleet(tmp_path, SLOWLY, placement="random") as fleet:
        await fleet.add(2, 2)
        asking = [asyncio.create_task(fleet.text(40)) for _ in range(12)]
        workers = [one for one in fleet.simulation.workers() if one.role == role]
        members = fleet.gateway.cluster.membership.members
        await fleet.until(lambda: sum(one.load.num_running for one in members()) == 12)  # all have begun to decode
        await fleet.simulation.kill(workers[0])
        assert await asyncio.gather(*asking) == [echo(40)] * 12
        await fleet.until_idle()
        assert len(fleet.ready()) == 3


async def test_a_client_that_goes_away_leaves_nothing_behind(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, SLOWLY) as fleet:
        await fleet.add(1, 1)
        asking = [asyncio.create_task(fleet.text(2000)) for _ in range(10)]
        members = fleet.gateway.cluster.membership.members
        await fleet.until(lambda: sum(one.load.num_running for one in members()) == 10)
        for one in asking:
            one.cancel()
        await fleet.until_idle()


async def test_a_prefix_that_a_worker_has_is_known_to_the_gateway_and_used(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, INSTANTLY) as fleet:
        await fleet.add(1, 1)
        prompt = PROMPT * 4
        await fleet.text(2, prompt)
        (worker,) = (one for one in fleet.ready() if one.role == "prefill")
        index = fleet.gateway.cluster.membership.index
        await fleet.until(lambda: index.num_blocks(worker.holder) == len(prompt) // 8)
        known = (len(prompt) - 1) // 8 * 8
        for salt, num_cached in ((None, known), ("tenant", 0), ("tenant", known), ("other", 0)):
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "cache_salt": salt}
            async with fleet.session.post(f"{fleet.gateway.http}/v1/completions", json=body) as response:
                usage = (await response.json())["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == num_cached


async def test_a_full_decode_worker_refuses_and_the_request_goes_elsewhere(tmp_path: Path) -> None:
    small = replace(SLOWLY, latency=replace(SLOWLY.latency, kv_tokens=64))  # of one request
    async with running_fleet(tmp_path, small, placement="random") as fleet:
        await fleet.add(1, 2)
        assert await asyncio.gather(*(fleet.text(20) for _ in range(2))) == [echo(20)] * 2


async def test_what_needs_a_model_is_refused(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, INSTANTLY) as fleet:
        await fleet.add(1, 1)
        body = {"model": MODEL, "prompt": PROMPT, "structured_outputs": {"choice": ["yes", "no"]}}
        async with fleet.session.post(f"{fleet.gateway.http}/v1/completions", json=body) as response:
            assert response.status >= 400
            assert "simulated" in (await response.json())["error"]["message"]
