"""One request's life: placed, prefilled, decoded, and moved to another worker when one fails it.

Knows nothing of HTTP and of text: tokens go to a `TokenSink`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeVar

from halfmoon.errors import DeadlineExceeded, NoCapacity, Unavailable
from halfmoon.pb.prefill_pb2 import KVCodec
from halfmoon.policy.placement.place import ContextLengthExceeded
from halfmoon.policy.retries import FailedAttempt, Reason, Retries
from halfmoon.policy.values import Placement
from halfmoon.policy.wait_limits import WaitLimits
from halfmoon.rpc.context import request_scope
from services.gateway.cluster.cluster import Cluster
from services.gateway.cluster.token_streams import GatewayStopping
from services.gateway.routing.attempt import Attempt, RelayRequest
from services.gateway.routing.early_rejection import EarlyRejection
from services.gateway.routing.progress import Progress
from services.gateway.routing.request_routing import RequestRouting
from services.gateway.routing.token_flow import TokenSink

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_SLOW_PROMPT_TOKENS = 8_192  # whose blocks are hashed off the event loop


class Relay:
    """Runs requests on the cluster. Owns nothing but its limits."""

    def __init__(
        self,
        cluster: Cluster,
        judge: EarlyRejection,
        deadline_s: float,
        wait_limits: WaitLimits,
        kv_codec: KVCodec.ValueType,
    ) -> None:
        self._cluster = cluster
        self._judge = judge
        self._kv_codec = kv_codec
        self._deadline_s = deadline_s
        self._patience = wait_limits

    def case(self, request: RelayRequest, progress: Progress) -> AbstractContextManager[RequestRouting]:
        """One request as long as it is here, for `run`."""
        return self._judge.case(request, progress)

    async def admit(self, by_prompt: Sequence[Sequence[RequestRouting]]) -> None:
        """Admits all of these or none, before any of them begins. Raises Refused, or Unavailable without workers."""
        for leader, *others in by_prompt:
            await _name_blocks(leader)
            for other in others:
                other.share_blocks(leader)
        cases = [case for of_prompt in by_prompt for case in of_prompt]
        await self._within(partial(self._judge.hold_together, cases), self._patience_s(False))

    async def run(self, case: RequestRouting, progress: Progress, sink: TokenSink) -> None:
        """Streams the request's tokens into `sink` until the last one, or until the sink has enough.

        Raises Refused when admission forbids it, NoCapacity or Unavailable when no worker took it, DeadlineExceeded, or
        what a worker failed with.
        Whatever ends it early, a cancellation included, is told to the workers.
        """
        try:
            with request_scope(case.request.request_id, self._deadline_s):
                async with asyncio.timeout(self._deadline_s):
                    await self._run(case, progress, case.noting(sink))
        except TimeoutError as error:
            raise DeadlineExceeded(f"the request was not done within {self._deadline_s:g} s") from error
        finally:
            case.close()

    async def _run(self, case: RequestRouting, progress: Progress, sink: TokenSink) -> None:
        retries = Retries()
        await _name_blocks(case)
        while True:
            placement = await self._placement(case, progress, retries)
            num_before = len(progress.output_token_ids)
            try:
                codec = case.codec(self._kv_codec)
                await Attempt(self._cluster, case.request, progress, placement, codec).run(sink)
                progress.is_complete = True
                return
            except GatewayStopping:
                raise
            except (NoCapacity, Unavailable) as error:
                if not retries.add(_failed(error, placement, len(progress.output_token_ids) > num_before)):
                    raise
                progress.num_retries += 1
                fields = {"reason": error.message, "num_output_tokens": len(progress.output_token_ids)}
                log.warning("request.retried", extra=fields)

    async def _placement(self, case: RequestRouting, progress: Progress, retries: Retries) -> Placement:
        """Where to try next: elsewhere if there is an elsewhere, else after a pause anywhere.

        A request whose worker is lost waits up to `WaitLimits.failover_s` for a worker to come, with tokens or without:
        so long a worker may need to start again. A new one waits up to `return_s` where one was a moment ago.
        """
        for exclude in retries.exclusions():
            try:
                return case.place(exclude)
            except (Unavailable, ContextLengthExceeded):
                continue
        if retries.last_reason is not None:
            await self._cluster.router.pause(retries.pause_s)
            retries.note_pause()
        is_inside = bool(progress.output_token_ids) or retries.last_reason == "lost"
        return await self._within(partial(case.place, ()), self._patience_s(is_inside))

    def _patience_s(self, is_inside: bool) -> float:
        expects_worker = self._cluster.membership.expects_worker(self._cluster.clock())
        return self._patience.seconds(is_inside=is_inside, expects_worker=expects_worker)

    async def _within(self, placing: Callable[[], Result], patience_s: float) -> Result:
        give_up_s = time.monotonic() + patience_s
        while True:
            try:
                return placing()
            except (Unavailable, ContextLengthExceeded):
                left_s = give_up_s - time.monotonic()
                if left_s <= 0:
                    raise
            await self._cluster.router.pause(left_s, until=self._cluster.until_changed())


def _failed(error: NoCapacity | Unavailable, placement: Placement, gave_tokens: bool) -> FailedAttempt:
    reason: Reason = "no room" if isinstance(error, NoCapacity) else "lost"
    prefill, decode = placement.prefill.worker_id, placement.decode.worker_id
    return FailedAttempt(reason, prefill, decode, gave_tokens, error.retry_after_ms)


async def _name_blocks(case: RequestRouting) -> None:
    if len(case.request.prompt_token_ids) > _SLOW_PROMPT_TOKENS:
        await asyncio.to_thread(case.name_blocks)
    else:
        case.name_blocks()
