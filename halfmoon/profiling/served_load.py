"""A short served load: request latencies while workers, gateway and clients share the cores of a host."""

from __future__ import annotations

import asyncio
import time
from statistics import mean

import aiohttp

from halfmoon.errors import leaf_errors
from halfmoon.profiling.fitted_contention import ServedMeans, fitted_slowdowns
from halfmoon.profiling.measuring import Progress
from halfmoon.profiling.probe import WorkerProbe
from halfmoon.profiling.served_request import served
from halfmoon.profiling.target import Cluster
from halfmoon.sim.latency_sources.measured_profile import MeasuredProfile, MeasuredSlowdown
from halfmoon.sim.workloads.drawn_workload import synthetic_workload
from halfmoon.sim.workloads.lengths import named_lengths
from halfmoon.sim.workloads.workload import Workload

_REQUESTS = 48
_PROMPT_TOKENS = 256
_ANSWER_TOKENS = 32
_BUSY_SHARE = 0.6  # of each worker's time, without interference
_SEED = 1


async def served_slowdowns(
    session: aiohttp.ClientSession,
    cluster: Cluster,
    probe: WorkerProbe,
    profile: MeasuredProfile,
    on_progress: Progress,
) -> list[MeasuredSlowdown]:
    """Measures the slowdown of prompts and steps under load, on workers of one kind that share one host.

    `profile` has all other figures. Raises what `served` raises.
    """
    workload = _workload(profile, len(cluster.workers))
    means = await _served(session, cluster, probe, workload, on_progress)
    return await asyncio.to_thread(
        fitted_slowdowns, profile, [worker.role for worker in cluster.workers], workload, means
    )


def _workload(profile: MeasuredProfile, num_workers: int) -> Workload:
    most = profile.limits.context_tokens
    prompt_tokens = max(min(_PROMPT_TOKENS, most // 2), 1)
    answer_tokens = max(min(_ANSWER_TOKENS, most - prompt_tokens - 1), 2)
    latency = profile.model(None, profile.tensor_parallel, profile.pipeline_parallel)
    work_s = latency.prefill_s(prompt_tokens) + answer_tokens * latency.step_s(1, prompt_tokens)
    lengths = named_lengths(f"in={prompt_tokens},out={answer_tokens}")
    return synthetic_workload(lengths, _REQUESTS, _BUSY_SHARE * num_workers / work_s, seed=_SEED)


async def _served(
    session: aiohttp.ClientSession, cluster: Cluster, probe: WorkerProbe, workload: Workload, on_progress: Progress
) -> ServedMeans:
    """Sends every request at its time, regardless of earlier ones."""
    num, done = len(workload), 0
    began_s = time.monotonic()

    async def one(start_s: float, prompt_tokens: int, answer_tokens: int) -> ServedMeans:
        nonlocal done
        await asyncio.sleep(max(began_s + start_s - time.monotonic(), 0.0))
        async with served(session, cluster, probe.prompt(prompt_tokens), answer_tokens) as request:
            event_times_s = await request.whole()
        done += 1
        on_progress("side by side", done, num)
        return ServedMeans(request.ttft_s, (event_times_s[-1] - event_times_s[0]) / (answer_tokens - 1))

    rows = zip(workload.start_s.tolist(), workload.prompt_tokens.tolist(), workload.output_tokens.tolist(), strict=True)
    on_progress("side by side", 0, num)
    try:
        async with asyncio.TaskGroup() as requests:
            tasks = [requests.create_task(one(*row)) for row in rows]
    except ExceptionGroup as failures:
        raise leaf_errors(failures)[0] from failures
    result = [task.result() for task in tasks]
    return ServedMeans(mean(one.ttft_s for one in result), mean(one.tpot_s for one in result))
