"""The layouts that a map compares: separate prefill and decode workers in useful ratios, and colocated workers with
prompts in chunks of several sizes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from halfmoon.plan.layout import Layout, Rules, WorkerKind
from halfmoon.plan.layout_trial import layout_trial
from halfmoon.plan.problem import PlanningProblem
from halfmoon.plan.search.bounds import decode_bound_per_s, prefill_bound_per_s
from halfmoon.plan.search.combinations import combinations
from halfmoon.plan.search.feasible import Option
from halfmoon.plan.targets.goodput_surface import SurfaceTrial, loosest
from halfmoon.plan.targets.target_grid import TargetGrid
from halfmoon.policy.view.worker_view import Role
from halfmoon.sim.cluster.cluster_spec import BatchLimits, SloTargets
from halfmoon.sim.latency_sources.latency_model import LatencyModel
from halfmoon.sim.workloads.workload import Floats

CHUNKS_TOKENS = (128, 512, 2048)
"""Prompt tokens beside decodes that colocated workers are tried with. Small chunks keep TPOT, large ones TTFT."""

_NUM = 2  # layouts of either kind for each cell
_TAIL = 2.3  # 90th percentile of an exponential wait, in means


@dataclass(frozen=True, slots=True)
class Rival:
    """A layout with its chunk size. `guess_per_s`: about its goodput at the loosest targets."""

    layout: Layout
    chunk_tokens: int
    guess_per_s: float

    @property
    def text(self) -> str:
        """In words."""
        return f"{self.layout}, chunks of {self.chunk_tokens}" if self.layout.is_colocated else str(self.layout)

    def surface_trial(
        self,
        problem: PlanningProblem,
        models: Mapping[WorkerKind, LatencyModel],
        grid: TargetGrid,
        floor_per_gpu: Floats,
    ) -> SurfaceTrial:
        """The layout under the problem's requests. Goodput below the floor, for each GPU and cell, does not matter."""
        limits: dict[Role, BatchLimits] = {
            role: replace(one, chunk_tokens=self.chunk_tokens) for role, one in problem.rules.limits.items()
        }
        changed = replace(problem, rules=Rules(limits, problem.rules.networks))
        trial = loosest(layout_trial(changed, models, self.layout), grid)
        return SurfaceTrial(trial, grid, self.guess_per_s, floor_per_gpu * self.layout.num_gpus)


class Rivals:
    """Chooses what to compare, by what both phases can compute at each cell's targets. Simulates nothing.

    Layouts fill the fleet as far as their workers divide it.
    """

    def __init__(
        self,
        problem: PlanningProblem,
        models: Mapping[WorkerKind, LatencyModel],
        options: Sequence[Option],
        grid: TargetGrid,
    ) -> None:
        self._problem = problem
        self._models = models
        self._options = options
        self._grid = grid
        self._prompt = float(np.quantile(problem.workload.prompt_tokens, problem.goal.attainment, method="lower"))
        self._prefill_per_s = {
            kind: prefill_bound_per_s(
                model, problem.workload, problem.goal, problem.rules.limits["prefill"], problem.kept_kv
            )
            for kind, model in models.items()
        }
        self._decode_per_s = {
            (kind, tpot_s): decode_bound_per_s(
                model,
                problem.workload,
                replace(problem.goal, targets=SloTargets(grid.ttfts_s[-1], tpot_s)),
                problem.rules.limits["decode"],
                problem.kept_kv,
            ).typical_per_s
            for kind, model in models.items()
            for tpot_s in grid.tpots_s
        }

    def colocated(self) -> list[Rival]:
        """As many workers of a kind as fit, with each chunk size."""
        fleet = self._problem.fleet
        options = [option for option in self._options if option.role == "both"]
        layouts = [
            one.layout((fleet.num_gpus // one.options[0].kind.num_devices,))
            for one in combinations(self._problem, options)
        ]
        return [
            Rival(layout, tokens, guess_per_s)
            for layout, guess_per_s in self._best(layouts).items()
            for tokens in CHUNKS_TOKENS
        ]

    def separate(self) -> list[Rival]:
        """Prefill workers, and as many decode workers as fit beside them."""
        options = [option for option in self._options if option.role != "both"]
        chunk_tokens = self._problem.rules.limits["prefill"].chunk_tokens
        layouts = list(self._ratios(options))
        return [Rival(layout, chunk_tokens, guess_per_s) for layout, guess_per_s in self._best(layouts).items()]

    def _ratios(self, options: Sequence[Option]) -> Iterator[Layout]:
        num_gpus = self._problem.fleet.num_gpus
        for combination in combinations(self._problem, options):
            prefill, decode = (option.kind.num_devices for option in combination.options)
            for num in range(1, num_gpus // prefill + 1):
                rest = (num_gpus - num * prefill) // decode
                if rest:
                    yield combination.layout((num, rest))

    def _best(self, layouts: Sequence[Layout]) -> dict[Layout, float]:
        """The layouts with the most capacity for each GPU in some cell, with their capacity at the loosest targets."""
        fitting = [layout for layout in layouts if layout.fits(self._problem.fleet)]
        result: dict[Layout, float] = {}
        for ttft_s, tpot_s in product(self._grid.ttfts_s, self._grid.tpots_s):
            capacity = {layout: self._capacity_per_s(layout, ttft_s, tpot_s) for layout in fitting}
            able = [layout for layout in fitting if capacity[layout]]
            able.sort(key=lambda layout: -capacity[layout] / layout.num_gpus)
            last = (self._grid.ttfts_s[-1], self._grid.tpots_s[-1])
            result.update((layout, self._capacity_per_s(layout, *last)) for layout in able[:_NUM])
        return result

    def _capacity_per_s(self, layout: Layout, ttft_s: float, tpot_s: float) -> float:
        """About the rate that a layout holds: what its phases compute, less the slack that queues need."""
        first, last = layout.sets[0], layout.sets[-1]
        prompts_per_s = first.num * self._prefill_per_s[first.kind].typical_per_s
        answers_per_s = last.num * self._decode_per_s[last.kind, tpot_s]
        service_s = self._models[first.kind].prefill_s(self._prompt)
        slack = 2 * first.num * max(ttft_s - service_s, 0.0) / (_TAIL * service_s)
        prompts_per_s *= slack / (1 + slack)
        if not prompts_per_s or not answers_per_s:
            return 0.0
        if layout.is_colocated:
            return 1 / (1 / prompts_per_s + 1 / answers_per_s)
        return min(prompts_per_s, answers_per_s)
