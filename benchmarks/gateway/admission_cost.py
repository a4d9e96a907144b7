"""Cost of admitting or refusing a request with a known prompt: `AdmissionController.decide` among busy workers.

    python -m benchmarks.gateway.admission_cost [--prompt-tokens 131072] [--requests 60]

Clusters of several sizes and queues, with each worker on its own host or all on one host where neighbours interfere.
Four kinds: admitted; refused by a class without degradation; rejected early, before the prompt is read; refused by a
class that first tries all three steps of degradation. Printed are medians in milliseconds and, for shared machines,
10th percentiles.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from halfmoon.policy.admission.admission_controller import AdmissionController
from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.admission.refusal import Refused
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.placement.place import PlacementRules
from halfmoon.policy.values import PlacementRequest
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.worker_view import Role, WorkerView

KINDS = {
    "admitted": QosClass("default"),
    "refused": QosClass("default", ttft_s=1e-3),
    "early": QosClass("default", ttft_s=1e-3),
    "refused, 3 steps": QosClass(
        "default",
        ttft_s=1e-3,
        capped_tokens=16,
        degradation=("cap_max_tokens", "lower_kv_precision", "shed_lowest_class"),
    ),
}


class Scene(NamedTuple):
    """One cluster."""

    num_workers: int  # of each phase
    contention: float  # if not 0, all workers are on one host
    num_queued: int  # prompts on each prefill worker
    num_decoding: int  # requests on each decode worker


SCENES = (
    Scene(8, 0.0, 8, 16),
    Scene(8, 0.3, 8, 16),
    Scene(8, 0.3, 64, 32),
    Scene(64, 0.3, 4, 16),
    Scene(256, 0.0, 4, 16),
    Scene(256, 0.1, 1, 8),
    Scene(256, 0.1, 4, 16),
)


def workers(scene: Scene) -> Iterator[WorkerView]:
    """Workers of a cluster: as many prefill as decode workers."""
    roles: tuple[Role, ...] = ("prefill", "decode")
    for role in roles:
        for number in range(scene.num_workers):
            yield WorkerView(
                f"{role}-{number}",
                role,
                "one:1" if scene.contention else f"h{number}:1",
                context_tokens=1 << 20,
                block_tokens=64,
                total_blocks=40_000,
                free_blocks=20_000,
                step_tokens=2_048,
                contention=scene.contention,
                prefill_model=PrefillModel(0.01, 5e-5, 1e-9),
                step_model=StepModel(0.008, 1e-4, 1e-8),
            )


def fill(gate: AdmissionController, view: ClusterView, scene: Scene) -> None:
    """Adds decoding requests and waiting prompts of up to 16,000 tokens, at second 0."""
    rng, free = random.Random(0), QosClass("default")
    num_decoding = scene.num_decoding * scene.num_workers
    for number in range(num_decoding + scene.num_queued * scene.num_workers):
        name, num_tokens = str(number), rng.randrange(100, 16_000)
        admitted = gate.decide(view, PlacementRequest(num_tokens, 500), free, 0.0)
        gate.inside.enter(name, view, admitted, num_tokens, 0.0)
        view.busy.begin(admitted.placement.decode.worker_id, name, 0.0)
        if number < num_decoding:
            gate.inside.begin_decode(name, 0.0)
            continue
        prefill = admitted.placement.prefill
        view.busy.begin(prefill.worker_id, name, 0.0)
        view.put(replace(prefill, prefill_free_s=prefill.prefill_free_s + admitted.placement.work_s))


def time_each(decide: Callable[[float], object], num: int) -> list[float]:
    """Seconds of each decision, one every half millisecond."""
    seconds = []
    for number in range(num):
        began_s = time.perf_counter()
        with suppress(Refused):
            decide((number + 1) / 2_000)
        seconds.append(time.perf_counter() - began_s)
    return seconds


def main() -> None:
    """Prints one line per cluster."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt-tokens", type=int, default=128 * 1024)
    parser.add_argument("--requests", type=int, default=60)
    args = parser.parse_args()
    print(f"{'workers':>9} {'one host':>8} {'queued':>6} {'decoding':>8} {' '.join(f'{kind:>18}' for kind in KINDS)}")
    for scene in SCENES:
        view, gate = ClusterView(workers(scene)), AdmissionController("off", PlacementRules(), random.Random(0))
        fill(gate, view, scene)
        gate.mode = "predicted"
        shown, request = [], PlacementRequest(args.prompt_tokens, 1_000)
        for kind, qos in KINDS.items():
            early = partial(gate.reject_early, view, 0, has_gaps=True, qos=qos)
            decided = partial(gate.decide, view, request, qos)
            decide = (lambda now_s, early=early: early(now_s=now_s)) if kind == "early" else decided
            seconds = time_each(decide, args.requests)
            low, median = (1e3 * np.quantile(seconds, quantile) for quantile in (0.1, 0.5))
            shown.append(f"{median:11.2f} ({low:4.2f})")
        size, where = f"{scene.num_workers}+{scene.num_workers}", "yes" if scene.contention else "no"
        print(f"{size:>9} {where:>8} {scene.num_queued:6} {scene.num_decoding:8} {' '.join(shown)}", flush=True)


if __name__ == "__main__":
    main()
