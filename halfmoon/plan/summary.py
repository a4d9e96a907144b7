"""A plan as JSON: what `halfmoon plan --json` prints and the planner service answers."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from halfmoon.plan.planning import PlanResult
from halfmoon.plan.problem import PlanningProblem
from halfmoon.plan.search.evaluation import Evaluation
from halfmoon.plan.search.objective import Rated
from halfmoon.sim.latency_sources.latency_model import LatencyModel


def summary_of(result: PlanResult) -> dict[str, Any]:
    """Plain values; times in seconds, shares between 0 and 1."""
    problem, results = result.problem, result.plan
    best, colocated, targets = results.best[0], results.colocated, problem.goal.targets
    return {
        "gpu": str(problem.fleet),
        "objective": problem.objective,
        "criterion": problem.goal.criterion,
        "attainment_asked": problem.goal.attainment,
        "rate_asked_per_s": problem.rate_per_s,
        "targets": asdict(targets),
        "layouts": [{**_rated(problem, rated), **_evaluate(rated.evaluation)} for rated in results.best],
        "disaggregated": None if results.disaggregated is None else _rated(problem, results.disaggregated),
        "colocated": None if colocated is None else _rated(problem, colocated),
        "over_colocated": None if colocated is None else best.per_gpu / colocated.per_gpu,
        "sensitivity": {name: _evaluate(evaluation) for name, evaluation in result.what_if.items()},
        "curves": [
            {
                "layout": problem.text(curve.layout),
                "num_gpus": curve.layout.num_gpus,
                "rate_per_s": list(curve.rates_per_s),
                "attainment": list(curve.attainments),
            }
            for curve in result.curves
        ],
        "latency": [_source(results.models[kind]) for kind in sorted({workers.kind for workers in best.layout.sets})],
        "notes": list(result.notes),
        "num_simulated": results.num_simulated,
        "num_ruled_out": results.num_ruled_out,
    }


def _source(model: LatencyModel) -> dict[str, Any]:
    """The source of a worker's times, with the median relative error of the fit; null if unknown."""
    return {"source": model.source, "error_prefill": model.error.prefill, "error_step": model.error.step}


def _rated(problem: PlanningProblem, rated: Rated) -> dict[str, Any]:
    layout = rated.layout
    return {
        "layout": problem.text(layout),
        "same_as": [problem.text(other) for other in rated.equivalents],
        "workers": [
            {
                "role": workers.role,
                "count": layout.num_units * workers.num,
                "gpu": workers.kind.gpu,
                **workers.kind.parallelism._asdict(),
                "host_bytes": workers.kind.host.kv_bytes,
                "host_weights": workers.kind.host.weights,
            }
            for workers in layout.sets
        ],
        "is_paired": layout.is_paired,
        "kv_codec": layout.codec,
        "prefill_degree": layout.prefill_degree,
        "num_gpus": layout.num_gpus,
        "price_per_hour": rated.price_per_hour,
        "goodput_per_s": rated.goodput_per_s,
        "goodput_per_s_per_gpu": rated.per_gpu,
        "goodput_per_dollar": rated.per_dollar,
    }


def _evaluate(evaluation: Evaluation) -> dict[str, Any]:
    shares = evaluation.attainment
    return {
        "rate_per_s": evaluation.rate_per_s,
        "keeps_up": evaluation.keeps_up,
        "attainment_joint": shares.joint,
        "attainment_ttft": shares.ttft,
        "attainment_tpot": shares.tpot,
        "attainment_tbt": shares.tbt,
        "ttft_s": evaluation.ttft_s,
        "tpot_s": evaluation.tpot_s,
        "tbt_s": evaluation.tbt_s,
    }
