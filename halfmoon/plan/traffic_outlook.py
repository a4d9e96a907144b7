"""What the next minutes' traffic will need: forecast from the last hours', and tried in the simulator. Pure.

The rate and the mean lengths are forecast, each by the method that back-tests best; the simulator then serves requests
like the latest ones at that rate by ratios of roles near the one with the least pressure.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from halfmoon.plan.traffic_forecast import Forecast, forecast
from halfmoon.policy.models.latency import Floats
from halfmoon.policy.scaling.observation import Split, WorkerSpeed
from halfmoon.policy.scaling.pressure import Capacity, Demand
from halfmoon.policy.view.worker_view import ROLES, Role
from halfmoon.sim.cluster.cluster_spec import BatchLimits, ClusterSpec, Network, SloTargets, WorkerGroup
from halfmoon.sim.latency_sources.worker_profile import coefficients
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workloads.workload import Workload

BIN_S = 60.0
_HORIZON = 2  # bins
_LIKE = 1_000  # latest requests whose lengths are drawn from
_MOST_REQUESTS = 600  # of one simulation
_LEAST_REQUESTS = 20  # in all, for an outlook
_NEAR = 2  # workers that a ratio may differ from the one with the least pressure
_ABOUT = 0.01  # attainments within are equal
_MOST_RUNNING = 4_096
_LINK_BYTES_PER_S = 25e9


@dataclass(frozen=True, slots=True)
class RecentTraffic:
    """Requests of the last hours, oldest first, and what serves them."""

    ages_s: Floats  # [num_requests], descending
    prompt_tokens: Floats  # [num_requests]
    output_tokens: Floats  # [num_requests]
    speed: WorkerSpeed
    ttft_s: float
    tpot_s: float
    attainment: float
    split: Split
    roles: tuple[Role, ...]


class Outlook(NamedTuple):
    """The next minutes."""

    demand: Demand
    rate_per_s: float
    method: str  # by which the rate was forecast
    error: float  # of its back-tests
    target: Split  # that did best in the simulator
    attained: float  # there


def outlook(recent: RecentTraffic) -> Outlook | None:
    """None where too little is known: few requests, or workers whose speed was not measured."""
    speed = recent.speed
    if len(recent.ages_s) < _LEAST_REQUESTS or not any(speed.prefill) or not any(speed.step) or not recent.split.serves:
        return None
    rate, prompts, outputs = _forecasts(recent)
    rate_per_s = float(rate.values.max()) / BIN_S
    prompt, output = max(float(prompts.values.mean()), 1.0), max(float(outputs.values.mean()), 1.0)
    prompt_s, context = speed.prefill.seconds(prompt), prompt + output / 2
    demand = Demand(rate_per_s * prompt_s, prompt_s, rate_per_s * output, context)
    if rate_per_s <= 0:
        return Outlook(demand, 0.0, rate.method, rate.error, recent.split, 1.0)
    capacity = Capacity(speed, recent.ttft_s, recent.tpot_s, recent.attainment)
    centre = capacity.best(recent.split, demand, recent.roles)
    workload = _workload(recent, rate_per_s, prompt, output)
    tried = {split: _attained(split, workload, recent) for split in _near(centre, recent.split)}
    most = max(tried.values())
    good = [split for split, attained in tried.items() if attained >= most - _ABOUT]
    target = min(good, key=lambda split: sum(abs(a - b) for a, b in zip(split, recent.split, strict=True)))
    return Outlook(demand, rate_per_s, rate.method, rate.error, target, tried[target])


def _forecasts(recent: RecentTraffic) -> tuple[Forecast, Forecast, Forecast]:
    """Forecasts of requests in a bin, of their mean prompt and of their mean output. Bins end now."""
    num = max(math.ceil(float(recent.ages_s[0]) / BIN_S), 1)
    bins = np.clip(num - 1 - (recent.ages_s // BIN_S).astype(np.int64), 0, num - 1)
    counts = np.bincount(bins, minlength=num).astype(np.float64)
    return (
        forecast(counts, _HORIZON),
        forecast(_means(bins, recent.prompt_tokens, counts), _HORIZON),
        forecast(_means(bins, recent.output_tokens, counts), _HORIZON),
    )


def _means(bins: np.ndarray, values: Floats, counts: Floats) -> Floats:
    """The mean of each bin; an empty one has that of the bin before."""
    sums = np.bincount(bins, weights=values, minlength=len(counts))
    filled = np.maximum.accumulate(np.where(counts > 0, np.arange(len(counts)), 0))
    means: Floats = np.divide(sums, counts, out=np.full(len(counts), float(values.mean())), where=counts > 0)
    return means[filled]


def _workload(recent: RecentTraffic, rate_per_s: float, prompt: float, output: float) -> Workload:
    """Requests like the latest ones, with these means, as a Poisson process."""
    rng = np.random.default_rng(0)
    num = int(np.clip(rate_per_s * _HORIZON * BIN_S, 2, _MOST_REQUESTS))
    rows = rng.integers(max(len(recent.ages_s) - _LIKE, 0), len(recent.ages_s), num)
    starts_s = np.cumsum(rng.exponential(1 / rate_per_s, num))
    return Workload(starts_s, _scaled(recent.prompt_tokens[rows], prompt), _scaled(recent.output_tokens[rows], output))


def _scaled(lengths: Floats, mean: float) -> np.ndarray:
    scaled = lengths * mean / max(float(lengths.mean()), 1.0)
    return np.maximum(np.rint(scaled), 1).astype(np.int64)


def _near(centre: Split, present: Split) -> list[Split]:
    """The present ratio and those about the centre, with as many workers."""
    tried = [centre, present]
    for offset in range(-_NEAR, _NEAR + 1):
        split = Split(centre.prefill + offset, centre.decode - offset, centre.both)
        if min(split) >= 0 and split.serves:
            tried.append(split)
    return list(dict.fromkeys(tried))


def _attained(split: Split, workload: Workload, recent: RecentTraffic) -> float:
    speed = recent.speed
    kv_tokens = int(min(speed.kv_tokens, 1 << 40))
    latency = coefficients("the median worker", speed.prefill, speed.step, kv_tokens, 1.0)
    limits = BatchLimits(max_running=int(min(speed.max_running, _MOST_RUNNING)))
    groups = tuple(WorkerGroup(role, split.of(role), latency, limits) for role in ROLES if split.of(role))
    targets = SloTargets(ttft_s=_finite(recent.ttft_s), tpot_s=_finite(recent.tpot_s))
    spec = ClusterSpec(groups, Network(bytes_per_s=_LINK_BYTES_PER_S, latency_s=0.0), targets=targets)
    return simulate(spec, workload, policies="never", with_gaps=False).attainment(targets).joint


def _finite(value_s: float) -> float | None:
    return None if math.isinf(value_s) else value_s
