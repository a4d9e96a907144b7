"""The workers that help a prefill worker with one prompt: asked when an attempt begins, let go at its first token."""

from __future__ import annotations

import asyncio
import logging

from halfmoon.errors import HalfmoonError
from halfmoon.pb.prefill_pb2 import PrefillRequest, PromptShares
from halfmoon.pb.types_pb2 import SamplingParams
from halfmoon.policy.models.segments import SegmentPlan
from halfmoon.policy.values import Placement
from halfmoon.rpc.peer import LONG_LIVED_S
from services.gateway.cluster.cluster import Cluster
from services.gateway.cluster.worker import Worker

log = logging.getLogger(__name__)


class PrefillHelpers:
    """Owns the calls to the helpers of one attempt. A helper that fails delays the prompt, and ends nothing."""

    def __init__(self, cluster: Cluster, request: PrefillRequest, placement: Placement, plan: SegmentPlan) -> None:
        """Adds the helpers to the prefill worker's `request`. Raises Unavailable if one has left the cluster."""
        self._cluster = cluster
        self._request_id = request.generation.request_id
        self._workers = [cluster.worker(helper.worker_id) for helper in placement.helpers]
        addresses = [*(helper.address for helper in placement.helpers), placement.prefill.address]
        own = plan.degree - 1
        times = {"round_s": plan.round_s, "queue_s": placement.queue_s}
        shares = PromptShares(addresses=addresses, segment_ends=plan.ends, own=own, **times)
        request.shares.CopyFrom(shares)
        last_ends = plan.ends[-plan.degree : -1]
        self._requests = [
            _part(request, shares, number, end, worker)
            for number, (end, worker) in enumerate(zip(last_ends, self._workers, strict=True))
        ]
        self._calls: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Asks the helpers."""
        membership, now_s = self._cluster.membership, self._cluster.clock()
        for worker, request in zip(self._workers, self._requests, strict=True):
            self._calls.append(self._cluster.spawn(_call(worker, request)))
            num_tokens = len(request.generation.prompt_token_ids)
            membership.note_helping(self._request_id, worker.member, num_tokens, now_s)

    def end(self) -> None:
        """Lets the helpers go. Idempotent."""
        calls, self._calls = self._calls, []
        for call, worker in zip(calls, self._workers, strict=False):
            call.cancel()
            self._cluster.membership.note_helped(self._request_id, worker.member, self._cluster.clock())


def _part(request: PrefillRequest, shares: PromptShares, own: int, end: int, worker: Worker) -> PrefillRequest:
    """The request for a helper: the prompt up to `end`, and one token of which nothing is made."""
    part = PrefillRequest(role_epoch=worker.member.role_epoch, shares=shares)
    part.shares.own = own
    part.generation.CopyFrom(request.generation)
    generation = part.generation
    del generation.prompt_token_ids[end:]
    generation.ClearField("repeatable")
    generation.sampling.CopyFrom(SamplingParams(max_tokens=1, top_p=1.0, repetition_penalty=1.0, ignore_eos=True))
    return part


async def _call(worker: Worker, request: PrefillRequest) -> None:
    """Keeps a helper computing and lending until this is cancelled."""
    try:
        async with worker.peer.stream(worker.prefill.Prefill, request, deadline_s=LONG_LIVED_S) as events:
            async for _ in events:
                pass
    except HalfmoonError as error:
        log.info("helper.failed", extra={"worker_id": worker.member.worker_id, "reason": error.message})
