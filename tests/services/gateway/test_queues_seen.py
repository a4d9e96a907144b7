"""How long a gateway believes that a worker's queue is, beside what it is."""

from __future__ import annotations

import asyncio
import random
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from halfmoon.pb.gateway_pb2 import LatencyProfile, WorkerIdentity, WorkerLoad
from halfmoon.pb.types_pb2 import BOTH, DECODE, PREFILL
from halfmoon.policy.forecast.request_forecast import RequestForecast, RunningRequest
from halfmoon.policy.models.latency import PrefillSample
from halfmoon.policy.placement.place import PlacementRules, place
from halfmoon.policy.values import Placement, PlacementRequest
from services.gateway.cluster.membership import Membership
from tests.services.gateway.fakes import FINGERPRINT, LAYOUT, MODEL, Fleet, Script, running_fleet

S_PER_TOKEN = 1e-3
OURS = 1_000  # tokens of this gateway's prompt, which the worker computes first
_TOKEN_OF_SECOND = re.compile(rb'"text": ?"[^"]*l')
BODY = {"model": MODEL, "prompt": "a prompt", "max_tokens": 8}


class _Gateway:
    """One that sends prompts to one worker, or a prefill and a decode worker."""

    def __init__(self, role: str, step_tokens: int) -> None:
        self.membership = Membership(FINGERPRINT, 1.0)
        self.forecast = RequestForecast(PlacementRules().fetching_threshold)
        roles = {"b": BOTH} if role == "both" else {"p": PREFILL, "d": DECODE}
        self.members = [self.membership.join(_identity(name, one, step_tokens), 0.0) for name, one in roles.items()]
        self.membership.set_listening(self.members[-1], True)

    def place(self, num_tokens: int, now_s: float) -> Placement:
        view, request = self.membership.view(), PlacementRequest(num_tokens, 1)
        return place(view, request, PlacementRules(), self.forecast, now_s, random.Random(0))

    def send(self, name: str, num_tokens: int, now_s: float) -> None:
        placement, view = self.place(num_tokens, now_s), self.membership.view()
        self.forecast.move(name, view, RunningRequest(num_tokens, 1.0, 0.0, 0), placement, now_s)
        self.membership.note_placed(name, self.members[0], self.members[-1], num_tokens, now_s)

    def computed(self, name: str, num_tokens: int, now_s: float) -> None:
        self.membership.note_prefilled(name, self.members[0], PrefillSample(num_tokens, 0, num_tokens * 1e-3), now_s)
        self.forecast.begin_decode(name, now_s)
        self.membership.note_ended(name, self.members[0], self.members[-1], now_s)
        self.forecast.leave(name, now_s)


def _identity(name: str, role: Any, step_tokens: int) -> WorkerIdentity:
    return WorkerIdentity(
        worker_id=name,
        role=role,
        address=f"{name}:1",
        model_fingerprint=FINGERPRINT,
        layout=LAYOUT,
        context_tokens=64_000,
        total_blocks=8_000,
        step_tokens=step_tokens,
        chunk_tokens=step_tokens,
        profile=LatencyProfile(prefill=[0.0, S_PER_TOKEN, 0.0], step=[0.0, 0.0, 0.0]),
    )


@pytest.mark.parametrize("role", ["prefill", "both"])
@pytest.mark.parametrize("step_tokens", [0, 200])  # 0: how it forms its steps is not known
@pytest.mark.parametrize("num_others", [0, 3_000])  # tokens that another gateway sent behind ours
@pytest.mark.parametrize("reported_s", [0.0, 0.9])  # before the worker began with ours, and near its end
def test_the_queue_of_a_worker_is_what_it_has_to_do(
    role: str, step_tokens: int, num_others: int, reported_s: float
) -> None:
    gateway = _Gateway(role, step_tokens)
    gateway.send("ours", OURS, 0.0)
    left = OURS + num_others - round(reported_s / S_PER_TOKEN)
    gateway.membership.report(gateway.members[0], WorkerLoad(waiting_prefill_tokens=left), reported_s)
    gateway.computed("ours", OURS, OURS * S_PER_TOKEN)
    now_s = 1.5
    queue_s = max((OURS + num_others) * S_PER_TOKEN - now_s, 0.0)
    assert gateway.place(100, now_s).queue_s == pytest.approx(queue_s)


async def test_a_prompt_that_is_computed_again_elsewhere_is_ahead_of_nobody_then(tmp_path: Path) -> None:
    slow = LatencyProfile(prefill=[0.0, 1.0, 0.0])  # a second a token, by what it says
    async with running_fleet(tmp_path) as fleet, aiohttp.ClientSession() as session:
        await fleet.add("p0", "prefill", profile=slow)
        first = await fleet.add("d0", "decode", Script("hello", asyncio.Event(), tokens_before_gate=1))
        async with session.post(f"{fleet.http}/v1/completions", json={**BODY, "stream": True}) as response:
            await response.content.readline()
            second = await fleet.add("d1", "decode", Script("hello", asyncio.Event(), tokens_before_gate=2))
            first.end_registration.set()
            while not _TOKEN_OF_SECOND.search(line := await response.content.readline()):
                assert line
            assert second.decoding
            assert await _next_queue_s(fleet, session) == 0.0


async def _next_queue_s(fleet: Fleet, session: aiohttp.ClientSession) -> float:
    """That is predicted for one more prompt."""
    other = asyncio.ensure_future(session.post(f"{fleet.http}/v1/completions", json={**BODY, "prompt": "another one"}))
    try:
        async with asyncio.timeout(20):
            while True:
                async with session.get(f"{fleet.http}/halfmoon/v1/placements") as response:
                    newest = (await response.json())[0]
                if newest["prompt_tokens"] == len("another one"):
                    queue_s: float = newest["candidates"][0]["queue_s"]
                    return queue_s
    finally:
        other.cancel()
