"""Phases alone: an ideal other phase takes no time, and more workers never promise less."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.plan.layout_trial import unit_spec
from halfmoon.plan.search.bounds import RateBound
from halfmoon.plan.search.feasible import Option, feasible_models, options
from halfmoon.plan.search.phases import Phase, least_workers, measured_phase, phase_trial, promised_per_s
from halfmoon.sim.simulation import simulate
from tests.plan.planning_problems import ONE, disaggregated, problem

PROBLEM = problem(gpus_per_node=2)
MODELS = feasible_models(PROBLEM)


def option(role: str) -> Option:
    return next(one for one in options(PROBLEM, MODELS) if (one.role, one.kind) == (role, ONE))


@given(st.floats(0.1, 100), st.floats(0.0, 1.0))
def test_more_workers_promise_more_and_never_more_than_their_bound(typical_per_s: float, share: float) -> None:
    alone_per_s = share * typical_per_s
    phase = Phase(Option("decode", ONE, RateBound(2 * typical_per_s, typical_per_s)), alone_per_s)
    guesses = [phase.guess_per_s(num) for num in range(1, 40)]
    assert guesses[0] == pytest.approx(alone_per_s)
    assert guesses == sorted(guesses)
    slack_per_s = typical_per_s - alone_per_s  # one worker's; nine share three times as much
    assert guesses[8] == pytest.approx(9 * typical_per_s - 3 * slack_per_s)
    assert all(guess <= num * typical_per_s * (1 + 1e-9) for num, guess in enumerate(guesses, start=1))
    assert all(guess >= num * alone_per_s * (1 - 1e-9) - 1e-9 for num, guess in enumerate(guesses, start=1))


def test_an_ideal_prefill_takes_no_time_and_an_ideal_decode_is_not_asked_for_any() -> None:
    trial = phase_trial(PROBLEM, MODELS, option("decode"))
    found = simulate(trial.spec, trial.workload.at_rate(0.1))
    assert np.nanmax(found.ttft_s) < 1e-3
    assert trial.goal.targets.ttft_s is None
    step_s = MODELS[ONE].cycle(1)
    assert found.tpot_s == pytest.approx(step_s.base_s + step_s.slope_s * 545, rel=0.05)
    trial = phase_trial(PROBLEM, MODELS, option("prefill"))
    assert set(trial.workload.output_tokens.tolist()) == {1}
    assert trial.goal.targets.tpot_s is None
    found = simulate(trial.spec, trial.workload.at_rate(0.1))
    assert found.ttft_s == pytest.approx(MODELS[ONE].prefill_s(512), rel=0.01)


@pytest.mark.parametrize("role", ["prefill", "decode", "both"])
def test_what_a_phase_holds_alone_is_within_its_bound(role: str) -> None:
    phase = measured_phase(PROBLEM, MODELS, option(role))
    assert 0 < phase.alone_per_s <= phase.option.bound.most_per_s


def test_as_many_workers_as_the_rate_needs() -> None:
    alone_per_s = measured_phase(PROBLEM, MODELS, option("prefill")).alone_per_s
    nums = []
    for factor in (0.5, 3.0, 12.0):
        asked = problem(gpus_per_node=2, rate_per_s=factor * alone_per_s)
        nums.append(least_workers(asked, MODELS, option("prefill"), 64))
    assert nums[0] == 1
    assert all(num is not None for num in nums)
    assert nums == sorted(nums)  # type: ignore[type-var]
    assert least_workers(problem(gpus_per_node=2, rate_per_s=1e5), MODELS, option("prefill"), 4) is None


def test_decode_workers_that_compute_prompts_promise_more() -> None:
    """At twice what the one prefill worker computes, beside three decode workers with time left."""
    in_time, promised, bounds = {}, {}, {}
    phases = [Phase(option(role), 1.0) for role in ("prefill", "decode")]
    for mode in ("failover", "auto"):
        asked = problem(gpus_per_node=4, num_requests=400, conditional_disaggregation=mode)
        promised[mode], bounds[mode] = promised_per_s(asked, MODELS, phases, (1, 3))
        workload = asked.workload.at_rate(2 * phases[0].option.bound.most_per_s)
        result = simulate(unit_spec(asked, MODELS, disaggregated(1, 3)), workload)
        in_time[mode] = result.attainment(asked.goal.targets).joint
    assert promised["failover"] < promised["auto"]
    assert bounds["failover"] < bounds["auto"]
    assert in_time["failover"] + 0.1 < in_time["auto"]
