"""The sweeps over live workers: every point measured several times, the median kept."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from halfmoon.profiling.probe import WorkerProbe
from halfmoon.profiling.sweep import SweepLimits, batch_points, prompt_points, transfer_points
from halfmoon.sim.profile import MeasuredPrefill, MeasuredStep, MeasuredTransfer

Progress = Callable[[str, int, int], None]
"""Told what is measured, how many points are done, of how many."""

_WARM_PROMPT = 64


async def measured_prefills(probe: WorkerProbe, limits: SweepLimits, on_progress: Progress) -> list[MeasuredPrefill]:
    """Prompts alone on the worker."""
    found = []
    points = list(prompt_points(probe.target, limits))
    await probe.prefill(probe.prompt(_WARM_PROMPT))
    for number, point in enumerate(points):
        on_progress("prompts", number, len(points))
        prefix = probe.prompt(point.cached_tokens)
        if prefix:
            await probe.prefill(prefix)  # the worker keeps it
        taken = [await probe.prefill([*prefix, *probe.prompt(point.new_tokens)]) for _ in range(limits.repeats)]
        found.append(
            MeasuredPrefill(
                new_tokens=taken[-1].new_tokens,
                cached_tokens=taken[-1].cached_tokens,
                seconds=median(one.seconds for one in taken),
                is_held_out=point.is_held_out,
            )
        )
    on_progress("prompts", len(points), len(points))
    return found


async def measured_steps(probe: WorkerProbe, limits: SweepLimits, on_progress: Progress) -> list[MeasuredStep]:
    """Batches that decode and nothing else."""
    found = []
    points = list(batch_points(probe.target, limits))
    for number, point in enumerate(points):
        on_progress("decode batches", number, len(points))
        steps = await probe.decode(point.batch, point.context_tokens, limits.steps)
        found.append(
            MeasuredStep(
                batch=point.batch,
                context_tokens=round(median(one.context_tokens for one in steps)),
                seconds=median(one.seconds for one in steps),
                is_held_out=point.is_held_out,
            )
        )
    on_progress("decode batches", len(points), len(points))
    return found


async def measured_transfers(probe: WorkerProbe, limits: SweepLimits, on_progress: Progress) -> list[MeasuredTransfer]:
    """Hand-overs to the idle worker, by each transport; one that it declines is left out."""
    found = []
    points = [(name, one) for name in probe.transports for one in transfer_points(probe.target, limits)]
    for number, (name, num_tokens) in enumerate(points):
        on_progress("transfers", number, len(points))
        taken = [await probe.transfer(num_tokens, name) for _ in range(limits.repeats)]
        if taken[-1].transport == name:
            seconds = median(one.seconds for one in taken)
            found.append(MeasuredTransfer(num_bytes=taken[-1].num_bytes, seconds=seconds, transport=name))
    on_progress("transfers", len(points), len(points))
    return found
