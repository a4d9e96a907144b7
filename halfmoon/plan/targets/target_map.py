"""A map over targets: at which TTFT and TPOT separate prefill and decode workers pay, by how much, how sure that is.

The rival is colocated workers with chunked prompts, on the same GPUs, under the same requests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from halfmoon.errors import InvalidRequest
from halfmoon.host_limits import num_cores
from halfmoon.plan.layout import WorkerKind
from halfmoon.plan.planning import problem_from
from halfmoon.plan.problem import PlanningProblem
from halfmoon.plan.request import PlanRequest
from halfmoon.plan.search.feasible import feasible_models, options
from halfmoon.plan.search.search import Progress
from halfmoon.plan.search.simulating_processes import simulating_processes
from halfmoon.plan.targets.goodput_surface import SurfaceTrial, goodput_surface
from halfmoon.plan.targets.rivals import Rival, Rivals
from halfmoon.plan.targets.target_grid import TargetGrid, spaced
from halfmoon.sim.latency_sources.latency_model import LatencyModel
from halfmoon.sim.workloads.named_workload import is_trace
from halfmoon.sim.workloads.workload import Floats

EVEN = 1.05
"""Ratio of goodputs below which neither layout wins."""

NUM_SEEDS = 3  # of drawn requests
MAP_REQUESTS = 400  # of one pass, by default
_NUM_TARGETS = 7  # of each axis
_WAVE = 4  # layouts simulated at once; fixed, so that maps do not depend on the number of cores
_KEPT = 0.4  # of a goodput: what is left with other requests and times matters down to that
_NEAR = 0.9  # of the best goodput of its kind: such a layout may be the best with other requests or times
_NEAREST, _FARTHEST_TTFT, _FARTHEST_TPOT = 1.3, 20.0, 8.0  # in times of the fastest idle worker, and of the smallest

Winner = Literal["disaggregated", "colocated", "even", "none"]
Confidence = Literal["sure", "by the times", "open"]
"""How a cell's winner holds.

