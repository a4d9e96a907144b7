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
    question, found = result.question, result.plan
    best, colocated, targets = found.best[0], found.colocated, question.goal.targets
    return {
        "gpu": str(question.fleet),
        "objective": question.objective,
        "criterion": question.goal.criterion,
        "attainment_asked": question.goal.attainment,
        "rate_asked_per_s": question.rate_per_s,
        "targets": asdict(targets),
        "layouts": [{**_rated(question, one), **_judged(one.verdict)} for one in found.best],
        "disaggregated": None if found.disaggregated is None else _rated(question, found.disaggregated),
        "colocated": None if colocated is None else _rated(question, colocated),
        "over_colocated": None if colocated is None else best.per_gpu / colocated.per_gpu,
        "sensitivity": {name: _judged(verdict) for name, verdict in result.what_if.items()},
        "curves": [
            {
                "layout": question.text(one.layout),
                "num_gpus": one.layout.num_gpus,
                "rate_per_s": list(one.rates_per_s),
                "attainment": list(one.attainments),
            }
            for one in result.curves
        ],
        "latency": [_source(found.models[kind]) for kind in sorted({one.kind for one in best.layout.sets})],
        "notes": list(result.notes),
        "num_simulated": found.num_simulated,
        "num_ruled_out": found.num_ruled_out,
    }


def _source(model: LatencyModel) -> dict[str, Any]:
    """Where a worker's times are from, with the median relative error of the fit; null where that is not known."""
    return {"source": model.source, "error_prefill": model.error.prefill, "error_step": model.error.step}


def _rated(question: PlanningProblem, one: Rated) -> dict[str, Any]:
    layout = one.layout
    return {
        "layout": question.text(layout),
        "same_as": [question.text(other) for other in one.twins],
        "workers": [
            {
                "role": each.role,
                "count": layout.num_units * each.num,
                "gpu": each.kind.gpu,
                **each.kind.parallelism._asdict(),
            }
            for each in layout.sets
        ],
        "is_paired": layout.is_paired,
        "kv_codec": layout.codec,
        "num_gpus": layout.num_gpus,
        "price_per_hour": one.price_per_hour,
        "goodput_per_s": one.goodput_per_s,
        "goodput_per_s_per_gpu": one.per_gpu,
        "goodput_per_dollar": one.per_dollar,
    }


def _judged(verdict: Evaluation) -> dict[str, Any]:
    shares = verdict.attainment
    return {
        "rate_per_s": verdict.rate_per_s,
        "keeps_up": verdict.keeps_up,
        "attainment_joint": shares.joint,
        "attainment_ttft": shares.ttft,
        "attainment_tpot": shares.tpot,
        "attainment_tbt": shares.tbt,
        "ttft_s": verdict.ttft_s,
        "tpot_s": verdict.tpot_s,
        "tbt_s": verdict.tbt_s,
    }
