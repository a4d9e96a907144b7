"""Two classes at overload, with and without pauses: `python -m benchmarks.pauses [--seeds 3] [--seconds 300]`.

Short chats (priority 0) share four workers with long answers of a batch class (priority 1), which alone would fill
them. Simulated; the same requests for each `max_pause_s` of the batch class. First without admission, then with
targets for both classes, without admission and refused by predicted load.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.admission.refusal import AdmissionMode
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.sim.cluster.cluster_spec import BatchLimits, ClusterSpec, Handover, Network, WorkerGroup
from halfmoon.sim.latency_sources.worker_profile import coefficients
from halfmoon.sim.result import SimResult
from halfmoon.sim.simulation import simulate
from halfmoon.sim.workloads.drawn_workload import arrivals
from halfmoon.sim.workloads.lengths import Lognormal
from halfmoon.sim.workloads.workload import Workload

CHAT = QosClass("chat", 0, ttft_s=2.0, tbt_s=0.25)
BATCH = QosClass("batch", 1)
LATENCY = coefficients(
    "benchmark", PrefillModel(0.02, 2e-4, 0.0), StepModel(0.02, 5e-4, 1e-7), kv_tokens=60_000, kv_token_bytes=131_072
)
LIMITS = BatchLimits(max_batch_tokens=2048, chunk_tokens=256, max_running=32)
SEPARATE = WorkerGroup("prefill", 1, LATENCY, LIMITS), WorkerGroup("decode", 3, LATENCY, LIMITS)
ROLES: dict[str, tuple[tuple[WorkerGroup, ...], Handover]] = {
    "4 both": ((WorkerGroup("both", 4, LATENCY, LIMITS),), "push"),
    "1 + 3, push": (SEPARATE, "push"),
    "1 + 3, pull": (SEPARATE, "pull"),
}
MODES: tuple[AdmissionMode, ...] = "off", "predicted"
PAUSES_S = (0.0, 1.0, 5.0, 30.0, 1e6)
TARGETS = replace(CHAT, tbt_s=0.055), replace(BATCH, ttft_s=20.0, tbt_s=0.1)  # of the mean gap; a full step has 40 ms


class Traffic(NamedTuple):
    """The requests of one class."""

    rate_per_s: float
    prompt_tokens: float  # median
    output_tokens: float


TRAFFIC = Traffic(4.0, 500, 100), Traffic(4.0, 800, 900)  # chat, batch


def workload(seconds: float, seed: int) -> Workload:
    """Both classes' requests, by arrival."""
    rng = np.random.default_rng(seed)
    columns = []
    for number, one in enumerate(TRAFFIC):
        num = int(one.rate_per_s * seconds)
        starts = arrivals("poisson", num, one.rate_per_s, rng)
        prompts = Lognormal(one.prompt_tokens, 0.5).sample(num, rng, 8000)
        outputs = Lognormal(one.output_tokens, 0.5).sample(num, rng, 4000)
        columns.append((starts, prompts, outputs, np.full(num, number)))
    starts, prompts, outputs, classes = (np.concatenate(column) for column in zip(*columns, strict=True))
    order = np.argsort(starts, kind="stable")
    return Workload(starts[order], prompts[order], outputs[order], classes=classes[order])


def run(groups: tuple[WorkerGroup, ...], handover: Handover, max_pause_s: float, requests: Workload) -> SimResult:
    """One simulation."""
    classes = CHAT, replace(BATCH, max_pause_s=max_pause_s)
    network = Network(bytes_per_s=25e9, latency_s=1e-3, handover=handover)
    return simulate(ClusterSpec(groups, network, classes=classes), requests)


def figures(result: SimResult, requests: Workload) -> Iterator[str]:
    """The row of a run."""
    assert requests.classes is not None
    chat, batch = requests.classes == 0, requests.classes == 1
    seconds = float(requests.start_s[-1])
    gaps_s = np.nan_to_num(result.longest_gap_s)
    assert CHAT.ttft_s is not None
    assert CHAT.tbt_s is not None
    is_good = chat & result.is_completed & (result.ttft_s <= CHAT.ttft_s) & (gaps_s <= CHAT.tbt_s)
    yield f"{is_good.sum() / seconds:.2f}"
    yield f"{100 * is_good.sum() / chat.sum():.1f} %"
    yield "{:.2f} / {:.2f}".format(*np.nanquantile(result.ttft_s[chat], (0.5, 0.99)))
    yield "{:.2f} / {:.2f}".format(*np.quantile(gaps_s[chat], (0.5, 0.99)))
    yield "{:.2f} / {:.2f}".format(*np.quantile(gaps_s[batch], (0.5, 0.99)))
    e2e_s = (result.end_s - result.start_s)[batch & result.is_completed]
    yield "{:.0f} / {:.0f}".format(*np.quantile(e2e_s, (0.5, 0.99)))
    yield f"{(~result.is_completed[chat]).sum()} / {(~result.is_completed[batch]).sum()}"
    yield f"{result.workers.num_paused.sum()}"
    yield f"{result.workers.num_preempted.sum()}"


def admitted(groups: tuple[WorkerGroup, ...], handover: Handover, requests: Workload) -> Iterator[str]:
    """The rows of a cluster with targets."""
    network = Network(bytes_per_s=25e9, latency_s=1e-3, handover=handover)
    for mode, max_pause_s in itertools.product(MODES, (0.0, 30.0)):
        classes = TARGETS[0], replace(TARGETS[1], max_pause_s=max_pause_s)
        result = simulate(ClusterSpec(groups, network, classes=classes, admission=mode), requests)
        row = f"{mode} | {max_pause_s:g} s"
        for number, qos in enumerate(classes):
            assert requests.classes is not None
            found = result.is_completed[requests.classes == number]
            ttft_s, tpot_s = result.ttft_s[requests.classes == number], result.tpot_s[requests.classes == number]
            assert qos.ttft_s is not None
            assert qos.tbt_s is not None
            in_time = found & (ttft_s <= qos.ttft_s) & ~(tpot_s > qos.tbt_s)
            row += f" | {in_time.mean():.1%} | {found.mean() - in_time.mean():.1%} | {1 - found.mean():.1%}"
        yield f"{row} | {result.workers.num_paused.sum()}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300.0)
    options = parser.parse_args(arguments)
    print("| workers | batch may pause | seed | good chats/s | of all | chat TTFT p50 / p99 | chat gap | batch gap | "
          "batch end-to-end | refused | pauses | preempted |")  # fmt: skip
    print("|" + "---|" * 12)
    for name, (groups, handover) in ROLES.items():
        for seed in range(options.seeds):
            requests = workload(options.seconds, seed)
            for max_pause_s in PAUSES_S:
                row = figures(run(groups, handover, max_pause_s, requests), requests)
                print(f"| {name} | {max_pause_s:g} s | {seed} |", " | ".join(row), "|", flush=True)
    kinds = " | ".join(f"{kind}: {end}" for kind in ("chat", "batch") for end in ("in time", "late", "refused"))
    print(f"\n| workers | seed | admission | batch may pause | {kinds} | pauses |")
    print("|" + "---|" * 11)
    for (name, (groups, handover)), seed in itertools.product(ROLES.items(), range(options.seeds)):
        for line in admitted(groups, handover, workload(options.seconds, seed)):
            print(f"| {name} | {seed} | {line} |", flush=True)


if __name__ == "__main__":
    main()
