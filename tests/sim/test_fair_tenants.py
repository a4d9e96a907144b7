"""The shipped fair shares on a simulated cluster: the same code as in the gateway."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from halfmoon.sim.result import SimResult
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workloads.workload import Workload
from tests.sim.small_clusters import pair

PROMPT, OUTPUT = 2_048, 8  # about 2 s of prefill: the prefill worker is what they wait for


def arrivals(rates: dict[int, float], seconds: float, prompt: int = PROMPT, output: int = OUTPUT) -> Workload:
    """Requests of each tenant at even distances."""
    rows = sorted((number / rate, tenant) for tenant, rate in rates.items() for number in range(int(seconds * rate)))
    start_s, tenants = (np.array(column) for column in zip(*rows, strict=True))
    lengths = np.full(len(rows), prompt), np.full(len(rows), output)
    return Workload(start_s.astype(float), *lengths, tenants=tenants.astype(np.int64))


def served(result: SimResult, workload: Workload, until_s: float) -> list[int]:
    """Requests of each tenant that ended until then."""
    assert workload.tenants is not None
    ended = workload.tenants[result.is_completed & (result.end_s <= until_s)]
    return [int((ended == tenant).sum()) for tenant in np.unique(workload.tenants)]


def run(workload: Workload) -> SimResult:
    """On a worker that does not quite half a request a second, with places for 64."""
    return simulate(replace(pair(), admission="off"), workload, policies="always")


def test_ten_times_the_requests_get_no_more_while_both_want_more() -> None:
    workload, until_s = arrivals({0: 3.0, 1: 0.3}, seconds=200.0), 190.0
    heavy, light = served(run(workload), workload, until_s)
    assert heavy + light > 0.95 * until_s / 2.06  # the worker is never idle
    assert light == pytest.approx(heavy, rel=0.05)
    heavy, light = served(run(replace(workload, tenants=None)), workload, until_s)
    assert heavy > 8 * light  # by arrival alone


def test_of_few_places_one_that_retries_more_often_leaves_the_other_its_share() -> None:
    """28 % where requests that found no room count as having it, 33 % where those above their share come again."""
    workload = arrivals({0: 10.0, 1: 2.0}, seconds=200.0, prompt=64, output=200)
    groups = tuple(replace(one, limits=replace(one.limits, max_running=8)) for one in pair().groups)
    result = simulate(replace(pair(), groups=groups, admission="off"), workload, policies="always")
    heavy, light = served(result, workload, 195.0)
    assert light > 0.35 * (heavy + light)


def test_what_one_does_not_use_the_other_gets() -> None:
    workload = arrivals({0: 3.0, 1: 0.1}, seconds=200.0)  # the light one asks for a fifth of the worker
    result = run(workload)
    heavy, light = served(result, workload, 190.0)
    assert light >= 17  # of 19
    assert heavy + light > 0.95 * 190 / 2.06
    assert workload.tenants is not None
    waits = result.ttft_s[(workload.tenants == 1) & result.is_completed & (result.start_s > 20)]
    assert waits.max() < 8  # behind the running prompt and one more, though sixty wait


def test_three_tenants_of_whom_one_sends_more() -> None:
    workload = arrivals({0: 3.0, 1: 0.5, 2: 0.5}, seconds=200.0)
    counts = served(run(workload), workload, 190.0)
    assert max(counts) < 1.35 * min(counts)


def test_one_tenant_is_served_as_without_tenants() -> None:
    workload = arrivals({0: 1.0}, seconds=50.0)
    alone, plain = run(workload), run(replace(workload, tenants=None))
    assert np.array_equal(alone.end_s, plain.end_s)


def test_a_request_that_no_worker_can_ever_hold_takes_no_room_from_others() -> None:
    """What it would choose does not fit. As in the gateway, only a request that finds no room now tells of little."""
    prompts, outputs, tenants = (
        np.array(column) for column in zip(*4 * [(60, 400, 0)], (7_900, 40, 1), (30, 200, 1), (60, 400, 0), strict=True)
    )
    workload = Workload(np.arange(7.0) / 10, prompts, outputs, tenants=tenants)
    groups = tuple(replace(one, kv_tokens=8_192) for one in pair().groups)
    spec = replace(pair(), groups=groups, kv_policy="snapkv:512+64", block_tokens=64, admission="off")
    assert simulate(spec, workload, policies="always").is_completed.tolist() == [
        True,
        True,
        True,
        True,
        False,
        True,
        True,
    ]
