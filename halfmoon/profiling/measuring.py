"""The sweeps over live workers: every point measured several times, the median kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import mean, median

from halfmoon.profiling.probe import Prefilled, Transferred, WorkerProbe
from halfmoon.profiling.sweep import SweepLimits, batch_points, prompt_points, transfer_points
from halfmoon.profiling.token_watch import SeenStep
from halfmoon.sim.profile import MeasuredPrefill, MeasuredStep, MeasuredTransfer

Progress = Callable[[str, int, int], None]
"""Told what is measured, how many points are done, of how many."""

_WARM_PROMPT = 64


async def measured_prefills(
    probe: WorkerProbe, decode: WorkerProbe, limits: SweepLimits, on_progress: Progress
) -> list[MeasuredPrefill]:
    """Prompts alone on the worker, whose KV goes to the decode worker as it does when the two serve."""
    points = list(prompt_points(probe.target, limits))
    prefixes = [probe.prompt(point.cached_tokens) for point in points]
    taken: list[list[Prefilled]] = [[] for _ in points]
    await probe.prefill(probe.prompt(_WARM_PROMPT))
    async with probe.handing_over(decode) as receiver:
        for number in _passes("prompts", len(points), limits.repeats, on_progress):
            if prefixes[number]:
                await probe.prefill(prefixes[number])  # the worker keeps it
            prompt = [*prefixes[number], *probe.prompt(points[number].new_tokens)]
            taken[number].append(await probe.prefill(prompt, receiver))
    return [
        MeasuredPrefill(
            new_tokens=some[-1].new_tokens,
            cached_tokens=some[-1].cached_tokens,
            seconds=median(one.seconds for one in some),
            is_held_out=point.is_held_out,
        )
        for point, some in zip(points, taken, strict=True)
    ]


async def measured_steps(probe: WorkerProbe, limits: SweepLimits, on_progress: Progress) -> list[MeasuredStep]:
    """Batches that decode and nothing else: of each run the mean of its steps, as an answer takes their sum."""
    points = list(batch_points(probe.target, limits))
    taken: list[list[list[SeenStep]]] = [[] for _ in points]
    for number in _passes("decode batches", len(points), limits.repeats, on_progress):
        point = points[number]
        taken[number].append(await probe.decode(point.batch, point.context_tokens, limits.steps))
    return [
        MeasuredStep(
            batch=point.batch,
            context_tokens=round(mean(one.context_tokens for run in some for one in run)),
            seconds=median(mean(one.seconds for one in run) for run in some),
            is_held_out=point.is_held_out,
        )
        for point, some in zip(points, taken, strict=True)
    ]


async def measured_transfers(probe: WorkerProbe, limits: SweepLimits, on_progress: Progress) -> list[MeasuredTransfer]:
    """Hand-overs to the idle worker, by each transport; one that it declines is left out."""
    points = [(name, one) for name in probe.transports for one in transfer_points(probe.target, limits)]
    taken: list[list[Transferred]] = [[] for _ in points]
    for number in _passes("transfers", len(points), limits.repeats, on_progress):
        name, num_tokens = points[number]
        taken[number].append(await probe.transfer(num_tokens, name))
    return [
        MeasuredTransfer(
            num_bytes=some[-1].num_bytes, seconds=median(one.seconds for one in some), transport=some[-1].transport
        )
        for (name, _), some in zip(points, taken, strict=True)
        if some[-1].transport == name
    ]


def _passes(what: str, num_points: int, repeats: int, on_progress: Progress) -> Iterator[int]:
    """Each point once a pass, so that what slows the machine for a while does not fall on one of them alone."""
    total = repeats * num_points
    for done in range(total):
        on_progress(what, done, total)
        yield done % num_points
    on_progress(what, total, total)
