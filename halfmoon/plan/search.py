"""The search for a layout: halves alone, layouts of them, the best of these simulated whole.

After DistServe (arXiv 2401.09670): algorithm 1 combines the best halves freely, algorithm 2 keeps the halves of a
unit in the same nodes; colocated workers are the baseline. Bounds that follow from latency models alone rule out
what cannot come among the best before it is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from halfmoon.plan.candidates import Candidate, candidates
from halfmoon.plan.feasible import NoLayout, models, options
from halfmoon.plan.goodput import Trial, goodput_per_s, simulate_at
from halfmoon.plan.halves import best_halves, waves
from halfmoon.plan.layout import Layout, Parallelism, unit_spec
from halfmoon.plan.question import Question
from halfmoon.sim.latency import LatencyModel
from halfmoon.sim.result import Attainment

BEST = 5
_MOST_GROWN = 6  # times that a layout which misses the rate gets another worker

Progress = Callable[[str, int, int], None]
"""Told what is done, how many of it, of how many."""


@dataclass(frozen=True, slots=True)
class Rated:
    """A layout and what it holds."""

    layout: Layout
    goodput_per_s: float
    price_per_hour: float

    @property
    def per_gpu(self) -> float:
        """Requests a second that meet the goal, for each device."""
        return self.goodput_per_s / self.layout.num_gpus

    @property
    def per_dollar(self) -> float:
        """Requests that meet the goal for a dollar."""
        return 3600 * self.goodput_per_s / self.price_per_hour


@dataclass(frozen=True, slots=True)
class Plan:
    """The best layouts, best first, and the best of either kind, if any of it holds anything."""

    best: tuple[Rated, ...]
    disaggregated: Rated | None
    colocated: Rated | None
    models: Mapping[Parallelism, LatencyModel]
    num_simulated: int
    num_ruled_out: int


def search(question: Question, pool: Executor, on_progress: Progress = lambda what, done, total: None) -> Plan:
    """The same question has the same plan. Raises NoLayout saying what is in the way."""
    known = models(question)
    choices = options(question, known)
    halves = best_halves(question, known, choices, pool, _counting(on_progress, "workers alone", len(choices)))
    made = candidates(question, halves)
    run = _Run(question, known, pool)
    disaggregated = run.best([one for one in made if not one.layout.is_colocated], on_progress, "disaggregated")
    colocated = run.best([one for one in made if one.layout.is_colocated], on_progress, "colocated")
    ranked = sorted([*disaggregated, *colocated], key=run.rank)[:BEST]
    if not ranked:
        raise NoLayout(run.problem([half.goodput_per_s for kept in halves.values() for half in kept], made))
    return Plan(tuple(ranked), _first(disaggregated), _first(colocated), known, run.num_simulated, run.num_ruled_out)


def _first(found: Sequence[Rated]) -> Rated | None:
    return found[0] if found else None


def _counting(on_progress: Progress, what: str, total: int) -> Callable[[int], None]:
    done = 0

    def advance(num: int) -> None:
        nonlocal done
        done += num
        on_progress(what, done, total)

    return advance


class _Run:
    """Owns the count of what was simulated and what was ruled out."""

    def __init__(self, question: Question, known: Mapping[Parallelism, LatencyModel], pool: Executor) -> None:
        self._question = question
        self._known = known
        self._pool = pool
        self.num_simulated = 0
        self.num_ruled_out = 0

    def rank(self, one: Rated) -> tuple[float, ...]:
        """Ascending: the best first."""
        objective = self._question.objective
        if objective == "gpus":
            return (one.layout.num_gpus, -one.goodput_per_s)
        return (-one.per_dollar if objective == "goodput-per-dollar" else -one.per_gpu, one.layout.num_gpus)

    def best(self, made: Sequence[Candidate], on_progress: Progress, what: str) -> list[Rated]:
        """Those that hold something, and the rate where there is one."""
        found: list[Rated] = []
        ordered = sorted(made, key=self._promise)
        done = 0
        for wave in waves(ordered):
            chosen = [one for one in wave if len(found) < BEST or self._can_beat(one, found[BEST - 1])]
            self.num_ruled_out += len(wave) - len(chosen)
            found += [one for one in self._rated(chosen) if one.goodput_per_s > 0]
            found.sort(key=self.rank)
            done += len(wave)
            on_progress(what, done, len(ordered))
        return found

    def problem(self, alone_per_s: Sequence[float], made: Sequence[Candidate]) -> str:
        """Why nothing was found, and the nearest that would be."""
        question = self._question
        if not any(alone_per_s):
            return "no worker meets its half of the targets for enough requests at any rate: relax TTFT or TPOT"
        if question.rate_per_s is None:
            return (
                "each half meets its target alone, and no layout meets both for enough requests: "
                "relax TTFT, TPOT or --attainment"
            )
        free = replace(question, rate_per_s=None, objective="goodput-per-gpu")
        try:
            best = search(free, self._pool).best[0]
        except NoLayout as problem:
            return problem.message
        units = question.num_gpus // best.layout.num_gpus
        return (
            f"rate: {question.num_gpus} x {question.gpu.name} do not hold {question.rate_per_s:g} requests/s; "
            f"the nearest feasible is about {units * best.goodput_per_s:.3g} requests/s "
            f"({units} x {best.layout}): lower --rate, or give about "
            f"{question.rate_per_s / best.per_gpu:.0f} GPUs"
        )

    def _promise(self, one: Candidate) -> tuple[float, ...]:
        per_gpu = one.guess_per_s / one.layout.num_gpus
        return (one.layout.num_gpus, -per_gpu) if self._question.objective == "gpus" else (-per_gpu,)

    def _can_beat(self, one: Candidate, worst: Rated) -> bool:
        if self._question.objective == "gpus":
            return one.layout.num_gpus <= worst.layout.num_gpus
        return one.bound_per_s / one.layout.num_gpus > worst.per_gpu

    def _rated(self, chosen: Sequence[Candidate]) -> list[Rated]:
        grown = self._grown(chosen) if self._question.rate_per_s is not None else list(chosen)
        trials = [layout_trial(self._question, self._known, one.layout) for one in grown]
        guesses = [one.guess_per_s / one.layout.num_units for one in grown]
        rates = list(self._pool.map(goodput_per_s, trials, guesses))
        self.num_simulated += len(trials)
        return [
            Rated(one.layout, rate * one.layout.num_units, trial.spec.price_per_hour * one.layout.num_units)
            for one, trial, rate in zip(grown, trials, rates, strict=True)
        ]

    def _grown(self, chosen: Sequence[Candidate]) -> list[Candidate]:
        """With as many workers as the rate needs; those that would need more than there are fall out."""
        question, done, open_ones = self._question, [], list(chosen)
        assert question.rate_per_s is not None
        for _ in range(_MOST_GROWN):
            trials = [layout_trial(question, self._known, one.layout) for one in open_ones]
            rates = [question.rate_per_s / one.layout.num_units for one in open_ones]
            shares = list(self._pool.map(_shares_at, trials, rates))
            is_met = [one.value(question.goal.criterion) >= question.goal.attainment for one in shares]
            done += [one for one, met in zip(open_ones, is_met, strict=True) if met]
            missed = [(one, share) for one, share, met in zip(open_ones, shares, is_met, strict=True) if not met]
            larger = [_larger(one, share) for one, share in missed]
            open_ones = [one for one in larger if one.layout.fits(question.num_nodes, question.gpus_per_node)]
        return done


def layout_trial(question: Question, known: Mapping[Parallelism, LatencyModel], layout: Layout) -> Trial:
    """One unit of a layout under the question's requests."""
    spec = unit_spec(
        layout, known, question.rules, question.goal.targets, question.gpus_per_node, question.gpu.price_per_hour
    )
    return Trial(spec, question.workload, question.goal, question.seed)


def _shares_at(trial: Trial, rate_per_s: float) -> Attainment:
    return simulate_at(trial, rate_per_s).attainment(trial.goal.targets)


def _larger(one: Candidate, share: Attainment) -> Candidate:
    """One unit more, or one worker more of the half that misses its target more often."""
    layout = one.layout
    if layout.is_paired and layout.num_units > 1:
        return one.larger(layout.sets, layout.num_units + 1)
    short = 0 if layout.is_colocated or share.ttft < share.tpot else 1
    sets = tuple(each._replace(num=each.num + (at == short)) for at, each in enumerate(layout.sets))
    return one.larger(sets, layout.num_units)
