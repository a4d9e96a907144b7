"""Calibration of an engine that steps by itself, such as vLLM: before it serves anybody."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from halfmoon.config.worker import Calibrate
from halfmoon.engine.engine_facts import EngineFacts
from halfmoon.engine.request import EngineRequest
from halfmoon.engine.step_result import StepResult
from halfmoon.worker.membership.calibration import (
    Profile,
    device_name,
    keep_profile,
    kind_text,
    load_profile,
    log_profile,
    note_steps,
    profile_file,
)
from halfmoon.worker.membership.trials import TrialRoom, trial_requests, trials, trials_text, warm_up
from halfmoon.worker.serving_engine import ServingEngine


class StepTap:
    """Passes an engine's steps on, but for those of trials, which it returns. Event-loop thread only.

    Blocks of trials stay out of the stores, also those that are reported behind the last step of a trial.
    """

    def __init__(self, on_step: Callable[[StepResult], None]) -> None:
        self._on_step = on_step
        self._trial: list[StepResult] | None = None
        self._changed = asyncio.Event()
        self._trial_ids: set[str] = set()

    def __call__(self, result: StepResult) -> None:
        """Takes a step."""
        if self._trial is None:
            if result.chains:
                chains = tuple(chain for chain in result.chains if chain.request_id not in self._trial_ids)
                result = replace(result, chains=chains)
            self._on_step(result)
        else:
            self._trial.append(result)
            self._changed.set()

    async def steps(
        self, engine: ServingEngine, requests: Sequence[EngineRequest], give_up_s: float
    ) -> list[StepResult]:
        """Steps of an engine that has nothing else to do, until these requests have ended, or it is too late."""
        results = self._trial = []
        self._trial_ids |= {request.request_id for request in requests}
        try:
            for request in requests:
                await engine.add(request)
            with suppress(TimeoutError):
                async with asyncio.timeout(give_up_s - time.monotonic()):
                    while _num_ended(results) < len(requests):
                        self._changed.clear()
                        await self._changed.wait()
            for request in requests:
                await engine.cancel(request.request_id)
            return results
        finally:
            self._trial = None


async def calibrated_serving(
    engine: ServingEngine,
    tap: StepTap,
    facts: EngineFacts,
    role: str,
    how: Calibrate,
    seconds: float,
    state_dir: Path,
    options: str = "",
) -> Profile | None:
    """Like `calibrated`, of an engine that steps by itself and serves nobody yet. options: on which speed depends."""
    if how == "never":
        return None
    layout, device = facts.layout, device_name(facts.device)
    ranks = {"tensor_parallel": facts.tensor_parallel, "pipeline_parallel": facts.pipeline_parallel}
    limits = f"steps of {facts.step_tokens}, batches of {facts.max_running}"
    parts = (role, facts.fingerprint, device, layout.dtype, *(f"{name} {num}" for name, num in ranks.items()))
    room = TrialRoom(facts.step_tokens, facts.context_tokens, layout.block_tokens, facts.num_blocks, facts.max_running)
    kind = kind_text(*parts, limits, trials_text(room, role), options)
    file = profile_file(state_dir, kind)
    profile = load_profile(file, kind) if how == "auto" else None
    if profile is None:
        profile = await _measured(engine, tap, room, role, kind, seconds)
        keep_profile(file, profile, {"model": facts.model, "device": device, **ranks}, layout, facts.num_blocks)
    log_profile(profile)
    return profile


async def _measured(
    engine: ServingEngine, tap: StepTap, room: TrialRoom, role: str, kind: str, seconds: float
) -> Profile:
    profile = Profile(kind)
    await tap.steps(engine, trial_requests(warm_up(room), "0"), time.monotonic() + seconds)
    give_up_s = time.monotonic() + seconds
    for number, trial in enumerate(trials(room, role), 1):
        note_steps(profile, trial, await tap.steps(engine, trial_requests(trial, str(number)), give_up_s))
        if time.monotonic() > give_up_s:
            break
    return profile


def _num_ended(results: Sequence[StepResult]) -> int:
    return sum(output.finish_reason is not None for result in results for output in result.outputs)
