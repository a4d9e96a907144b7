"""Which parallelisms there are for each half: memory holds the lengths, and an idle worker meets the target."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from halfmoon.errors import InvalidRequest
from halfmoon.plan.bounds import RateBound, decode_bound_per_s, prefill_bound_per_s
from halfmoon.plan.layout import Parallelism
from halfmoon.plan.question import Question
from halfmoon.policy.cluster_view import Role
from halfmoon.sim.latency import LatencyModel
from halfmoon.sim.profile import MeasuredProfile


class NoLayout(InvalidRequest):
    """Nothing meets what was asked for; the message says what is in the way, and what would be met."""


@dataclass(frozen=True, slots=True)
class Option:
    """One parallelism for one role, and the most that one of its workers holds."""

    role: Role
    parallelism: Parallelism
    bound: RateBound


def models(question: Question) -> dict[Parallelism, LatencyModel]:
    """All that the latency source knows and that fit the nodes. Raises InvalidRequest where there is none."""
    found, problems = {}, []
    source, name = question.source, question.gpu.name
    for parallelism in _parallelisms(question):
        gpu = None if isinstance(source, MeasuredProfile) else name
        try:
            found[parallelism] = source.model(gpu, *parallelism)
        except InvalidRequest as error:
            problems.append(error)
    if not found:
        raise NoLayout(f"no parallelism is possible: {problems[-1].message}", param=problems[-1].param)
    return found


def _parallelisms(question: Question) -> Iterator[Parallelism]:
    """Powers of two; the devices that share a layer are in one node."""
    if isinstance(question.source, MeasuredProfile):
        yield Parallelism(question.source.tensor_parallel, question.source.pipeline_parallel)
        return
    powers = [2**one for one in range(question.num_gpus.bit_length())]
    yield from (
        Parallelism(tensor, pipeline)
        for tensor in powers
        if tensor <= question.gpus_per_node
        for pipeline in powers
        if tensor * pipeline <= question.num_gpus
    )


def options(question: Question, known: Mapping[Parallelism, LatencyModel]) -> list[Option]:
    """For every role. Raises NoLayout, naming the broken bound and the nearest target that can be met."""
    share = question.goal.attainment
    workload = question.workload
    prompt, whole = (
        float(np.quantile(tokens, share, method="lower"))
        for tokens in (workload.prompt_tokens, workload.prompt_tokens + workload.output_tokens)
    )
    fitting = {one: model for one, model in known.items() if model.kv_tokens > whole}
    if not fitting:
        most = max(model.kv_tokens for model in known.values())
        raise NoLayout(
            f"memory: {share:.0%} of the requests are up to {whole:.0f} tokens long, and no worker of "
            f"{question.num_gpus} x {question.gpu.name} holds more than {most} tokens of KV: "
            "give larger or more GPUs a node, or shorter requests",
            param="workload",
        )
    targets = question.goal.targets
    assert targets.ttft_s is not None
    assert targets.tpot_s is not None
    first_s = {one: model.prefill_s(prompt) for one, model in fitting.items()}
    step_s = {one: model.cycle(1).base_s + model.cycle(1).slope_s * prompt for one, model in fitting.items()}
    reuse = workload.prefixes is not None  # a cached prompt takes less
    prefills = [one for one in fitting if reuse or first_s[one] <= targets.ttft_s]
    decodes = [one for one in fitting if step_s[one] <= targets.tpot_s]
    broken = [
        *([] if prefills else [_broken("TTFT", targets.ttft_s, first_s, f"a prompt of {prompt:.0f} tokens")]),
        *([] if decodes else [_broken("TPOT", targets.tpot_s, step_s, f"a sequence of {prompt:.0f} tokens")]),
    ]
    if broken:
        raise NoLayout("; ".join(broken), param="ttft" if not prefills else "tpot")
    return _bounded(question, known, prefills, decodes)


def _bounded(
    question: Question,
    known: Mapping[Parallelism, LatencyModel],
    prefills: list[Parallelism],
    decodes: list[Parallelism],
) -> list[Option]:
    goal, limits, workload = question.goal, question.rules.limits, question.workload
    found = [
        Option("prefill", one, prefill_bound_per_s(known[one], workload, goal, limits["prefill"])) for one in prefills
    ]
    found += [
        Option("decode", one, decode_bound_per_s(known[one], workload, goal, limits["decode"])) for one in decodes
    ]
    for one in prefills:
        if one in decodes:
            halves = (
                prefill_bound_per_s(known[one], workload, goal, limits["both"]),
                decode_bound_per_s(known[one], workload, goal, limits["both"]),
            )
            found.append(Option("both", one, RateBound(*map(min, *halves))))
    return [one for one in found if one.bound.most_per_s > 0]


def _broken(name: str, target_s: float, alone_s: Mapping[Parallelism, float], what: str) -> str:
    best = min(alone_s, key=lambda one: (alone_s[one], one))
    return (
        f"{name} {target_s:g} s cannot be met: {what} alone on an idle worker takes {alone_s[best]:.3g} s at best "
        f"({best}): the nearest feasible {name} is a little above that"
    )
