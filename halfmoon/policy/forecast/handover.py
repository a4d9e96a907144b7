"""What it costs to bring a prompt's KV from its prefill worker to each decode worker."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from halfmoon.policy.models.latency import Floats
from halfmoon.policy.values import Placement, PlacementRequest
from halfmoon.policy.view.cluster_view import ClusterView


class HandoverPrediction(NamedTuple):
    """The hand-over of one computed prompt to every row of the cluster view. All arrays are [num_rows]."""

    exposed_s: Floats  # from the first token until the KV is there
    num_bytes: Floats  # to be sent
    held_tokens: Floats  # leading ones that are there already


class HandoverQueue:
    """Owns the bytes on their way to each row, by request. A request counts until its first token."""

    def __init__(self) -> None:
        self._sent: dict[str, tuple[int, float]] = {}
        self._ahead: Floats = np.zeros(64)  # [num_rows or more]

    def join(self, request_id: str, row: int, num_bytes: float) -> None:
        """Adds a request whose KV will be sent to `row`."""
        self.leave(request_id)
        if not num_bytes:
            return
        while row >= len(self._ahead):
            self._ahead = np.concatenate([self._ahead, np.zeros_like(self._ahead)])
        self._sent[request_id] = row, num_bytes
        self._ahead[row] += num_bytes

    def leave(self, request_id: str) -> None:
        """Removes a request, if it is there."""
        row, num_bytes = self._sent.pop(request_id, (0, 0.0))
        self._ahead[row] -= num_bytes

    def ahead_bytes(self, num_rows: int) -> Floats:
        """Bytes on their way to each row [num_rows]."""
        if len(self._ahead) < num_rows:
            return np.concatenate([self._ahead, np.zeros(num_rows - len(self._ahead))])
        return self._ahead[:num_rows]


def predict_handover(
    view: ClusterView, request: PlacementRequest, prefill: Placement, ahead_bytes: Floats
) -> HandoverPrediction:
    """Predicts the hand-over from the prefill worker of a placement to every row.

    Whole blocks that a row has are not sent. The KV leaves while the prompt is computed, behind `ahead_bytes` that are
    on their way to the same row; what is left at the first token is exposed.
    """
    num_rows = view.num_rows
    held = np.zeros(num_rows)
    if request.cached_blocks.any():
        block_tokens = view.column("block_tokens")
        blocks = request.cached_blocks[np.minimum(view.holders[:num_rows], len(request.cached_blocks) - 1)]
        held = np.minimum(blocks, np.floor(request.num_prompt_tokens / np.maximum(block_tokens, 1))) * block_tokens
    num_bytes = (request.num_prompt_tokens - held) * prefill.prefill.kv_bytes_per_token * request.kv_factor
    row = view.row(prefill.prefill.worker_id)
    if row is None or not prefill.prefill.kv_bytes_per_token:
        return HandoverPrediction(np.zeros(num_rows), num_bytes, held)
    s_per_byte, latency_s = view.links.from_row(row, num_rows)
    begins_s = np.maximum(ahead_bytes * s_per_byte, prefill.queue_s)
    exposed_s = np.maximum(begins_s + num_bytes * s_per_byte - prefill.ttft_s, 0.0) + latency_s
    return HandoverPrediction(exposed_s, num_bytes, held)
