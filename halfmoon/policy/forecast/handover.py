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
        self._names: list[str] = []  # in the order of the arrays, which have no holes
        self._places: dict[str, int] = {}  # in them
        self._rows = np.zeros(64, np.int64)
        self._bytes: Floats = np.zeros(64)
        self._at_s: Floats = np.zeros(64)  # of the first token, as predicted

    def join(self, request_id: str, row: int, num_bytes: float, at_s: float) -> None:
        """Adds a request whose KV will be sent to `row`, all but the rest of it by `at_s`."""
        self.leave(request_id)
        if not num_bytes:
            return
        place = len(self._names)
        if place == len(self._rows):
            self._rows = np.resize(self._rows, 2 * place)
            self._bytes, self._at_s = np.resize(self._bytes, 2 * place), np.resize(self._at_s, 2 * place)
        self._names.append(request_id)
        self._places[request_id] = place
        self._rows[place], self._bytes[place], self._at_s[place] = row, num_bytes, at_s

    def leave(self, request_id: str) -> None:
        """Removes a request, if it is there."""
        place = self._places.pop(request_id, None)
        if place is None:
            return
        last = self._names.pop()
        if last == request_id:
            return
        for column in (self._rows, self._bytes, self._at_s):
            column[place] = column[len(self._names)]
        self._names[place], self._places[last] = last, place

    def ahead_bytes(self, num_rows: int, until_s: float) -> Floats:
        """Bytes [num_rows] of the requests whose first token is predicted for `until_s` or before.

        What is sent for a later one is sent behind that.
        """
        num = len(self._names)
        weights = np.where(self._at_s[:num] <= until_s, self._bytes[:num], 0.0)
        ahead: Floats = np.bincount(self._rows[:num], weights, num_rows)[:num_rows].astype(np.float64, copy=False)
        return ahead


def predict_handover(
    view: ClusterView, request: PlacementRequest, prefill: Placement, ahead_bytes: Floats
) -> HandoverPrediction:
    """Predicts the hand-over from the prefill worker of a placement to every row.

    Whole blocks that a row has are not sent. The KV leaves while the prompt is computed, behind `ahead_bytes` that will
    have left for the same row by then; what is left at the first token is exposed.
    """
    num_rows = view.num_rows
    held = np.zeros(num_rows)
    if request.cached_blocks.any():
        block_tokens = view.column("block_tokens")
        blocks = request.cached_blocks[np.minimum(view.holders[:num_rows], len(request.cached_blocks) - 1)]
        held = np.minimum(blocks, np.floor(request.num_prompt_tokens / np.maximum(block_tokens, 1))) * block_tokens
    missing = np.maximum(request.context_tokens() - held, 0.0)
    num_bytes = missing * prefill.prefill.kv_bytes_per_token * request.kv_factor
    row = view.row(prefill.prefill.worker_id)
    if row is None or not prefill.prefill.kv_bytes_per_token:
        return HandoverPrediction(np.zeros(num_rows), num_bytes, held)
    s_per_byte, latency_s = view.links.from_row(row, num_rows)
    begins_s = np.maximum(ahead_bytes * s_per_byte, prefill.queue_s)
    exposed_s = np.maximum(begins_s + num_bytes * s_per_byte - prefill.ttft_s, 0.0) + latency_s
    return HandoverPrediction(exposed_s, num_bytes, held)
