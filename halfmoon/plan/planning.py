"""The planner's entry point: a request in, a plan out. `halfmoon plan` and the planner service call it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from concurrent.futures import Executor
from dataclasses import dataclass

from halfmoon.errors import InvalidRequest
from halfmoon.host_limits import num_cores
from halfmoon.plan.curves import Curve, curves
from halfmoon.plan.node_pools import Fleet, read_fleet
from halfmoon.plan.plan_file import plan_text
from halfmoon.plan.problem import OF_A_RATE, PlanningProblem, default_rules
from halfmoon.plan.request import PlanRequest
from halfmoon.plan.search.evaluation import Evaluation, evaluate, what_ifs
from halfmoon.plan.search.goodput import Goal
from halfmoon.plan.search.objective import Rated
from halfmoon.plan.search.prefill_degrees import degrees, is_on_cpu, shared_s
from halfmoon.plan.search.search import Plan, Progress, search
from halfmoon.plan.search.simulating_processes import simulating_processes
from halfmoon.policy.view.worker_view import Role
from halfmoon.sim.cluster.cluster_spec import SloTargets
from halfmoon.sim.latency_sources.hardware import device
from halfmoon.sim.latency_sources.latency_model import LatencySource
from halfmoon.sim.latency_sources.latency_source import latency_source
from halfmoon.sim.latency_sources.model_catalogue import known_shape, model_shape
from halfmoon.sim.latency_sources.roofline import Roofline
from halfmoon.sim.worker.kept_kv import policy_of
from halfmoon.sim.workloads.named_workload import DRAWN_REQUESTS, is_trace, named_workload
from halfmoon.sim.workloads.workload import Workload

TRACE_REQUESTS = 4000  # of a trace, by default
_BY_GPU = re.compile(r"[\w.-]+=")


@dataclass(frozen=True, slots=True)
class PlanResult:
    """A plan. `what_if` holds evaluations of the best layout, by what changes.

    If requested, `curves` has those of the best layouts and of the best layout of either kind. `notes` are warnings.
    """

    request: PlanRequest
    problem: PlanningProblem
    plan: Plan
    what_if: dict[str, Evaluation]
    curves: tuple[Curve, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def file_text(self) -> str:
        """The text of plan.yaml."""
        return plan_text(self.problem, self.request.model, latency_texts(self.request), self.plan.best[0])


def make_plan(
    request: PlanRequest,
    num_processes: int | None = None,
    on_progress: Progress = lambda what, done, total: None,
    *,
    with_curves: bool = False,
) -> PlanResult:
    """Makes a plan, which does not depend on the number of processes (None: one per core).

    Blocks; `on_progress` is called in this thread. Raises InvalidRequest for invalid or unknown values. Raises
    NoLayout, a kind of InvalidRequest, which says which target cannot be met and what could be.
    """
    problem, notes = problem_from(request)
    with simulating_processes(num_processes or num_cores()) as pool:
        plan = search(problem, pool, on_progress)
        drawn = curves(problem, plan.models, _compared(plan), pool, on_progress) if with_curves else []
        what_if = _what_if(problem, plan, pool, on_progress)
    return PlanResult(request, problem, plan, what_if, tuple(drawn), (*notes, *_sharing_note(problem, plan)))


def _sharing_note(problem: PlanningProblem, plan: Plan) -> tuple[str, ...]:
    """What prompts over several workers of the best layout would gain, if that was not asked for."""
    first = plan.best[0].layout.sets[0]
    if problem.max_prefill_degree > 1 or first.role != "prefill":
        return ()
    model, longest = plan.models[first.kind], int(problem.workload.prompt_tokens.max())
    seconds = {
        degree: shared_s(problem, model, longest, degree) for degree in degrees(problem, first.kind, model, first.num)
    }
    if not seconds:
        return ()
    degree = min(seconds, key=seconds.__getitem__)
    return (
        f"{degree} idle prefill workers together would compute the longest prompt, of {longest:,} tokens, in "
        f"{seconds[degree]:.3g} s instead of {model.prefill_s(longest):.3g}: try --max-prefill-degree {degree}",
    )


def _what_if(problem: PlanningProblem, plan: Plan, pool: Executor, on_progress: Progress) -> dict[str, Evaluation]:
    best = plan.best[0]
    changed = what_ifs(problem, plan.models, best.layout, best.evaluation.rate_per_s)
    evaluations = []
    for done, one in enumerate(pool.map(evaluate, *zip(*changed.values(), strict=True)), start=1):
        evaluations.append(one)
        on_progress("what if", done, len(changed))
    return dict(zip(changed, evaluations, strict=True))


def latency_texts(request: PlanRequest) -> dict[str, str]:
    """The latency source of each GPU. Raises InvalidRequest for GPUs that the request does not have."""
    names = _fleet(request).names
    if request.latency is None:
        return dict.fromkeys(names, f"roofline:{request.model}")
    if not _BY_GPU.match(request.latency):
        return dict.fromkeys(names, request.latency)
    result = dict(part.split("=", 1) for part in request.latency.split(",") if "=" in part)
    if set(result) != set(names):
        raise InvalidRequest(
            f"the latencies are of {', '.join(result)}, and the GPUs are {', '.join(names)}: give one for each, "
            "as h100=SOURCE,a100-80g=SOURCE, or one for all",
            param="latency",
        )
    return result


def _fleet(request: PlanRequest) -> Fleet:
    return read_fleet(request.gpu, request.num_nodes, request.gpus_per_node, request.prices)


def problem_from(request: PlanRequest) -> tuple[PlanningProblem, tuple[str, ...]]:
    """The checked request with the things that it names, and warnings. Raises InvalidRequest."""
    fleet = _fleet(request)
    if not request.model.strip():
        raise InvalidRequest("no model is named: give --model", param="model")
    shape = known_shape(request.model) if request.latency else model_shape(request.model)
    sources = {gpu: _source_of(gpu, text) for gpu, text in latency_texts(request).items()}
    workload, notes = _workload(request, request.context_tokens or (shape.context_tokens if shape else None))
    rate_per_s = request.rate_per_s
    if rate_per_s is None and request.objective in OF_A_RATE and is_trace(request.workload):
        rate_per_s = workload.rate_per_s
    network = None if request.network_gbit_per_s is None else request.network_gbit_per_s * 1e9 / 8
    if network is not None and not 0 < network < math.inf:
        raise InvalidRequest(f"a network has more than 0 Gbit/s, got {request.network_gbit_per_s:g}", param="network")
    targets = SloTargets(request.ttft_s, request.tpot_s, request.tbt_s, request.tbt_of)
    roles: dict[Role, str | None] = {"prefill": request.prefill_gpu, "decode": request.decode_gpu}
    _check_host(request, sources)
    _check_sharing(request, sources)
    problem = PlanningProblem(
        sources,
        fleet,
        workload,
        Goal(targets, request.attainment, request.criterion),
        default_rules(fleet, sources, request.max_running, network),
        request.objective or ("goodput-per-gpu" if rate_per_s is None else "gpus"),
        rate_per_s,
        request.affinity,
        request.seed,
        shape,
        {role: gpu for role, gpu in roles.items() if gpu is not None},
        ("raw", "int8", "int4") if request.kv_codec == "auto" else (request.kv_codec,),
        request.is_thorough,
        request.conditional_disaggregation,
        request.host_bytes_per_gpu,
        request.host_weight_bytes_per_gpu,
        request.kv_policy,
        request.max_prefill_degree,
    )
    if request.kv_policy is not None:
        counts_on = f"the plan counts on kv_policy {request.kv_policy}, which `halfmoon up --plan` gives to all classes"
        elsewhere = "elsewhere give it to the class of these requests (classes.NAME.kv_policy), or to each of them"
        notes = *notes, f"{counts_on} that name none; {elsewhere}"
    return problem, notes


def _check_host(request: PlanRequest, sources: Mapping[str, LatencySource]) -> None:
    """Raises InvalidRequest if host memory is offered and no worker could use it."""
    of_host = [gpu for gpu, source in sources.items() if isinstance(source, Roofline) and device(gpu).pcie_bytes_per_s]
    for what, num_bytes in (("KV", request.host_bytes_per_gpu), ("weights", request.host_weight_bytes_per_gpu)):
        if num_bytes and not of_host:
            raise InvalidRequest(
                f"no worker on {', '.join(sources)} can be planned with {what} on the host: that needs GPUs with "
                f"memory of their own, and a roofline's latencies; leave out --host-{what.lower()}",
                param=f"host_{what.lower()}",
            )


def _check_sharing(request: PlanRequest, sources: Mapping[str, LatencySource]) -> None:
    """Raises InvalidRequest if prompts are to be shared and no worker could, or under a KV policy."""
    if request.max_prefill_degree <= 1:
        return
    if policy_of(request.kv_policy) is not None:
        problem = f"a prompt under kv_policy {request.kv_policy} is computed by one worker"
    elif not any(is_on_cpu(source, gpu) for gpu, source in sources.items()):
        problem = f"no workers on {', '.join(sources)} compute prompts together: only those on CPUs do, of one device"
    else:
        return
    raise InvalidRequest(f"{problem}; leave out --max-prefill-degree", param="max_prefill_degree")


def _source_of(gpu: str, text: str) -> LatencySource:
    """Raises InvalidRequest for a roofline of hardware that is not in the plan."""
    source = latency_source(text)
    if isinstance(source, Roofline) and source.default_gpu not in (None, gpu):
        raise InvalidRequest(
            f"the latency {text} is of {source.default_gpu}, and the GPUs are {gpu}: leave out @{source.default_gpu}",
            param="latency",
        )
    return source


def _workload(request: PlanRequest, context_tokens: int | None) -> tuple[Workload, tuple[str, ...]]:
    """Truncates drawn requests to the model's context. Requests of a trace stay as they are, with a warning."""
    is_drawn = not is_trace(request.workload)
    num = request.num_requests or (DRAWN_REQUESTS if is_drawn else TRACE_REQUESTS)
    workload = named_workload(request.workload, 1.0 if is_drawn else None, num, "poisson", 1.0, request.seed)
    if context_tokens is None:
        return workload, ()
    share = float((workload.prompt_tokens + workload.output_tokens > context_tokens).mean())
    excess = f"{share:.1%} of the requests are longer than the model's context of {context_tokens:,} tokens"
    if is_drawn and share == 1:
        raise InvalidRequest(f"context: {excess}: give shorter ones, or --context", param="workload")
    note = f"{excess}: they are {'cut off there' if is_drawn else 'planned for as if it took them'}"
    return workload.within(context_tokens) if is_drawn else workload, (note,) if share else ()


def _compared(plan: Plan) -> list[Rated]:
    """The best layouts, and the best of either kind if it is not among them."""
    others = [one for one in (plan.disaggregated, plan.colocated) if one is not None and one not in plan.best]
    return [*plan.best, *others]
