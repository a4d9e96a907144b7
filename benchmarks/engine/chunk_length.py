"""Chunks that follow TBT targets against chunks of a constant length: answers run beside a queue of prompts.

    python -m benchmarks.engine.chunk_length --repeat 3 [--targets-ms 60,200] [--trace]

A worker of role `both` computes prompts of 700 tokens, all there from the start, while two answers run. Subjects take
turns within each repeat: the constant, each target, and no target. Printed are the gaps of the answers while there are
prompts, but for the first one, from which a chunk's length is learned, how many of them are 5 % above the target, and
the prompt tokens per second; then the same of the simulator, with the models that the worker measured. `--trace`
prints each step with prompts: its tokens, their pairs, and milliseconds by the calibration and by the clock. With
`--profile NAME`, one of the simulator's, nothing is measured, and that worker simulated with a GPU's limits.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from halfmoon.engine.checkpoint.checkpoint import prepare_checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine import Engine
from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.engine.step_result import StepResult
from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.models.chunk_length import CONSTANT_CHUNKS, ChunkRule, chunk_target_s
from halfmoon.policy.models.latency import prefill_sample
from halfmoon.sim.cluster.cluster_spec import BatchLimits, ClusterSpec, WorkerGroup
from halfmoon.sim.latency_sources.worker_profile import coefficients, load_profile
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workloads.workload import Workload
from halfmoon.worker.membership.calibration import measure

NUM_PROMPTS, PROMPT_TOKENS = 8, 700
NUM_ANSWERS, ANSWER_TOKENS = 2, 600
_WARM_UP_STEPS = 8
_KV_TOKENS = 16_384


class Subject(NamedTuple):
    """What decides on the length of a chunk."""

    name: str
    follows_targets: bool
    target_s: float | None = None


class Outcome(NamedTuple):
    """Gaps of answers, prompt tokens per second, and the steps that computed prompts."""

    gaps_s: list[float]
    prompt_tokens_per_s: float
    steps: list[StepResult]


def measured(engine: Engine, rule: ChunkRule, subject: Subject, rng: random.Random) -> Outcome:
    """One turn of the engine. It is left empty."""
    engine.follow_targets(rule if subject.follows_targets else CONSTANT_CHUNKS)
    bound_s = chunk_target_s(subject.target_s, "both")
    vocab_size = engine.checkpoint.model_config.vocab_size

    def add(name: str, num_prompt: int, num_output: int) -> None:
        prompt = tuple(rng.randrange(vocab_size) for _ in range(num_prompt))
        sampling = SamplingParams(max_tokens=num_output, ignore_eos=True, temperature=0.0)
        engine.add(EngineRequest(name, prompt, sampling, tbt_target_s=bound_s))

    for number in range(NUM_ANSWERS):
        add(f"answer-{number}", 64, ANSWER_TOKENS)
    for _ in range(_WARM_UP_STEPS):
        engine.step()
    for number in range(1 + NUM_PROMPTS):
        add(f"prompt-{number}", PROMPT_TOKENS, 1)
    num_left, gaps_s, steps = 1 + NUM_PROMPTS, [], []
    last_s = time.perf_counter()
    while num_left:
        result = engine.step()
        now_s = time.perf_counter()
        assert result.num_decode_seqs >= NUM_ANSWERS, "the answers are too short"
        if num_left <= NUM_PROMPTS:
            gaps_s.append(now_s - last_s)
            steps.append(result)
        num_left -= sum(output.request_id.startswith("prompt") for output in result.outputs)
        last_s = now_s
    engine.cancel_all()
    engine.forget_prefixes()
    return Outcome(gaps_s, sum(step.num_prefill_tokens for step in steps) / sum(gaps_s), steps)


def simulated(config: EngineConfig, rule: ChunkRule, subject: Subject) -> Outcome:
    """The same in the simulator; its gaps are the longest of each answer, and it names no steps."""
    latency = coefficients("measured", rule.prefill, rule.step, _KV_TOKENS, 1.0)
    limits = BatchLimits(
        config.step_tokens, config.prefill_chunk_tokens, config.max_running, follows_targets=subject.follows_targets
    )
    classes = (QosClass("all", tbt_s=subject.target_s),)
    spec = ClusterSpec((WorkerGroup("both", 1, latency, limits, prefix_cache=False),), classes=classes)
    later_s = _WARM_UP_STEPS * rule.step.seconds(NUM_ANSWERS, 64 * NUM_ANSWERS)
    starts_s = np.array([0.0] * NUM_ANSWERS + [later_s] * NUM_PROMPTS)
    prompts = np.array([64] * NUM_ANSWERS + [PROMPT_TOKENS] * NUM_PROMPTS)
    outputs = np.array([ANSWER_TOKENS] * NUM_ANSWERS + [1] * NUM_PROMPTS)
    found = simulate(spec, Workload(starts_s, prompts, outputs, classes=np.zeros(len(prompts), dtype=np.int64)))
    seconds = float(found.end_s[NUM_ANSWERS:].max()) - later_s
    return Outcome(found.longest_gap_s[:NUM_ANSWERS].tolist(), NUM_PROMPTS * PROMPT_TOKENS / seconds, [])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--targets-ms", default="60,200", help="TBT targets, in turn")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--trace", action="store_true", help="print each step")
    parser.add_argument("--profile", help="simulate only, with this profile")
    args = parser.parse_args()
    targets_s = [float(text) / 1e3 for text in args.targets_ms.split(",")]
    if args.profile is not None:
        profile, limits = load_profile(args.profile), EngineConfig(device="cuda")
        for subject in _subjects(limits, targets_s):
            print(f"{subject.name:16} {_of_simulator(limits, ChunkRule(profile.prefill, profile.step), subject)}")
        return
    measure_engine(args.model, args.dtype, targets_s, args.repeat, is_traced=args.trace)


def measure_engine(
    model: str, dtype: Literal["float32", "bfloat16"], targets_s: Sequence[float], repeat: int, *, is_traced: bool
) -> None:
    """Prints a table of the engine and of the simulator."""
    config = EngineConfig(device="cpu", dtype=dtype, num_blocks=_KV_TOKENS // 64)
    engine = Engine(prepare_checkpoint(model), config)
    profile = measure(engine, "both", "benchmark", 60.0)
    rule = ChunkRule(profile.prefill_model, profile.step_model)
    print(f"load {os.getloadavg()[0]:.1f}; prefill {_rounded(rule.prefill)}, step {_rounded(rule.step)}")
    subjects = _subjects(config, targets_s)
    turns: dict[str, list[Outcome]] = {subject.name: [] for subject in subjects}
    for seed in range(repeat):
        for subject in subjects:
            turns[subject.name].append(measured(engine, rule, subject, random.Random(seed)))
            if is_traced:
                print(f"{subject.name}: tokens, pairs, calibrated ms, measured ms")
                print("\n".join(_traced(rule, step) for step in turns[subject.name][-1].steps))
    print(
        f"{'chunks':16} {'TBT p50':>8} {'p99':>6} {'longest':>8} {'late':>6} {'prompts':>9} {'tokens':>7}   simulated"
    )
    for subject in subjects:
        outcomes = turns[subject.name]
        gaps_ms = 1e3 * np.concatenate([outcome.gaps_s for outcome in outcomes])
        p50, p99 = np.percentile(gaps_ms, (50, 99))
        per_s = np.median([outcome.prompt_tokens_per_s for outcome in outcomes])
        length = np.median([step.num_prefill_tokens for outcome in outcomes for step in outcome.steps])
        late = np.mean(gaps_ms > 1.05e3 * subject.target_s) if subject.target_s else 0.0
        of_engine = f"{p50:6.0f}ms {p99:4.0f}ms {gaps_ms.max():6.0f}ms {late:6.1%} {per_s:7.0f}/s {length:7.0f}"
        print(f"{subject.name:16} {of_engine}   {_of_simulator(config, rule, subject)}")
    engine.close()


def _subjects(config: EngineConfig, targets_s: Sequence[float]) -> list[Subject]:
    followed = [Subject(f"target {1e3 * target_s:g} ms", True, target_s) for target_s in targets_s]
    return [Subject(f"constant {config.prefill_chunk_tokens}", False), *followed, Subject("no target", True)]


def _traced(rule: ChunkRule, step: StepResult) -> str:
    new_tokens, known_tokens, seconds = prefill_sample(step.num_prefill_tokens, step.num_prefill_pairs, step.duration_s)
    expected_s = rule.step_s(step.num_decode_rows, step.decode_context_tokens, new_tokens, known_tokens)
    return f"{new_tokens:6.0f} {step.num_prefill_pairs:9.0f} {1e3 * expected_s:7.1f} {1e3 * seconds:7.1f}"


def _of_simulator(config: EngineConfig, rule: ChunkRule, subject: Subject) -> str:
    gaps_s, prompt_tokens_per_s, _ = simulated(config, rule, subject)
    return f"{1e3 * max(gaps_s):6.0f}ms {prompt_tokens_per_s:6.0f}/s"


def _rounded(model: tuple[float, ...]) -> str:
    return ", ".join(f"{value:.3g}" for value in model)


if __name__ == "__main__":
    main()
