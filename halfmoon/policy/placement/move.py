"""Where a running answer goes on when its decode worker is to be left."""

from __future__ import annotations

import random

import numpy as np

from halfmoon.policy.placement.ranking import least, predict_tbt
from halfmoon.policy.values import DecodeLoads, Placement, PlacementRequest
from halfmoon.policy.view.capabilities import Bools
from halfmoon.policy.view.cluster_view import ClusterView

SHORT_TAIL = 16  # tokens that the new worker computes itself, in a step that is not much longer than a decode step


def move_target(
    view: ClusterView, request: PlacementRequest, loads: DecodeLoads, same_kv: Bools, rng: random.Random
) -> Placement | None:
    """The decode worker with the least TBT of those that have room for all of the answer; None if none has now.

    It restores the answer alone, so it must be able to fetch KV. same_kv: rows [num_rows] whose blocks are of the kind
    that the present worker has.
    """
    present = view.capabilities.present
    num_tokens, context_tokens = request.num_prompt_tokens, request.context_tokens()
    rows = (present.decode | present.both) & same_kv
    rows[view.rows_of(request.exclude)] = False
    free_tokens = view.column("free_blocks") * view.column("block_tokens")
    rows &= view.column("capacity_tokens") >= num_tokens + request.max_tokens
    rows &= free_tokens > num_tokens + view.column("block_tokens")
    rows &= view.column("num_requests") < view.column("max_running")
    rows &= np.isfinite(view.column("fetch_s_per_token"))
    if not rows.any():
        return None
    row = least(predict_tbt(view, loads, context_tokens), rows, rng)
    worker = view.worker(row)
    step_s = worker.step_model.seconds(float(loads.batch[row]) + 1, float(loads.context_tokens[row]) + context_tokens)
    return Placement(worker, worker, ttft_s=step_s, tbt_s=step_s, decode_reason="computes_prompt")


def tail_tokens(num_tokens: int, block_tokens: int) -> int:
    """Tokens behind the whole blocks of a worker that has just given the last of `num_tokens`."""
    return num_tokens - whole_blocks(num_tokens, block_tokens) * block_tokens


def whole_blocks(num_tokens: int, block_tokens: int) -> int:
    """Whole blocks of KV on a worker that has just given the last of `num_tokens`."""
    return max(num_tokens - 1, 0) // block_tokens
