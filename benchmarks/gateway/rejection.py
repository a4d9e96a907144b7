"""Early rejection by present load makes prefill and decode load oscillate; predicted load does not.

    python -m benchmarks.gateway.rejection [--seconds 400] [--overload 2.0]

Mooncake, section 7.3: when admission considers only the present decode load, requests still in prefill are overlooked
and too many are admitted. Decode is flooded as they arrive there, and then nothing is admitted until it has emptied,
while prefill idles. A small deterministic model of a cluster (events on a fake clock, the gateway's own
AdmissionController) is offered `--overload` times the rate that its decode workers sustain.

Printed for each mode: requests refused at the gateway; requests dropped at the decode worker after a useless prefill;
those served within the target; the swing of the decode load (standard deviation over mean); and the correlation of
prefill with decode load at one moment (-1 is anti-phase).
"""

from __future__ import annotations

import argparse
import heapq
import random
from dataclasses import dataclass, field
from typing import get_args

import numpy as np

from halfmoon.policy.admission.admission_controller import AdmissionController
from halfmoon.policy.admission.degradation import Admitted
from halfmoon.policy.admission.qos_classes import ClassTable, QosClass
from halfmoon.policy.admission.refusal import AdmissionMode, Refused
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.placement.place import PlacementRules
from halfmoon.policy.values import PlacementRequest
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.worker_view import WorkerView

NUM_PREFILL, NUM_DECODE = 128, 4
PROMPT_TOKENS, OUTPUT_TOKENS = 16_000, 200
PREFILL = PrefillModel(0.05, 2e-4, 1e-8)  # 4.5 s for a prompt
STEP = StepModel(0.02, 0.001, 0.0)
SLO = QosClass("slo", ttft_s=10.0, tbt_s=0.05)
MAX_BATCH = 30  # batch size at which a step just meets the target


