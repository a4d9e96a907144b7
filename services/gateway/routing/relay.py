"""Runs a request on the cluster: its outputs side by side, each moved to other workers when one fails it.

Knows nothing of HTTP and of text: tokens go to a `TokenSink`.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from statistics import median
from typing import TypeVar

from halfmoon.errors import DeadlineExceeded, HalfmoonError, NoCapacity, StalePlacement, Unavailable, leaf_errors
from halfmoon.policy.admission.refusal import PredictedLatency
from halfmoon.policy.placement.place import ContextLengthExceeded
from halfmoon.policy.retries import FailedAttempt, Reason, Retries
from halfmoon.policy.values import Placement
from halfmoon.policy.wait_limits import WaitLimits
from halfmoon.rpc.context import request_scope
from services.gateway.cluster.cluster import Cluster
from services.gateway.cluster.held_answers import HeldAnswer
from services.gateway.cluster.token_router import GatewayStopping, Moving
from services.gateway.progress import Progress
from services.gateway.request import RequestOutput
from services.gateway.routing.adoption import Adoption
from services.gateway.routing.attempt import Attempt, DecodeWorkerLost, Moved
from services.gateway.routing.decode_move import DecodeMoves
from services.gateway.routing.handover_codec import HandoverCodec
from services.gateway.routing.hot_spots import HotSpotWatch
from services.gateway.routing.output_turns import OutputTurns
from services.gateway.routing.prefix_use import bring_next_turn
from services.gateway.routing.request_routing import RequestRouting
from services.gateway.routing.reserve_together import reserve_together
from services.gateway.routing.routing_context import RoutingContext
from services.gateway.routing.token_flow import TokenSink

log = logging.getLogger(__name__)

SinkOf = Callable[[RequestOutput], TokenSink]
Result = TypeVar("Result")

_REASONS: Mapping[type[HalfmoonError], Reason] = {
    NoCapacity: "no room", StalePlacement: "stale", DecodeWorkerLost: "decode lost"
}  # fmt: skip
_SLOW_PROMPT_TOKENS = 8_192  # longer prompts have their blocks hashed off the event loop


class Relay:
    """Runs requests on the cluster. Owns nothing but its limits, and whose outputs are being reserved."""

    def __init__(
        self,
        cluster: Cluster,
        context: RoutingContext,
        deadline_s: float,
        wait_limits: WaitLimits,
        codec: HandoverCodec,
        hot_spots: HotSpotWatch,
    ) -> None:
        self._cluster = cluster
        self._context = context
        self._codec = codec
        self._hot_spots = hot_spots
        self._deadline_s = deadline_s
        self._wait_limits = wait_limits
        self._reserving = asyncio.Lock()  # of two requests that have no room together one is admitted

    async def run(self, by_prompt: Sequence[Sequence[RequestOutput]], sink_of: SinkOf) -> None:
        """Streams the tokens of all outputs of a request, given by prompt, into their sinks.

        Several outputs are all admitted before any begins, or none is. Raises Refused when admission forbids it,
        NoCapacity or Unavailable when no worker took it, DeadlineExceeded, or a worker's own error: the first failure
        ends all outputs. Whatever ends an output early, including a cancellation, is passed on to its workers.
        """
        ends_s = asyncio.get_running_loop().time() + self._deadline_s
        with ExitStack() as stack:
            routings = self._routings(by_prompt, stack)
            if sum(map(len, routings)) == 1:
                routing = routings[0][0]
                await self._run_output(routing, ends_s, sink_of(routing.output))
                return
            await self._reserve(routings)
            try:
                async with asyncio.TaskGroup() as tasks:
                    turns = OutputTurns(tasks)
                    for leader, *followers in routings:
                        begun = await self._begin(turns, leader, sink_of, ends_s)
                        if followers:
                            tasks.create_task(self._follow(begun, turns, followers, sink_of, ends_s))
            except BaseExceptionGroup as failures:
                raise leaf_errors(failures)[0] from None

    def bring_next_turn(self, output: RequestOutput) -> None:
        """Prepares for a request that goes on from this output: `bring_next_turn` of `prefix_use`."""
        bring_next_turn(self._context, output)

    async def predict(self, by_prompt: Sequence[Sequence[RequestOutput]]) -> PredictedLatency:
        """The latency of a request that is not run now: that of its slowest output, from now.

        Raises Refused when admission would forbid it, and what placement raises.
        """
        with ExitStack() as stack:
            routings = self._routings(by_prompt, stack)
            await _hash_prompts(routings)
            each = [routing for of_prompt in routings for routing in of_prompt]
            await self._reserve_together(each)
            latencies = [routing.predicted for routing in each if routing.predicted is not None]
            for routing in each:
                routing.release()
        tbt_s = [latency.tbt_s for latency in latencies if latency.tbt_s is not None]
        return PredictedLatency(max(latency.ttft_s for latency in latencies), max(tbt_s, default=None))

    def _routings(self, by_prompt: Sequence[Sequence[RequestOutput]], stack: ExitStack) -> list[list[RequestRouting]]:
        return [
            [stack.enter_context(closing(RequestRouting(self._context, output))) for output in outputs]
            for outputs in by_prompt
        ]

    async def _reserve(self, by_prompt: Sequence[Sequence[RequestRouting]]) -> None:
        await _hash_prompts(by_prompt)
        routings = [routing for of_prompt in by_prompt for routing in of_prompt]
        new = [routing for routing in routings if _held(routing.output) is None]
        await self._within(partial(self._reserve_together, new), self._wait_s(is_inside=False))

    async def _reserve_together(self, routings: Sequence[RequestRouting]) -> None:
        async with self._reserving:
            await reserve_together(self._context, routings)

    async def _begin(
        self, turns: OutputTurns, routing: RequestRouting, sink_of: SinkOf, ends_s: float
    ) -> asyncio.Future[None]:
        return await turns.begin(partial(self._run_output, routing, ends_s, turns=turns), sink_of(routing.output))

    async def _follow(
        self,
        leader_begun: asyncio.Future[None],
        turns: OutputTurns,
        followers: Sequence[RequestRouting],
        sink_of: SinkOf,
        ends_s: float,
    ) -> None:
        """Begins the other outputs of a prompt behind its first one: they find its prefix cached."""
        await leader_begun
        for follower in followers:
            await self._begin(turns, follower, sink_of, ends_s)

    async def _run_output(
        self, routing: RequestRouting, ends_s: float, sink: TokenSink, turns: OutputTurns | None = None
    ) -> None:
        """Runs an output, until the loop's time `ends_s` at most; `turns`: of its request's outputs, if several."""
        left_s = max(ends_s - asyncio.get_running_loop().time(), 0.0)
        try:
            with request_scope(routing.output.request_id, left_s):
                async with asyncio.timeout_at(ends_s):
                    if not await self._adopts(routing.output, sink):
                        await self._run_attempts(routing, routing.observing(sink), turns)
        except TimeoutError as error:
            raise DeadlineExceeded(f"the request was not done within {self._deadline_s:g} s") from error
        finally:
            routing.close()

    async def _adopts(self, output: RequestOutput, sink: TokenSink) -> bool:
        """Goes on with an output that a worker holds, to its end. False if none holds it, or no longer."""
        held, progress = _held(output), output.progress
        if held is None:
            return False
        try:
            await Adoption(self._cluster, output, held).run(sink)
        except GatewayStopping:
            raise
        except Unavailable as error:
            progress.num_retries += 1
            fields = {"reason": error.message, "num_output_tokens": len(progress.output_token_ids)}
            log.warning("request.not_adopted", extra=fields)
            return False
        progress.is_complete = True
        return True

    async def _run_attempts(self, routing: RequestRouting, sink: TokenSink, turns: OutputTurns | None) -> None:
        """Attempts the output until its last token, or until the sink has enough."""
        retries, progress, moved = Retries(), routing.output.progress, None
        moves = DecodeMoves(self._cluster, routing, self._hot_spots)
        await _hash_blocks(routing)
        while True:
            placement = await self._placement(routing, retries) if moved is None else moved.placement
            sources, moved = routing.sources(placement) if moved is None else [moved.source], None
            num_before = len(progress.output_token_ids)
            try:
                codec = routing.codec(self._codec)
                await Attempt(self._cluster, routing.output, placement, codec, sources, moves).run(sink)
                progress.is_complete = True
                if progress.moves:
                    log.info("request.moved", extra=_moved_fields(progress))
                return
            except Moved as change:
                if routing.move(change.moving.placement):
                    moved = change.moving
                    progress.moves.append(len(progress.gaps_s))
                    log.info("request.moving", extra=_moving_fields(moved, placement, routing))
                else:
                    _note_retry(progress, f"worker {change.moving.placement.decode.worker_id} has left the cluster")
            except GatewayStopping:
                raise
            except (NoCapacity, Unavailable) as error:
                failed = _failed(error, placement, len(progress.output_token_ids) > num_before)
                if isinstance(error, NoCapacity):
                    failed = failed._replace(gives_way=not routing.note_no_room())
                elif not isinstance(error, StalePlacement):
                    routing.note_lost()
                if not retries.add(failed, have_others_begun=turns is not None and turns.has_begun):
                    raise
                _note_retry(progress, error.message)

    async def _placement(self, routing: RequestRouting, retries: Retries) -> Placement:
        """Chooses workers for the next attempt: other ones if possible, else any after a pause.

        A request whose worker is lost waits up to `WaitLimits.failover_s` for a worker, the time that one may need to
        start again. A new request waits up to `return_s` if a worker was there a moment ago.
        """
        if retries.notice_s:
            await self._cluster.router.pause(retries.notice_s)
        for exclude in retries.exclusions():
            try:
                return routing.place(exclude)
            except (Unavailable, ContextLengthExceeded):
                continue
        if retries.last_reason is not None:
            await self._cluster.router.pause(retries.pause_s)
            retries.note_pause()
        is_inside = bool(routing.output.progress.output_token_ids) or retries.has_lost

        async def place() -> Placement:
            return routing.place(())

        return await self._within(place, self._wait_s(is_inside=is_inside))

    def _wait_s(self, *, is_inside: bool) -> float:
        expects_worker = self._cluster.membership.expects_worker(self._cluster.clock())
        return self._wait_limits.seconds(is_inside=is_inside, expects_worker=expects_worker)

    async def _within(self, place: Callable[[], Awaitable[Result]], wait_s: float) -> Result:
        """Tries `place` again whenever the cluster changes, for at most `wait_s`."""
        give_up_s = time.monotonic() + wait_s
        while True:
            try:
                return await place()
            except (Unavailable, ContextLengthExceeded):
                left_s = give_up_s - time.monotonic()
                if left_s <= 0:
                    raise
            await self._cluster.router.pause(left_s, until=self._cluster.until_changed())


def _note_retry(progress: Progress, reason: str) -> None:
    progress.num_retries += 1
    fields = {"reason": reason, "num_output_tokens": len(progress.output_token_ids)}
    log.warning("request.retried", extra=fields)


def _moving_fields(moved: Moving, before: Placement, routing: RequestRouting) -> dict[str, object]:
    worker = before.decode
    return {
        "before": worker.worker_id,
        "after": moved.placement.decode.worker_id,
        "loaded_tokens": moved.loaded_tokens,
        "kv_bytes": int(moved.loaded_tokens * worker.kv_bytes_per_token),
        "tail_tokens": routing.num_tokens - moved.num_there,
    }


def _moved_fields(progress: Progress) -> dict[str, object]:
    """The gaps at its moves with what the new workers took of them, and the usual gap."""
    gaps_s = progress.gaps_s
    pauses_s = [gaps_s[at] for at in progress.moves if at < len(gaps_s)]
    queues_s, computes_s = [list(one) for one in zip(*progress.moved, strict=True)] or ([], [])
    return {
        "pauses_s": pauses_s,
        "queues_s": queues_s,
        "computes_s": computes_s,
        "usual_s": median(gaps_s) if gaps_s else None,
        "num_tokens": len(gaps_s) + 1,
    }


def _held(output: RequestOutput) -> HeldAnswer | None:
    return None if output.repeat is None else output.repeat.held


def _failed(error: NoCapacity | Unavailable, placement: Placement, gave_tokens: bool) -> FailedAttempt:
    reason: Reason = next((reason for cls, reason in _REASONS.items() if isinstance(error, cls)), "lost")
    prefill, decode = placement.prefill.worker_id, placement.decode.worker_id
    return FailedAttempt(reason, prefill, decode, gave_tokens, error.retry_after_ms)


async def _hash_prompts(by_prompt: Sequence[Sequence[RequestRouting]]) -> None:
    for leader, *others in by_prompt:
        await _hash_blocks(leader)
        for other in others:
            other.share_blocks(leader)


async def _hash_blocks(routing: RequestRouting) -> None:
    if len(routing.output.prompt_token_ids) > _SLOW_PROMPT_TOKENS:
        await asyncio.to_thread(routing.hash_blocks)
    else:
        routing.hash_blocks()
