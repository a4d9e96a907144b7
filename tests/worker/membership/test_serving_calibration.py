"""An engine that steps by itself is measured before it serves, once, and nobody hears of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmoon.engine.async_engine import AsyncEngine
from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine import Engine
from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.engine.step_result import BlockChain, StepResult
from halfmoon.worker.engine_host import OwnHost
from halfmoon.worker.membership.serving_calibration import StepTap, calibrated_serving


@pytest.fixture
def engine(tiny: Checkpoint) -> Engine:
    return Engine(tiny, EngineConfig(num_blocks=64, block_tokens=8, max_batch_tokens=80, max_running=8, num_threads=1))


async def test_trials_are_measured_and_steps_of_requests_are_passed_on(engine: Engine, tmp_path: Path) -> None:
    steps: list[StepResult] = []
    tap, facts = StepTap(steps.append), OwnHost(engine, None).facts
    async with AsyncEngine(engine, tap) as serving:
        profile = await calibrated_serving(serving, tap, facts, "both", "auto", 60, tmp_path)
        assert profile is not None
        assert {sample.new_tokens for sample in profile.prefills} >= {10, 40, 80}
        assert max(sample.batch for sample in profile.steps) == 4
        assert any(profile.prefill_model)
        assert any(profile.step_model)
        assert steps == []
        late, own = BlockChain("calibration-1-0", (b"k",)), BlockChain("r", (b"k",))
        tap(StepResult(chains=(late, own)))
        assert [step.chains for step in steps] == [(own,)]
        assert serving.stats_now().num_running == 0
        again = await calibrated_serving(serving, tap, facts, "both", "auto", 0.0, tmp_path)
        assert again is not None
        assert again.prefills == profile.prefills
        assert await calibrated_serving(serving, tap, facts, "both", "never", 60, tmp_path) is None
        other = await calibrated_serving(serving, tap, facts, "both", "auto", 0.0, tmp_path, "--enforce-eager")
        assert other is not None
        assert other.kind != profile.kind
        await serving.add(EngineRequest("r", tuple(range(3, 20)), SamplingParams(max_tokens=1)))
        await serving.cancel("r")
        serving.check_open()