@dataclass
class Cluster:
    """Owns the modelled workers: prompts queue at a prefill worker; all decode batches run at one pace."""

    gate: AdmissionController
    now_s: float = 0.0
    events: list[tuple[float, int, str, str]] = field(default_factory=list)
    running: dict[str, Admitted] = field(default_factory=dict)
    free_s: dict[str, float] = field(default_factory=dict)  # when each prefill worker is free
    batches: dict[str, int] = field(default_factory=dict)
    began_s: dict[str, float] = field(default_factory=dict)
    num_refused: int = 0
    num_dropped: int = 0
    num_served: int = 0
    num_late: int = 0
    samples: list[tuple[int, int]] = field(default_factory=list)  # (requests in prefill, requests decoding)

    def __post_init__(self) -> None:
        prefills = [
            WorkerView(f"p{i}", "prefill", "", 1 << 20, 64, 1 << 20, 1 << 20, prefill_model=PREFILL)
            for i in range(NUM_PREFILL)
        ]
        decodes = [
            WorkerView(f"d{i}", "decode", "", 1 << 20, 64, 1 << 20, 1 << 20, step_model=STEP) for i in range(NUM_DECODE)
        ]
        self.view = ClusterView([*prefills, *decodes])
        self.free_s = {worker.worker_id: 0.0 for worker in prefills}
        self.batches = {worker.worker_id: 0 for worker in decodes}

    def at(self, at_s: float, kind: str, name: str) -> None:
        """Schedules an event."""
        heapq.heappush(self.events, (at_s, len(self.events), kind, name))

    def run(self, until_s: float) -> None:
        """Runs all events up to a time."""
        while self.events and self.events[0][0] <= until_s:
            self.now_s, _, kind, name = heapq.heappop(self.events)
            getattr(self, f"on_{kind}")(name)

    def on_arrival(self, name: str) -> None:
        """Admits a request, then queues it at a prefill worker."""
        request = PlacementRequest(PROMPT_TOKENS, 4 * OUTPUT_TOKENS)
        try:
            admitted = self.gate.decide(self.view, request, SLO, self.now_s)
        except Refused:
            self.num_refused += 1
            return
        self.gate.inside.enter(name, self.view, admitted, PROMPT_TOKENS, self.now_s)
        self.running[name] = admitted
        prefill = admitted.placement.prefill.worker_id
        self.free_s[prefill] = max(self.free_s[prefill], self.now_s) + PREFILL.seconds(PROMPT_TOKENS)
        self.at(self.free_s[prefill], "prefilled", name)

    def on_prefilled(self, name: str) -> None:
        """Moves a request to its decode worker, or drops it if that is full."""
        admitted = self.running[name]
        decode = admitted.placement.decode.worker_id
        self.gate.inside.begin_decode(name, self.now_s)
        if self.batches[decode] >= MAX_BATCH:
            self.num_dropped += 1
            self.leave(name, completed=False)
            return
        self.batches[decode] += 1
        self.began_s[name] = self.now_s
        self.at(self.now_s + OUTPUT_TOKENS * STEP.seconds(self.batches[decode], 0), "decoded", name)

    def on_decoded(self, name: str) -> None:
        """Ends a request after its last token."""
        self.batches[self.running[name].placement.decode.worker_id] -= 1
        tbt_s = (self.now_s - self.began_s[name]) / OUTPUT_TOKENS
        self.num_served += tbt_s <= (SLO.tbt_s or 0) * 1.001
        self.num_late += tbt_s > (SLO.tbt_s or 0) * 1.001
        self.leave(name, completed=True)

    def on_sample(self, name: str) -> None:
        """Counts the requests in each phase."""
        decoding = sum(self.batches.values())
        self.samples.append((len(self.running) - decoding, decoding))

    def leave(self, name: str, *, completed: bool) -> None:
        """Removes a request."""
        ttft_s = 1.0 if completed else None  # no feedback: the modes are compared by themselves
        self.gate.leave(name, self.now_s, num_output=OUTPUT_TOKENS, ttft_s=ttft_s, tbt_s=None)
        del self.running[name]


def run(mode: AdmissionMode, seconds: float, overload: float) -> Cluster:
    """Runs one mode; the first quarter, in which the load builds up, is not sampled."""
    rng = random.Random(1)
    gate = AdmissionController(mode, PlacementRules(), random.Random(2))
    gate.classes = ClassTable((SLO,))
    for _ in range(64):  # as recorded in a ledger
        gate.lengths.add(SLO.name, PROMPT_TOKENS, OUTPUT_TOKENS)
    cluster = Cluster(gate)
    sustained = NUM_DECODE * MAX_BATCH / (OUTPUT_TOKENS * STEP.seconds(MAX_BATCH, 0))
    at_s, number = 0.0, 0
    while (at_s := at_s + rng.expovariate(sustained * overload)) < seconds:
        cluster.at(at_s, "arrival", f"r{number}")
        number += 1
    for sample in range(int(seconds / 4 * 2), int(seconds) * 2):
        cluster.at(sample / 2, "sample", "")
    cluster.run(seconds)
    return cluster


def main() -> None:
    """Prints the table of modes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--overload", type=float, default=2.0)
    args = parser.parse_args()
    print(f"{'mode':10} {'refused':>8} {'dropped':>8} {'served':>8} {'late':>6} {'swing':>6} {'correlation':>12}")
    for mode in get_args(AdmissionMode):
        done = run(mode, args.seconds, args.overload)
        prefilling, decoding = np.array(done.samples, dtype=np.float64).T
        swing, together = decoding.std() / decoding.mean(), np.corrcoef(prefilling, decoding)[0, 1]
        counts = f"{done.num_refused:8} {done.num_dropped:8} {done.num_served:8} {done.num_late:6}"
        print(f"{mode:10} {counts} {swing:6.2f} {together:12.2f}")


if __name__ == "__main__":
    main()
