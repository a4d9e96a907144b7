"""Sweeps over live workers: every point is measured several times."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from itertools import zip_longest
from statistics import mean, median

from halfmoon.profiling.probe import Prefilled, Transferred, WorkerProbe
from halfmoon.profiling.sweep import SweepLimits, batch_points, prompt_points, transfer_points
from halfmoon.profiling.token_watch import SeenStep
from halfmoon.sim.latency_sources.measured_profile import MeasuredPrefill, MeasuredStep, MeasuredTransfer

Progress = Callable[[str, int, int], None]
"""Callback `(stage, done, total)` with numbers of points."""

_WARM_PROMPT = 64
_STOOD_STILL = 2.0  # medians; slower samples are stalls of the machine


def trimmed_mean(measured: Collection[float]) -> float:
    """The mean without samples above twice the median. The median itself would hide that some are slower."""
    most = _STOOD_STILL * median(measured)
    return mean(profile for profile in measured if profile <= most)


async def measured_work(
    prefill: WorkerProbe, decode: WorkerProbe, limits: SweepLimits, on_progress: Progress
) -> tuple[list[MeasuredPrefill], list[MeasuredStep]]:
    """Measures prompts and batches alternately: a worker that repeats the same work is faster than one in service."""
    prompts, batches = _Prompts(prefill, limits), _Batches(decode, limits)
    await prefill.prefill(prefill.prompt(_WARM_PROMPT))
    async with prefill.handing_over(decode) as receiver:
        for prompt, batch in zip_longest(
            _passes("prompts", len(prompts.points), limits.repeats, on_progress),
            _passes("decode batches", len(batches.points), limits.repeats, on_progress),
        ):
            if prompt is not None:
                await prompts.measure(prompt, receiver)
            if batch is not None:
                await batches.measure(batch)
    return prompts.found(), batches.found()


class _Prompts:
    """Owns the times of prompts alone on the worker, whose KV goes to the decode worker as it does in service. Knows
    nothing of decode batches.
    """

    def __init__(self, prefill: WorkerProbe, limits: SweepLimits) -> None:
        self._probe = prefill
        self.points = list(prompt_points(prefill.target, limits))
        self._prefixes = [prefill.prompt(point.cached_tokens) for point in self.points]
        self._taken: list[list[Prefilled]] = [[] for _ in self.points]

    async def measure(self, number: int, receiver: WorkerProbe | None) -> None:
        """Measures one point once more."""
        prefix, probe = self._prefixes[number], self._probe
        if prefix:
            await probe.prefill(prefix)  # the worker caches it
        prompt = [*prefix, *probe.prompt(self.points[number].new_tokens)]
        self._taken[number].append(await probe.prefill(prompt, receiver))

    def found(self) -> list[MeasuredPrefill]:
        """The mean of each point."""
        return [
            MeasuredPrefill(
                new_tokens=some[-1].new_tokens,
                cached_tokens=some[-1].cached_tokens,
                seconds=trimmed_mean([sample.seconds for sample in some]),
                is_held_out=point.is_held_out,
            )
            for point, some in zip(self.points, self._taken, strict=True)
        ]


class _Batches:
    """Owns the times of decode steps of batches without prompts. Knows nothing of prompts."""

    def __init__(self, decode: WorkerProbe, limits: SweepLimits) -> None:
        self._probe = decode
        self._num_steps = limits.steps
        self.points = list(batch_points(decode.target, limits))
        self._taken: list[list[list[SeenStep]]] = [[] for _ in self.points]

    async def measure(self, number: int) -> None:
        """Measures one point once more."""
        point = self.points[number]
        self._taken[number].append(await self._probe.decode(point.batch, point.context_tokens, self._num_steps))

    def found(self) -> list[MeasuredStep]:
        """The mean over each point's runs and their steps, because an answer takes the sum of its steps."""
        return [
            MeasuredStep(
                batch=point.batch,
                context_tokens=round(mean(step.context_tokens for run in some for step in run)),
                seconds=trimmed_mean([mean(step.seconds for step in run) for run in some]),
                is_held_out=point.is_held_out,
            )
            for point, some in zip(self.points, self._taken, strict=True)
        ]


async def measured_transfers(probe: WorkerProbe, limits: SweepLimits, on_progress: Progress) -> list[MeasuredTransfer]:
    """Measures hand-overs to the idle worker by each transport. A transport that it declines is omitted."""
    points = [(name, one) for name in probe.transports for one in transfer_points(probe.target, limits)]
    taken: list[list[Transferred]] = [[] for _ in points]
    for number in _passes("transfers", len(points), limits.repeats, on_progress):
        name, num_tokens = points[number]
        taken[number].append(await probe.transfer(num_tokens, name))
    return [
        MeasuredTransfer(
            num_bytes=some[-1].num_bytes,
            seconds=median(sample.seconds for sample in some),
            transport=some[-1].transport,
        )
        for (name, _), some in zip(points, taken, strict=True)
        if some[-1].transport == name
    ]


def _passes(what: str, num_points: int, repeats: int, on_progress: Progress) -> Iterator[int]:
    """Yields each point once per pass, so that a temporary slowdown of the machine does not affect a single point."""
    total = repeats * num_points
    for done in range(total):
        on_progress(what, done, total)
        yield done % num_points
    on_progress(what, total, total)
