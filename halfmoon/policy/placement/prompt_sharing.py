"""How many prefill workers compute one prompt: as many idle ones as make its first token come clearly sooner.

The elastic degree of LoongServe (arXiv 2404.09526), between workers: `models/segments.py` cuts the prompt. The chosen
prefill worker computes the last segment of each round, has all KV in the end, and hands it over as it would alone. The
others help.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from halfmoon.policy.models.segments import (
    SEGMENT_OVERHEAD_S,
    SEGMENT_PASSES,
    SegmentPlan,
    SegmentWorker,
    plan_segments,
)
from halfmoon.policy.values import Placement, PlacementRequest, PromptSharing, TtftPrediction
from halfmoon.policy.view.capabilities import Bools
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.worker_view import WorkerView

CLEARLY_SOONER = 0.8
"""Share of the time alone that several may take: helpers do nothing else meanwhile, and predictions err."""

_GAIN_OF_ONE_MORE = 0.95


def share_prompt(
    view: ClusterView, request: PlacementRequest, chosen: Placement, rows: Bools, max_degree: int
) -> Placement:
    """The placement with the helpers that make the prompt's first token come clearly sooner, if any do.

    rows: workers that compute prompts and hand them over. `sharing` says why it has helpers, or why not.
    """
    best, reason = _best(view, request, chosen, rows, max_degree)
    if best is None:
        return replace(chosen, sharing=reason)
    plan, helpers, ttft = best
    return replace(
        chosen,
        ttft_s=plan.seconds + chosen.overhead_s,
        work_s=plan.seconds - chosen.queue_s,
        cached_tokens=_cached(ttft, view, [*helpers, chosen.prefill]),
        fetched_tokens=0,
        source=-1,
        transfer_s=0.0,
        ready_s=0.0,
        segments=plan,
        helpers=tuple(helpers),
        sharing=reason,
    )


def _best(
    view: ClusterView, request: PlacementRequest, chosen: Placement, rows: Bools, max_degree: int
) -> tuple[tuple[SegmentPlan, list[WorkerView], TtftPrediction] | None, PromptSharing]:
    ttft, worker = chosen.ranked_by, chosen.prefill
    if not request.may_share or request.is_failover:
        return None, "needs_one"
    if ttft is None or worker.layer_passes < 2 or worker.prefill_model.b <= 0 or not worker.step_tokens:
        return None, "unable"
    alone_s = best_s = chosen.ttft_s - chosen.overhead_s
    if CLEARLY_SOONER * alone_s <= SEGMENT_OVERHEAD_S:  # no plan takes less
        return None, "too_short"
    helpers = list(_idle_helpers(view, request, worker, rows, ttft))
    if not helpers:
        return None, "none_idle"
    best, is_any = None, False
    for number in range(1, min(max_degree, len(helpers) + 1)):
        order = [*helpers[:number], worker]
        cached = _cached(ttft, view, order)
        queues_s = [*(_queue_s(ttft, view, helper) for helper in helpers[:number]), chosen.queue_s]
        parts = [_beside(member, order, queue_s) for member, queue_s in zip(order, queues_s, strict=True)]
        passes = max(1, min(SEGMENT_PASSES, worker.num_layers))
        plan = plan_segments(parts, request.num_prompt_tokens, cached, worker.block_tokens, passes)
        is_any |= plan is not None
        if plan is not None and plan.seconds <= min(CLEARLY_SOONER * alone_s, _GAIN_OF_ONE_MORE * best_s):
            best, best_s = (plan, helpers[:number], ttft), plan.seconds
    if best is None:
        return None, "not_faster" if is_any else "too_short"
    return best, "shared"


def _idle_helpers(
    view: ClusterView, request: PlacementRequest, worker: WorkerView, rows: Bools, ttft: TtftPrediction
) -> Iterator[WorkerView]:
    """Workers with no prompt and room for this one, whose KV is of the same kind, the soonest ones first."""
    room = view.column("free_blocks") * view.column("block_tokens") >= request.num_prompt_tokens + 1
    idle = rows & room & (view.column("waiting_prefill_tokens") == 0) & (view.column("layer_passes") >= 2)
    for row in sorted(idle.nonzero()[0], key=lambda row: float(ttft.seconds[row])):
        other = view.worker(int(row))
        is_alike = _kind_of_kv(other) == _kind_of_kv(worker)
        is_known = other.prefill_model.b > 0 and other.step_tokens > 0
        if other.worker_id != worker.worker_id and is_alike and is_known:
            yield other


def _kind_of_kv(worker: WorkerView) -> tuple[str, float, int]:
    """What workers that load each other's KV by layer must have in common: they convert nothing."""
    return worker.kv_dtype, worker.kv_bytes_per_token, worker.block_tokens


def _beside(worker: WorkerView, order: Sequence[WorkerView], queue_s: float) -> SegmentWorker:
    """The worker while all of `order` compute: those of its host slow it down."""
    num_neighbours = sum(other.host == worker.host for other in order) - 1
    model = worker.prefill_model.scaled(1 + worker.contention * num_neighbours)
    return SegmentWorker(model, worker.step_tokens, queue_s, worker.fetch_s_per_token)


def _queue_s(ttft: TtftPrediction, view: ClusterView, worker: WorkerView) -> float:
    return float(sum(ttft.queue_s[view.rows_of([worker.worker_id])]))


def _cached(ttft: TtftPrediction, view: ClusterView, workers: Sequence[WorkerView]) -> int:
    """Leading tokens that all of these have."""
    return int(min(ttft.cached_tokens[view.rows_of([worker.worker_id for worker in workers])]))
