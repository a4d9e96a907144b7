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

from halfmoon.errors import DeadlineExceeded, HalfmoonError, NoCapacity, Unavailable
from halfmoon.pb.prefill_pb2 import KVCodec
from halfmoon.policy.placement import ContextLengthExceeded, Placement
from halfmoon.rpc.context import request_scope
from services.gateway.attempt import Attempt, RelayRequest
from services.gateway.case import Case
from services.gateway.cluster import Cluster
from services.gateway.judge import Judge
from services.gateway.progress import Progress
from services.gateway.token_flow import TokenSink
from services.gateway.token_streams import GatewayStopping

log = logging.getLogger(__name__)

Result = TypeVar("Result")

_MAX_REFUSALS = 3  # attempts in a row that gave no token
_MAX_FAILOVERS = 2  # attempts that gave tokens, then failed
_DEFAULT_WAIT_MS = 100
_SLOW_PROMPT_TOKENS = 8_192  # whose blocks are hashed off the event loop
_MAX_WAIT_MS = 1_000


class Relay:
    """Runs requests on the cluster. Owns nothing but its limits."""

    def __init__(
        self,
        cluster: Cluster,
        judge: Judge,
        deadline_s: float,
        failover_wait_s: float,
        return_wait_s: float,
        kv_codec: KVCodec.ValueType,
    ) -> None:
        self._cluster = cluster
        self._judge = judge
        self._kv_codec = kv_codec
        self._deadline_s = deadline_s
        self._failover_wait_s = failover_wait_s
        self._return_wait_s = return_wait_s

    def case(self, request: RelayRequest, progress: Progress) -> AbstractContextManager[Case]:
        """One request as long as it is here, for `run`."""
        return self._judge.case(request, progress)

    async def admit(self, by_prompt: Sequence[Sequence[Case]]) -> None:
        """Admits all of these or none, before any of them begins. Raises Refused, or Unavailable without workers."""
        for leader, *others in by_prompt:
            await _name_blocks(leader)
            for other in others:
                other.share_blocks(leader)
        cases = [case for of_prompt in by_prompt for case in of_prompt]
        await self._within(partial(self._judge.hold_together, cases), self._patience_s(False, None))

    async def run(self, case: Case, progress: Progress, sink: TokenSink) -> None:
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

    async def _run(self, case: Case, progress: Progress, sink: TokenSink) -> None:
        failures = _Failures()
        await _name_blocks(case)
        while True:
            placement = await self._placement(case, progress, failures)
            num_before = len(progress.output_token_ids)
            try:
                codec = case.codec(self._kv_codec)
                await Attempt(self._cluster, case.request, progress, placement, codec).run(sink)
                progress.is_complete = True
                return
            except GatewayStopping:
                raise
            except (NoCapacity, Unavailable) as error:
                failures.add(error, placement, gave_tokens=len(progress.output_token_ids) > num_before)
                progress.num_retries += 1
                fields = {"reason": error.message, "num_output_tokens": len(progress.output_token_ids)}
                log.warning("request.retried", extra=fields)

    async def _placement(self, case: Case, progress: Progress, failures: _Failures) -> Placement:
        """Where to try next: elsewhere if there is an elsewhere, else after a pause anywhere.

        A request whose worker is lost waits up to `failover_wait_s` for a worker to come, with tokens or without:
        so long a worker may need to start again. A new one waits up to `return_wait_s` where one was a moment ago.
        """
        for exclude in failures.exclusions():
            try:
                return case.place(exclude)
            except (Unavailable, ContextLengthExceeded):
                continue
        if failures.last is not None:
            wait_ms = min(failures.last.retry_after_ms or _DEFAULT_WAIT_MS, _MAX_WAIT_MS)
            await self._cluster.router.pause(wait_ms / 1000)
        has_tokens = bool(progress.output_token_ids)
        return await self._within(partial(case.place, ()), self._patience_s(has_tokens, failures.last))

    def _patience_s(self, has_tokens: bool, last: HalfmoonError | None) -> float:
        if has_tokens or isinstance(last, Unavailable):
            return self._failover_wait_s
        if self._cluster.membership.expects_worker(self._cluster.clock()):
            return self._return_wait_s
        return 0.0

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


async def _name_blocks(case: Case) -> None:
    if len(case.request.prompt_token_ids) > _SLOW_PROMPT_TOKENS:
        await asyncio.to_thread(case.name_blocks)
    else:
        case.name_blocks()


class _Failures:
    """Owns the attempts that failed, and when to give up."""

    def __init__(self) -> None:
        self.last: NoCapacity | Unavailable | None = None
        self._refusals = 0
        self._failovers = 0
        self._refused_by: list[tuple[str, ...]] = []

    def add(self, error: NoCapacity | Unavailable, placement: Placement, *, gave_tokens: bool) -> None:
        """Notes a failed attempt. Raises its error when it was the last one."""
        self._failovers += gave_tokens
        self._refusals = 0 if gave_tokens else self._refusals + 1
        if self._refusals >= _MAX_REFUSALS or self._failovers > _MAX_FAILOVERS:
            raise error
        self.last = error
        ids = (placement.decode.worker_id, placement.prefill.worker_id)
        self._refused_by.append(ids[:1] if isinstance(error, NoCapacity) else ids)

    def exclusions(self) -> list[tuple[str, ...]]:
        """Workers to avoid, most wary first. No capacity is the decode worker's; Unavailable may be either's."""
        if not self._refused_by:
            return [()]
        both = tuple(name for ids in self._refused_by for name in ids)
        decodes = tuple(ids[0] for ids in self._refused_by)
        prefills = tuple(ids[1] for ids in self._refused_by if len(ids) > 1)
        return [both, decodes, prefills] if prefills else [both]
