"""Feasible workers for each phase: they start, their memory holds the requests, and an idle one meets the targets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from halfmoon.errors import Incompatible, InvalidRequest
from halfmoon.plan.layout import Parallelism, WorkerKind
from halfmoon.plan.node_pools import NodePool
from halfmoon.plan.problem import PlanningProblem
from halfmoon.plan.search.bounds import RateBound, decode_bound_per_s, prefill_bound_per_s
from halfmoon.plan.search.prefill_degrees import degrees, shared_s
from halfmoon.policy.offload.host_choice import Demand
from halfmoon.policy.view.worker_view import Role
from halfmoon.sim.cluster.cluster_spec import SloTargets
from halfmoon.sim.latency_sources.host_workers import HostRoom, HostShare, chosen_weights, worker_model
from halfmoon.sim.latency_sources.latency_model import LatencyModel
from halfmoon.sim.latency_sources.measured_profile import MeasuredProfile
from halfmoon.sim.latency_sources.model_shape import ModelShape
from halfmoon.sim.latency_sources.roofline import Roofline

LONG_PROMPT_TOKENS = 4096  # the search proposes sequence ranks only where prompts are longer


class NoLayout(InvalidRequest):
    """No layout meets the request. The message says what is in the way, and what would be met."""


class TargetsBroken(NoLayout):
    """Not even idle workers meet the targets. `idle` has the times that are too long."""

    def __init__(self, message: str, param: str, idle: SloTargets) -> None:
        super().__init__(message, param=param)
        self.idle = idle


@dataclass(frozen=True, slots=True)
class Option:
    """One kind of worker for one role, with its bound. `degree`: most of them that compute one prompt."""

    role: Role
    kind: WorkerKind
    bound: RateBound
    degree: int = 1


def feasible_models(problem: PlanningProblem) -> dict[WorkerKind, LatencyModel]:
    """The latency models of all workers that can start and fit the nodes.

    Raises NoLayout if there are none.
    """
    result, problems = {}, []
    for pool in problem.fleet.pools:
        source, name = problem.sources[pool.gpu.name], pool.gpu.name
        measured = isinstance(source, MeasuredProfile)
        for kind in _kinds(problem, pool):
            tensor, pipeline, sequence = kind.parallelism
            try:
                if problem.shape is not None:
                    problem.shape.check(tensor, pipeline)
                gpu = None if measured else name
                result[kind] = worker_model(source, gpu, tensor, pipeline, sequence, kind.host)
            except (InvalidRequest, Incompatible) as error:
                problems.append(error)
    if not result:
        why = problems[-1] if problems else InvalidRequest(f"{problem.fleet} are too few for one worker")
        raise NoLayout(f"no parallelism is possible: {why.message}", param="gpu")
    return result


def _kinds(problem: PlanningProblem, pool: NodePool) -> Iterator[WorkerKind]:
    """Each parallelism with all on the devices and, where asked for and possible, with KV or weights on the host."""
    for parallelism in _parallelisms(problem, pool):
        yield WorkerKind(pool.gpu.name, parallelism)
        if parallelism.pipeline * parallelism.sequence > 1:
            continue
        kv_bytes = problem.host_bytes_per_gpu * parallelism.tensor
        if kv_bytes:
            yield WorkerKind(pool.gpu.name, parallelism, HostShare(kv_bytes))
        for share in _weight_shares(problem, pool, parallelism.tensor):
            yield WorkerKind(pool.gpu.name, parallelism, share)


def _weight_shares(problem: PlanningProblem, pool: NodePool, tensor: int) -> list[HostShare]:
    """With weights on the host if the devices do not hold them and the longest request: as few as possible, and as many
    as give the most tokens a second; with all KV on the devices, and with some on the host.
    """
    source, name = problem.sources[pool.gpu.name], pool.gpu.name
    weight_bytes = problem.host_weight_bytes_per_gpu * tensor
    if not weight_bytes or not isinstance(source, Roofline) or pool.gpu.pcie_bytes_per_s is None:
        return []
    demand = Demand(_longest_request(problem), problem.rules.limits["decode"].max_running)
    result = []
    for kv_bytes in dict.fromkeys((0, problem.host_bytes_per_gpu * tensor)):
        room = HostRoom(kv_bytes, weight_bytes)
        try:
            source.shape.check(tensor, 1)
            shares = [chosen_weights(source, name, tensor, room, demand, one) for one in ("latency", "throughput")]
        except (InvalidRequest, Incompatible):
            continue  # too little even so; the devices alone say why
        if shares[0]:
            result += [HostShare(kv_bytes, share) for share in dict.fromkeys(shares)]
    return result


def _longest_request(problem: PlanningProblem) -> int:
    """The room that a worker must have, in tokens of prompt and output, and of what a KV policy will choose.

    Workers refuse a request whose whole KV would not fit even if its policy keeps a part: an answer that is preempted
    is computed again from all of it.
    """
    prompts = problem.workload.prompt_tokens
    return int((prompts + problem.workload.output_tokens + problem.kept_kv.chosen(prompts)).max())


def _parallelisms(problem: PlanningProblem, pool: NodePool) -> Iterator[Parallelism]:
    """Possible parallelisms. The devices that share a layer are in one node."""
    source = problem.sources[pool.gpu.name]
    if isinstance(source, MeasuredProfile):
        measured = Parallelism(source.tensor_parallel, source.pipeline_parallel)
        yield from [measured] if measured.num_devices <= pool.num_gpus else []
        return
    powers = [2**one for one in range(pool.num_gpus.bit_length())]
    yield from (
        Parallelism(tensor, pipeline)
        for tensor in sorted({*powers, *_odd_heads(problem.shape)})
        if tensor <= pool.gpus_per_node
        for pipeline in powers
        if tensor * pipeline <= pool.num_gpus
    )
    if isinstance(source, Roofline) and _longest_prompt(problem) > LONG_PROMPT_TOKENS:
        yield from (Parallelism(1, 1, sequence) for sequence in powers if 1 < sequence <= pool.gpus_per_node)


def _longest_prompt(problem: PlanningProblem) -> float:
    """The longest prompt of those that have to meet TTFT, in tokens."""
    return float(np.quantile(problem.workload.prompt_tokens, problem.goal.attainment, method="lower"))


def _odd_heads(shape: ModelShape | None) -> list[int]:
    """Divisors of the KV heads of a model that two devices cannot share."""
    if shape is None or shape.num_heads % 2 == 0:
        return []
    return [one for one in range(1, shape.num_kv_heads + 1) if shape.num_kv_heads % one == 0]


def options(problem: PlanningProblem, models: Mapping[WorkerKind, LatencyModel]) -> list[Option]:
    """Options for every role. Raises NoLayout if memory does not hold the requests, and TargetsBroken, which names the
    bound.
    """
    workload = problem.workload
    fitting = _fitting(problem, models)
    prompt = _longest_prompt(problem)
    ttft_s, gap_s = problem.goal.targets.ttft_s, problem.goal.gap_s
    assert ttft_s is not None
    pairs, seen = (float(of(np.array([prompt]))[0]) for of in (problem.kept_kv.pairs, problem.kept_kv.seen))
    alone_s = {one: model.prompt_s(prompt, pairs) for one, model in fitting.items()}
    first_s = {(kind, 1): seconds for kind, seconds in alone_s.items()}
    for kind, model in fitting.items():
        for degree in degrees(problem, kind, model, problem.max_prefill_degree):
            first_s[kind, degree] = min(alone_s[kind], shared_s(problem, model, prompt, degree))
    step_s = {one: model.step_s(1, seen) for one, model in fitting.items()}
    reuse = workload.prefixes is not None  # cached prompts take less
    prefills = [one for one, seconds in first_s.items() if reuse or seconds <= ttft_s]
    # sequence ranks gain nothing for decodes
    decodes = [kind for kind in fitting if step_s[kind] <= gap_s and kind.parallelism.sequence == 1]
    gap = "TPOT" if gap_s == problem.goal.targets.tpot_s else "TBT"
    broken = [
        *([] if prefills else [_broken_ttft(problem, fitting, ttft_s, first_s, prompt)]),
        *([] if decodes else [_broken(problem, gap, gap_s, step_s, f"a sequence of {prompt:.0f} tokens")]),
    ]
    if broken:
        step = min(step_s.values())
        idle = SloTargets(None if prefills else min(first_s.values()), step, step)
        raise TargetsBroken("; ".join(broken), "ttft" if not prefills else gap.lower(), idle)
    return _bounded(problem, models, prefills, decodes)


def _fitting(problem: PlanningProblem, models: Mapping[WorkerKind, LatencyModel]) -> dict[WorkerKind, LatencyModel]:
    """Workers whose memory holds the longest request."""
    longest = _longest_request(problem)
    fitting = {one: model for one, model in models.items() if model.kv_tokens >= longest}
    if not fitting:
        most = max(models, key=lambda one: models[one].kv_tokens)
        of_policy = " (all that it may need at once under its KV policy)" if problem.kept_kv.policy is not None else ""
        raise NoLayout(
            f"memory: the longest request is {longest:,} tokens long{of_policy}, and no worker of {problem.fleet} "
            f"holds more than {models[most].kv_tokens:,} tokens of KV beside the weights ({most}): "
            "give larger or more GPUs a node, or shorter requests",
            param="workload",
        )
    return fitting


def _bounded(
    problem: PlanningProblem,
    models: Mapping[WorkerKind, LatencyModel],
    prefills: list[tuple[WorkerKind, int]],
    decodes: list[WorkerKind],
) -> list[Option]:
    """Options of the prefill kinds with their degrees, of the decode kinds, and of those that do both."""
    goal, limits, workload, kept = problem.goal, problem.rules.limits, problem.workload, problem.kept_kv
    result = [
        Option("prefill", kind, prefill_bound_per_s(models[kind], workload, goal, limits["prefill"], kept), degree)
        for kind, degree in prefills
        if not kind.host.kv_bytes  # a prompt's KV leaves once it is computed
    ]
    result += [
        Option("decode", kind, decode_bound_per_s(models[kind], workload, goal, limits["decode"], kept))
        for kind in decodes
    ]
    for kind, degree in prefills:
        if kind in decodes and degree == 1:
            phases = (
                prefill_bound_per_s(models[kind], workload, goal, limits["both"], kept),
                decode_bound_per_s(models[kind], workload, goal, limits["both"], kept),
            )
            result.append(Option("both", kind, _of_both(*phases)))
    return [one for one in result if one.bound.most_per_s > 0 and problem.may_have(one.role, one.kind.gpu)]


def _of_both(prefill: RateBound, decode: RateBound) -> RateBound:
    """Bound of a worker that does both phases: a step may compute prompts while it reads the weights for decoding."""
    most_per_s = min(prefill.most_per_s, decode.most_per_s)
    if not most_per_s or not decode.typical_per_s:
        return RateBound(0.0, 0.0)
    return RateBound(most_per_s, 1 / (1 / prefill.typical_per_s + 1 / decode.typical_per_s))


def _broken_ttft(
    problem: PlanningProblem,
    fitting: Mapping[WorkerKind, LatencyModel],
    ttft_s: float,
    first_s: Mapping[tuple[WorkerKind, int], float],
    prompt: float,
) -> str:
    """Says what a prompt takes at best, and how many workers that may not share it yet would meet the target."""
    best_s: dict[WorkerKind, float] = {}
    for (kind, _), seconds in first_s.items():
        best_s[kind] = min(seconds, best_s.get(kind, seconds))
    broken = _broken(problem, "TTFT", ttft_s, best_s, f"a prompt of {prompt:.0f} tokens")
    enough = [
        degree
        for kind, model in fitting.items()
        for degree in degrees(problem, kind, model, problem.fleet.num_gpus)
        if degree > problem.max_prefill_degree and shared_s(problem, model, prompt, degree) <= ttft_s
    ]
    if not enough:
        return broken
    return f"{broken} ({min(enough)} idle workers together meet it: give --max-prefill-degree {min(enough)})"


def _broken(
    problem: PlanningProblem, name: str, target_s: float, alone_s: Mapping[WorkerKind, float], what: str
) -> str:
    best = min(alone_s, key=lambda one: (alone_s[one], one))
    on = f"{best.gpu} {best}" if problem.fleet.is_mixed else str(best)
    takes = f"{what} alone on an idle worker takes {alone_s[best]:.3g} s at best ({on})"
    return f"{name} {target_s:g} s cannot be met: {takes}"