- sure: for every seed, and if the times are wrong by their fit error.
- by the times: for every seed, but not for every error.
- open: not for every seed.
"""


class Best(NamedTuple):
    """The best layout of one kind in a cell."""

    text: str
    per_gpu: float  # goodput for each GPU, in requests per second; the mean over seeds


@dataclass(frozen=True, slots=True)
class Cell:
    """One pair of targets.

    gain: goodput for each GPU of separate workers over colocated ones, from `gain_low` to `gain_high` over seeds and
    errors of the times; infinite if only separate ones meet the targets.
    """

    ttft_s: float
    tpot_s: float
    disaggregated: Best | None
    colocated: Best | None
    gain: float
    gain_low: float
    gain_high: float
    winner: Winner
    confidence: Confidence


@dataclass(frozen=True, slots=True)
class TargetMap:
    """A map. `cells` go through TPOT first. `error`: median error of the times, if known; `notes` are warnings."""

    request: PlanRequest
    fleet: str
    grid: TargetGrid
    cells: tuple[Cell, ...]
    source: str
    error_prefill: float | None
    error_step: float | None
    num_layouts: int
    notes: tuple[str, ...] = ()


class _Scenario(NamedTuple):
    """One set of requests, and factors of the times."""

    seed: int
    prefill: float = 1.0
    step: float = 1.0


def make_map(
    request: PlanRequest,
    ttfts_s: Sequence[float] = (),
    tpots_s: Sequence[float] = (),
    num_processes: int | None = None,
    on_progress: Progress = lambda what, done, total: None,
) -> TargetMap:
    """Makes a map, which does not depend on the number of processes (None: one per core). Blocks.

    Targets that are not given follow from what idle workers take. The request's own targets and rate do not matter.
    Raises InvalidRequest for invalid values and NoLayout if memory does not hold the requests.
    """
    num = request.num_requests or (None if is_trace(request.workload) else MAP_REQUESTS)
    request = replace(request, num_requests=num, rate_per_s=None, objective=None, ttft_s=1.0, tpot_s=1.0, tbt_s=None)
    problem, notes = problem_from(request)
    if problem.fleet.is_mixed:
        raise InvalidRequest("a map is of one kind of GPU: give one", param="gpu")
    if problem.workload.prefixes is not None:
        problem = replace(problem, workload=replace(problem.workload, prefixes=None))
        notes = (*notes, "what prompts of the trace share is not reused in a map")
    if problem.max_prefill_degree > 1:
        problem = replace(problem, max_prefill_degree=1)
        notes = (*notes, "in a map each prompt is computed by one worker")
    models = feasible_models(problem)
    grid = _grid(problem, models, ttfts_s, tpots_s)
    targets = replace(problem.goal.targets, ttft_s=grid.ttfts_s[-1], tpot_s=grid.tpots_s[-1])
    problem = replace(problem, goal=replace(problem.goal, targets=targets))
    rivals = Rivals(problem, models, options(problem, models), grid)
    candidates = [*rivals.colocated(), *rivals.separate()]
    run = _MapRun(request, problem, models, grid, on_progress)
    with simulating_processes(num_processes or num_cores()) as pool:
        found = run.first_look(candidates, pool)
        finalists = [rival for rival in candidates if _near_best(rival, found, grid).any()]
        surfaces = run.surfaces(finalists, found, pool)
        surfaces[run.believed] = found
    model = models[finalists[0].layout.sets[0].kind] if finalists else next(iter(models.values()))
    return TargetMap(
        request,
        str(problem.fleet),
        grid,
        tuple(run.cells(finalists, surfaces)),
        model.source.rpartition(", TP")[0] or model.source,
        model.error.prefill,
        model.error.step,
        len(candidates),
        notes,
    )


Bools = NDArray[np.bool_]

Surfaces = dict[_Scenario, dict[Rival, Floats]]
"""Goodput for each GPU of each layout in each cell."""


class _MapRun:
    """What all simulations of a map share."""

    def __init__(
        self,
        request: PlanRequest,
        problem: PlanningProblem,
        models: Mapping[WorkerKind, LatencyModel],
        grid: TargetGrid,
        on_progress: Progress,
    ) -> None:
        self._request = request
        self._problem = problem
        self._models = models
        self._grid = grid
        self._on_progress = on_progress
        self.believed = _Scenario(problem.seed)

    def _others(self) -> list[_Scenario]:
        """Other seeds, and times that are wrong by their error: prompts longer and steps shorter, and the reverse.

        If both are longer, the map moves along its diagonal, and nobody else wins.
        """
        seed = self._problem.seed
        num_seeds = 1 if is_trace(self._request.workload) else NUM_SEEDS
        seeds = [_Scenario(seed + number) for number in range(1, num_seeds)]
        error = next(iter(self._models.values())).error
        prefill, step = (1 + (one or 0.0) for one in (error.prefill, error.step))
        opposite = {(prefill, 1 / step), (1 / prefill, step)} - {(1.0, 1.0)}
        return [*seeds, *(_Scenario(seed, *one) for one in sorted(opposite))]

    def first_look(self, rivals: Sequence[Rival], pool: Executor) -> dict[Rival, Floats]:
        """The goodput of all layouts as far as they come near the best of their kind."""
        result: dict[Rival, Floats] = {}
        self._on_progress("layouts", 0, len(rivals))
        for begin in range(0, len(rivals), _WAVE):
            wave = rivals[begin : begin + _WAVE]
            floors = [_NEAR * _best_of_kind(rival, result, self._grid) for rival in wave]
            trials = [self._trial(self.believed, *one) for one in zip(wave, floors, strict=True)]
            for rival, surface in zip(wave, pool.map(goodput_surface, trials), strict=True):
                result[rival] = surface / rival.layout.num_gpus
            self._on_progress("layouts", len(result), len(rivals))
        return result

    def surfaces(self, rivals: Sequence[Rival], found: Mapping[Rival, Floats], pool: Executor) -> Surfaces:
        """The goodput of each layout with other requests and times, in the cells where it is near the best."""
        work = [(scenario, rival) for scenario in self._others() for rival in rivals]
        floors = {
            rival: np.where(_near_best(rival, found, self._grid), _KEPT * found[rival], np.inf) for rival in rivals
        }
        trials = [self._trial(scenario, rival, floors[rival]) for scenario, rival in work]
        result: Surfaces = {scenario: {} for scenario, _ in work}
        self._on_progress("other requests and times", 0, len(work))
        simulated = zip(work, pool.map(goodput_surface, trials), strict=True)
        for done, ((scenario, rival), surface) in enumerate(simulated, start=1):
            result[scenario][rival] = surface / rival.layout.num_gpus
            self._on_progress("other requests and times", done, len(work))
        return result

    def _trial(self, scenario: _Scenario, rival: Rival, floor_per_gpu: Floats) -> SurfaceTrial:
        problem = self._problem
        if scenario.seed != problem.seed:
            other, _ = problem_from(replace(self._request, seed=scenario.seed))
            problem = replace(problem, workload=other.workload, seed=scenario.seed)
        models = {
            workers.kind: self._models[workers.kind].with_errors(scenario.prefill, scenario.step)
            for workers in rival.layout.sets
        }
        return rival.surface_trial(problem, models, self._grid, floor_per_gpu)

    def cells(self, finalists: Sequence[Rival], surfaces: Surfaces) -> Iterator[Cell]:
        """The cells, row by row."""
        seeds = [one for one in surfaces if (one.prefill, one.step) == (1.0, 1.0)]
        both = [[one for one in finalists if one.layout.is_colocated == kind] for kind in (False, True)]
        for at in product(*map(range, self._grid.shape)):
            best = [_best(rivals, [surfaces[seed] for seed in seeds], at) for rivals in both]
            gains = {one: _gain(both, surfaces[one], at) for one in surfaces}
            gain = _ratio(*(0.0 if one is None else one.per_gpu for one in best))
            winner = winner_of(gain, is_met=best != [None, None])
            ttft_s, tpot_s = self._grid.ttfts_s[at[0]], self._grid.tpots_s[at[1]]
            confidence = confidence_of(winner, [gains[seed] for seed in seeds], list(gains.values()))
            low, high = min(gains.values()), max(gains.values())
            yield Cell(ttft_s, tpot_s, best[0], best[1], gain, low, high, winner, confidence)


def _best(rivals: Sequence[Rival], seeds: Sequence[Mapping[Rival, Floats]], at: tuple[int, ...]) -> Best | None:
    """The layout with the highest mean over seeds."""
    means = {rival: float(np.mean([surfaces[rival][at] for surfaces in seeds])) for rival in rivals}
    first = max(means, key=lambda rival: means[rival], default=None)
    return None if first is None or not means[first] else Best(first.text, means[first])


def _gain(both: Sequence[Sequence[Rival]], surfaces: Mapping[Rival, Floats], at: tuple[int, ...]) -> float:
    return _ratio(*(max((float(surfaces[rival][at]) for rival in rivals), default=0.0) for rivals in both))


def _ratio(disaggregated: float, colocated: float) -> float:
    """Infinite if only separate workers meet the targets; 1 if neither do."""
    if not colocated:
        return float("inf") if disaggregated else 1.0
    return disaggregated / colocated


def winner_of(gain: float, *, is_met: bool) -> Winner:
    """Who wins by a gain, if any layout meets the targets."""
    if not is_met:
        return "none"
    return "disaggregated" if gain > EVEN else "colocated" if gain < 1 / EVEN else "even"


def confidence_of(winner: Winner, of_seeds: Sequence[float], all_gains: Sequence[float]) -> Confidence:
    """How a winner holds over the gains of each seed, and over those with errors of the times, too."""

    def agree(gains: Sequence[float]) -> bool:
        if winner == "disaggregated":
            return min(gains) > 1
        if winner == "colocated":
            return max(gains) < 1
        return all(1 / EVEN**2 < gain < EVEN**2 for gain in gains)

    return "sure" if agree(all_gains) else "by the times" if agree(of_seeds) else "open"


def _best_of_kind(rival: Rival, found: Mapping[Rival, Floats], grid: TargetGrid) -> Floats:
    """The highest goodput of the layouts that are colocated as this one is, or are not."""
    same = [surface for other, surface in found.items() if other.layout.is_colocated == rival.layout.is_colocated]
    best: Floats = np.max([np.zeros(grid.shape), *same], axis=0)
    return best


def _near_best(rival: Rival, found: Mapping[Rival, Floats], grid: TargetGrid) -> Bools:
    """The cells in which a layout is near the best of its kind."""
    surface = found[rival]
    return (surface > 0) & (surface >= _NEAR * _best_of_kind(rival, found, grid))


def _grid(
    problem: PlanningProblem,
    models: Mapping[WorkerKind, LatencyModel],
    ttfts_s: Sequence[float],
    tpots_s: Sequence[float],
) -> TargetGrid:
    """The given targets. The others lie between what the fastest idle worker on half the fleet takes, and several times
    what the smallest does.
    """
    for name, targets in (("ttft", ttfts_s), ("tpot", tpots_s)):
        if any(not 0 < one < float("inf") for one in targets):
            raise InvalidRequest(f"targets are above 0 seconds, and finite: {name} {targets}", param=name)
    prompt = float(np.quantile(problem.workload.prompt_tokens, problem.goal.attainment, method="lower"))
    first_s = {kind: model.prefill_s(prompt) for kind, model in models.items()}
    step_s = {kind: model.step_s(1, prompt) for kind, model in models.items()}
    most = problem.fleet.num_gpus // 2 or 1  # larger workers have no room beside others
    halves = [kind for kind in models if kind.num_devices <= most] or list(models)
    smallest = min(models, key=lambda kind: (kind.num_devices, kind.parallelism.pipeline))
    return TargetGrid(
        tuple(sorted(set(ttfts_s)))
        or spaced(_NEAREST * min(first_s[kind] for kind in halves), _FARTHEST_TTFT * first_s[smallest], _NUM_TARGETS),
        tuple(sorted(set(tpots_s)))
        or spaced(_NEAREST * min(step_s[kind] for kind in halves), _FARTHEST_TPOT * step_s[smallest], _NUM_TARGETS),
    )
