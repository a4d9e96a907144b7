"""Cost of placing one request among hundreds of workers, and size of the block index.

    python -m benchmarks.gateway.placement [--pairs 10000000] [--workers 256] [--prompt-tokens 131072]
        [--conditional auto]

256 prefill and 256 decode workers hold ten million blocks. Some of these are the prompt's prefix, to a different depth
on each worker (the worst case of the match: the set of holders shrinks a hundred times along the prompt). Each
placement does what the gateway does for a request whose block keys it has: match, predict, choose, note the load of
both workers. Blocks are spread in two ways: each on one worker, or on three drawn at random.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from dataclasses import replace
from typing import NamedTuple, get_args

import numpy as np

from halfmoon.policy.forecast.decode_forecast import DecodeForecast
from halfmoon.policy.forecast.handover import HandoverPrediction, predict_handover
from halfmoon.policy.forecast.ttft import predict_ttft
from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.placement.conditional import ConditionalMode
from halfmoon.policy.placement.place import PlacementRules, place
from halfmoon.policy.placement.ranking import PlacementMode
from halfmoon.policy.values import DecodeLoad, DecodeLoads, Neighbours, Placement, PlacementRequest, TtftPrediction
from halfmoon.policy.view.block_index import BlockEvents, BlockIndex
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.key_table import Keys
from halfmoon.policy.view.worker_view import Role, WorkerView

BLOCK_TOKENS = 64
NUM_PLACEMENTS = 500
NUM_DECODING = 32  # requests on each decode worker
MESSAGE_KEYS = 4_096


class _Link(NamedTuple):
    """The measured speed of one link."""

    address: str
    bandwidth_bytes_per_s: float
    latency_s: float = 1e-3


def make_view(num_workers: int) -> ClusterView:
    """Cluster with as many prefill as decode workers."""
    roles: tuple[Role, ...] = ("prefill", "decode")
    view = ClusterView(
        WorkerView(
            f"{role}-{number}",
            role,
            f"h{number}:{1 + (role == 'decode')}",
            context_tokens=1 << 20,
            block_tokens=BLOCK_TOKENS,
            total_blocks=40_000,
            free_blocks=20_000,
            num_running=NUM_DECODING,
            context_in_use_tokens=NUM_DECODING * 4_000,
            step_tokens=2048,
            chunk_tokens=512,
            prefill_model=PrefillModel(0.01, 5e-5, 1e-9),
            step_model=StepModel(0.008, 1e-4, 1e-8),
            holder=number + num_workers * (role == "decode"),
            fetch_s_per_token=1e-5,
            kv_bytes_per_token=100_000,
        )
        for role in roles
        for number in range(num_workers)
    )
    links = [_Link(worker.address, 1e9 + number) for number, worker in enumerate(view.workers)]
    for row in range(num_workers):
        view.links.report(row, links[num_workers:])
    return view


def make_index(view: ClusterView, num_pairs: int, copies: int, prompt: Keys, rng: np.random.Generator) -> BlockIndex:
    """Index in which every worker holds a part of the prompt and its share of the pairs."""
    index = BlockIndex()
    workers = sorted(view.workers, key=lambda worker: worker.holder)
    share = num_pairs // len(workers)
    pool = rng.integers(1, 2**64, size=num_pairs // copies, dtype=np.uint64) if copies > 1 else None
    for place_in_line, worker in enumerate(workers):
        number = index.number(worker.worker_id)
        depth = len(prompt) * place_in_line // (2 * len(workers))
        if pool is None:
            others = rng.integers(1, 2**64, size=share - depth, dtype=np.uint64)
        else:
            others = pool[rng.integers(0, len(pool), size=share)]
        held = np.unique(np.concatenate([prompt[:depth], others]))
        for sequence, keys in enumerate(np.array_split(held, len(held) // MESSAGE_KEYS + 1)):
            index.apply(number, BlockEvents(sequence, keys, is_snapshot=sequence == 0))
    return index


class _Forecast:
    """The predicted decode loads, and queues as workers report them."""

    def __init__(self, fetching_threshold: float | None) -> None:
        self.decodes = DecodeForecast()
        self._fetching_threshold = fetching_threshold

    def ttft(self, view: ClusterView, request: PlacementRequest, now_s: float) -> TtftPrediction:
        return predict_ttft(view, request, self._fetching_threshold, now_s)

    def refine_prefill(
        self, view: ClusterView, request: PlacementRequest, placement: Placement, now_s: float
    ) -> Placement:
        return placement

    def decode_loads(self, view: ClusterView, at_s: float, now_s: float) -> DecodeLoads:
        return self.decodes.loads(at_s, now_s, view.num_rows)

    def decode_load(self, row: int, at_s: float, now_s: float) -> DecodeLoad:
        return self.decodes.load(row, at_s, now_s)

    def neighbours(self, view: ClusterView, row: int, until_s: float, now_s: float) -> Neighbours:
        return self.decodes.neighbours(row, until_s, now_s)

    def handover_s(self, placement: Placement, num_output: float) -> float:
        return 0.01

    def handover(
        self, view: ClusterView, request: PlacementRequest, prefill: Placement, at_s: float
    ) -> HandoverPrediction:
        return predict_handover(view, request, prefill, np.zeros(view.num_rows))

    def load_beside(
        self, view: ClusterView, request: PlacementRequest, row: int, load: DecodeLoad, at_s: float, now_s: float
    ) -> DecodeLoad:
        return load

    def refine_decode(
        self, view: ClusterView, request: PlacementRequest, placement: Placement, now_s: float
    ) -> Placement:
        return placement


def time_placements(
    view: ClusterView, index: BlockIndex, prompt: Keys, mode: PlacementMode, conditional: ConditionalMode
) -> list[float]:
    """Seconds of each placement, including noting its load."""
    rng, rules = random.Random(0), PlacementRules(mode, conditional=conditional)
    forecast = _Forecast(rules.fetching_threshold)
    decodes = [view.row(worker.worker_id) for worker in view.workers if worker.role == "decode"]
    for row in decodes:
        for number in range(NUM_DECODING):
            forecast.decodes.join(f"{row}-{number}", row or 0, 0.0, 10.0 + number, 4_000, 500)
    times = []
    for number in range(NUM_PLACEMENTS):
        began_s = time.perf_counter()
        request = PlacementRequest(len(prompt) * BLOCK_TOKENS + 1, 1_000, cached_blocks=index.match(prompt))
        now_s = number / 100
        placed = place(view, request, rules, forecast, now_s, rng)
        free_s = max(placed.prefill.prefill_free_s, now_s) + placed.ttft_s
        view.put(replace(placed.prefill, prefill_free_s=free_s))
        view.put(replace(placed.decode, num_placed=placed.decode.num_placed + 1))
        times.append(time.perf_counter() - began_s)
    return times


def main() -> None:
    """Prints one table for each spread."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10_000_000)
    parser.add_argument("--workers", type=int, default=256, help="workers of each phase")
    parser.add_argument("--prompt-tokens", type=int, default=128 * 1024)
    parser.add_argument("--conditional", choices=get_args(ConditionalMode), default="off")
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    prompt: Keys = rng.integers(1, 2**64, size=args.prompt_tokens // BLOCK_TOKENS, dtype=np.uint64)
    for copies in (1, 3):
        index = make_index(make_view(args.workers), args.pairs, copies, prompt, rng)
        figures = f"{index.num_pairs} pairs, {index.num_bytes / index.num_pairs:.1f} bytes each"
        print(f"\nblocks on {copies} worker(s) each: {figures}")
        print(f"{'mode':18} {'median us':>10} {'p99 us':>10}")
        for mode in get_args(PlacementMode):
            times = sorted(time_placements(make_view(args.workers), index, prompt, mode, args.conditional))
            print(f"{mode:18} {statistics.median(times) * 1e6:10.0f} {times[int(0.99 * len(times))] * 1e6:10.0f}")


if __name__ == "__main__":
    main()
