"""`halfmoon up --plan` with KV and weights on the host: the planned options reach the workers, and the text stays."""

from __future__ import annotations

from pathlib import Path

import aiohttp
import pytest
import yaml

from tests.e2e.system import System, running_system

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]

SHORT = ("--set", "workers.all.max_context_tokens=512", "--set", "workers.all.calibrate=never")


def planned() -> str:
    """A plan as `halfmoon plan --host-kv --host-weights` writes it, for a worker without a GPU."""
    worker = {"role": "both", "count": 1, "tp": 1, "pp": 1, "offload_bytes": 64 << 20, "offload_weights": 0.5}
    return yaml.safe_dump({"model": "demo", "handover_codec": "raw", "cluster": {"workers": [worker]}})


async def answer(system: System, session: aiohttp.ClientSession) -> str:
    body = {"prompt": "The moon is " * 100, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    async with session.post(f"{system.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return str((await response.json())["choices"][0]["text"])


async def test_a_worker_with_kv_and_weights_on_the_host_starts_as_planned(tmp_path: Path) -> None:
    plan, state = tmp_path / "plan.yaml", tmp_path / "state"
    plan.write_text(planned())
    # room for a part of the request's KV on the device, beside the staging buffers
    async with (
        running_system(state, "--plan", str(plan), "--kv-memory", "6MiB", *SHORT) as system,
        aiohttp.ClientSession() as session,
    ):
        with_host = await answer(system, session)
    logged = "".join(path.read_text() for path in state.rglob("*.log"))
    assert all(f'"{event}"' in logged for event in ("weights.on_host", "offload.chosen"))
    async with (
        running_system(tmp_path / "plain", "--model", "demo", *SHORT) as system,
        aiohttp.ClientSession() as session,
    ):
        assert await answer(system, session) == with_host
