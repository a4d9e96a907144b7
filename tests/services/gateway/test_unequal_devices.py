"""Workers of unequal devices behind one gateway: a rule decides which prompts each computes, and they are counted."""

from __future__ import annotations

from pathlib import Path

from halfmoon.pb.gateway_pb2 import LatencyProfile
from tests.services.gateway.fakes import Fleet, running_fleet

KNOWN = LatencyProfile(kind="fake", prefill=[0.0, 1e-3, 0.0], step=[0.01, 0.0, 0.0])
SLOW = LatencyProfile(kind="slow", prefill=[0.0, 1e-2, 0.0], step=[0.01, 0.0, 0.0])


async def asked(fleet: Fleet, prompt: str) -> None:
    await fleet.client.completions.create(model="bytes", prompt=prompt, max_tokens=8)


async def test_a_rule_of_length_decides_and_each_device_is_counted(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, prefill_devices=("cuda tokens<=20", "cpu tokens<=40")) as fleet:
        quick = await fleet.add("gpu", "prefill", device="cuda", profile=KNOWN, step_tokens=512)
        slow = await fleet.add("cpu", "prefill", device="cpu", profile=SLOW, step_tokens=512)
        await fleet.add("d0", "decode", device="cuda", profile=KNOWN)
        for prompt in ("short", "a prompt of more than twenty tokens"):
            await asked(fleet, prompt)
        metrics = await fleet.metrics()
    assert [len(worker.calls.prefills) for worker in (quick, slow)] == [1, 1]
    assert 'halfmoon_gateway_prefill_devices_total{device="cuda"} 1.0' in metrics
    assert 'halfmoon_gateway_prefill_devices_total{device="cpu"} 1.0' in metrics
