"""Routes the engine's tokens: the first to the waiting Prefill call, the others to a gateway's stream."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

from halfmoon.engine.request import TokenOutput
from halfmoon.errors import Cancelled, InvalidRequest, Unavailable
from halfmoon.pb import decode_pb2, prefill_pb2, types_pb2
from halfmoon.rpc.telemetry.spans import Span
from halfmoon.worker.servicers.kept_answers import Kept, KeptAnswers
from halfmoon.worker.servicers.request_phases import DecodeSpan, Phase
from halfmoon.worker.servicers.wire import token_message


@dataclass(frozen=True, slots=True)
class FirstOutput:
    """A request's first token on this worker, and how it was computed."""

    output: TokenOutput
    num_cached_tokens: int
    began_s: float  # start of the step that first computed a part of the request
    ended_s: float  # when the token arrived
    chunks: Sequence[Phase] = ()  # the steps that computed it


@dataclass(slots=True)
class _Route:
    first: asyncio.Future[FirstOutput] | None  # takes the next token; the rest goes to the gateway
    gateway_id: str
    num_cached_tokens: int = 0
    began_s: float | None = None
    chunks: list[Phase] = field(default_factory=list)
    decoding: DecodeSpan | None = None  # the span of its decoding
    awaits_next: bool = True  # whether `first` or `decoding` waits for the next token
    is_repeatable: bool = False  # its tokens are kept


@dataclass(slots=True)
class _Outbox:
    pending: list[types_pb2.Token] = field(default_factory=list)
    is_due: bool = False  # what is pending is sent now
    sent_at_s: float = -math.inf  # the last message with tokens
    waiting: asyncio.TimerHandle | None = None  # until pending tokens are due
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    reader: int = 0  # number of the current reader; 0 before the first
    left_at_s: float | None = None  # when the last reader left; None while there is a reader

    def release(self) -> None:
        """Lets the reader send what is pending."""
        self.is_due = True
        self.changed.set()

    def take(self, now_s: float) -> list[types_pb2.Token]:
        """The pending tokens, which are sent now."""
        if self.waiting is not None:
            self.waiting.cancel()
        tokens, self.pending = self.pending, []
        self.is_due, self.sent_at_s, self.waiting = False, now_s, None
        return tokens


class TokenStreams:
    """Owns each request's route, each gateway's outbox, and the kept answers. Knows nothing of the engine.

    Event-loop thread only.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        kept: KeptAnswers | None = None,
        interval_s: float = 0.0,
    ) -> None:
        """interval_s: tokens that follow a message sooner wait for the next step, at most for as long."""
        self._clock = clock
        self._interval_s = interval_s
        self.kept = KeptAnswers() if kept is None else kept
        self._routes: dict[str, _Route] = {}
        self._outboxes: dict[str, _Outbox] = {}
        self._num_readers = 0
        self._is_over = False

    @property
    def has_pending(self) -> bool:
        """Whether a gateway that reads its stream has not been sent all tokens."""
        return any(outbox.pending and outbox.left_at_s is None for outbox in self._outboxes.values())

    def is_running(self, request_id: str) -> bool:
        """Whether tokens of the request are still to come."""
        return request_id in self._routes

    def end(self) -> None:
        """Ends every gateway's stream after what is pending: no more tokens will come."""
        self._is_over = True
        for outbox in self._outboxes.values():
            outbox.release()

    def expect_first(self, request_id: str, gateway_id: str) -> asyncio.Future[FirstOutput]:
        """Returns a future of the request's next token; later ones go to the gateway."""
        self._check_new(request_id)
        first: asyncio.Future[FirstOutput] = asyncio.get_running_loop().create_future()
        self._routes[request_id] = _Route(first, gateway_id)
        return first

    def route_to_gateway(self, request_id: str, gateway_id: str) -> None:
        """Routes all tokens of the request to the gateway. Raises Unavailable while the gateway is not reading."""
        self.check_listening(gateway_id)
        self._check_new(request_id)
        self._routes[request_id] = _Route(None, gateway_id, awaits_next=False)

    def keep(self, generation: types_pb2.Generation, first: prefill_pb2.FirstToken | None = None) -> None:
        """Keeps the tokens of a routed request from now on, if it is repeatable."""
        if generation.HasField("repeatable"):
            self._routes[generation.request_id].is_repeatable = True
            self.kept.begin(generation.request_id, generation.gateway_id, generation.repeatable, first)
            if first is not None:
                self.kept.add(first.token, self._clock())

    def note_first(self, generation: types_pb2.Generation, first: prefill_pb2.FirstToken) -> None:
        """Notes the first token of a request that is kept here, or that ended with this token."""
        if not generation.HasField("repeatable"):
            return
        if generation.request_id in self.kept:
            self.kept.note_first(generation.request_id, first)
        elif first.token.finish_reason != types_pb2.NOT_FINISHED:
            self.kept.begin(generation.request_id, generation.gateway_id, generation.repeatable, first)
            self.kept.add(first.token, self._clock())

    def adopt(self, request_id: str, gateway_id: str) -> Kept:
        """Routes a kept answer's further tokens to this gateway, and notifies the one that had it.

        Raises NotFound, and Unavailable if there are further tokens and the gateway is not reading.
        """
        route, before = self._routes.get(request_id), self.kept.owner(request_id)
        if route is None or before is None:
            return self.kept.adopt(request_id, gateway_id)
        self.check_listening(gateway_id)
        route.gateway_id, outbox = gateway_id, self._outboxes.get(before)
        if outbox is not None and before != gateway_id:
            outbox.pending.append(types_pb2.Token(request_id=request_id, finish_reason=types_pb2.TAKEN_OVER))
            outbox.release()
        return self.kept.adopt(request_id, gateway_id)

    def belongs_to_another(self, request_id: str, gateway_id: str) -> bool:
        """Whether another gateway has adopted the request."""
        return self.kept.owner(request_id) not in (None, gateway_id)

    def trace_decoding(self, request_id: str, parent: Span) -> None:
        """Traces the request's decoding from now on as a child of `parent`."""
        route = self._routes.get(request_id)
        if route is not None and parent.is_recording:
            route.decoding, route.awaits_next = DecodeSpan(parent, self._clock()), True

    def check_listening(self, gateway_id: str) -> None:
        """Raises Unavailable unless the gateway reads its token stream now."""
        outbox = self._outboxes.get(gateway_id)
        if outbox is None or outbox.left_at_s is not None:
            raise Unavailable(f"gateway {gateway_id} does not read this worker's token stream")

    def _check_new(self, request_id: str) -> None:
        if request_id in self._routes:
            raise InvalidRequest(f"request {request_id} is already running here", param="request_id")

    def forget(self, request_id: str) -> bool:
        """Drops the route. Tokens still to come are discarded; a caller waiting for the first one gets Cancelled."""
        route = self._routes.pop(request_id, None)
        self.kept.drop(request_id)
        if route is not None and route.first is not None and not route.first.done():
            route.first.set_exception(Cancelled("the request was cancelled"))
        if route is not None and route.decoding is not None:
            route.decoding.end(None, self._clock())
        return route is not None

    def forget_all(self, error: Exception) -> None:
        """Fails every waiting caller with `error`: the engine is gone."""
        for route in self._routes.values():
            if route.first is not None and not route.first.done():
                route.first.set_exception(error)
            if route.decoding is not None:
                route.decoding.end(None, self._clock())
        self._routes.clear()

    def note_begun(self, num_cached_tokens: Mapping[str, int], began_s: float) -> None:
        """Notes requests that a step computed for the first time, with their cached tokens."""
        for request_id, num_cached in num_cached_tokens.items():
            route = self._routes.get(request_id)
            if route is not None and route.began_s is None:
                route.num_cached_tokens, route.began_s = num_cached, began_s

    def note_chunks(self, num_tokens: Mapping[str, int], began_s: float, ended_s: float) -> None:
        """Notes how many prompt tokens of each request a step computed."""
        for request_id, count in num_tokens.items():
            route = self._routes.get(request_id)
            if route is not None and route.first is not None:
                route.chunks.append(Phase("chunk", began_s, ended_s, num_tokens=count))

    def deliver(self, outputs: Sequence[TokenOutput]) -> None:
        """Sorts one step's tokens into the outboxes, with at most one wake-up per gateway.

        The last token of a request does not wait for another step's.
        """
        is_last: dict[str, bool] = {}  # whether any of a gateway's tokens is
        for output in outputs:
            route = self._routes.get(output.request_id)
            if route is None:
                continue
            if output.finish_reason is not None:
                del self._routes[output.request_id]
                if route.decoding is not None:
                    route.decoding.end(output, self._clock())
            if route.is_repeatable:
                self._keep_token(output)
            if route.awaits_next:
                route.awaits_next = False
                if self._deliver_first(route, output):
                    continue
            outbox = self._outboxes.get(route.gateway_id)
            if outbox is not None:
                outbox.pending.append(token_message(output))
                is_last[route.gateway_id] = is_last.get(route.gateway_id, False) or output.finish_reason is not None
        for gateway_id, has_last in is_last.items():
            outbox = self._outboxes[gateway_id]
            if has_last or self._clock() - outbox.sent_at_s >= self._interval_s:
                outbox.release()
            elif outbox.waiting is None:
                outbox.waiting = asyncio.get_running_loop().call_later(self._interval_s, outbox.release)

    def _keep_token(self, output: TokenOutput) -> None:
        if output.finish_reason in (None, "stop", "length"):
            self.kept.add(token_message(output), self._clock())
        else:
            self.kept.drop(output.request_id)

    def _deliver_first(self, route: _Route, output: TokenOutput) -> bool:
        """Notifies whoever awaits the route's next token; True if the token goes no further."""
        now_s = self._clock()
        if route.first is None:
            if route.decoding is not None:
                route.decoding.first(now_s)
            return False
        if not route.first.done():
            began_s = now_s if route.began_s is None else route.began_s
            route.first.set_result(FirstOutput(output, route.num_cached_tokens, began_s, now_s, route.chunks))
        route.first = None
        return True

    async def read(self, gateway_id: str) -> AsyncGenerator[decode_pb2.StepTokens, None]:
        """Streams a gateway's tokens, an empty message first. A newer reader of the same gateway ends this one."""
        self._num_readers += 1
        reader = self._num_readers
        outbox = self._outboxes.setdefault(gateway_id, _Outbox())
        outbox.reader, outbox.left_at_s = reader, None
        outbox.changed.set()
        try:
            yield decode_pb2.StepTokens()
            while outbox.reader == reader:
                outbox.changed.clear()
                if outbox.pending and (outbox.is_due or self._is_over):
                    yield decode_pb2.StepTokens(tokens=outbox.take(self._clock()))
                elif self._is_over:
                    return
                else:
                    await outbox.changed.wait()
            raise Unavailable("a newer reader took this gateway's token stream over")
        finally:
            if outbox.reader == reader:
                outbox.left_at_s = self._clock()

    def abandoned(self, patience_s: float) -> list[str]:
        """Requests whose gateway has not read for `patience_s`; drops its outbox and their routes.

        Kept ones are among them only once their time is over, or there was no more room.
        """
        now_s = self._clock()
        gone = {
            gateway_id
            for gateway_id, outbox in self._outboxes.items()
            if outbox.left_at_s is not None and now_s - outbox.left_at_s > patience_s
        }
        for gateway_id in gone:
            del self._outboxes[gateway_id]
            self.kept.leave(gateway_id, now_s)
        self.kept.expire(now_s)
        requests = [
            request_id
            for request_id, route in self._routes.items()
            if request_id not in self.kept
            and (route.gateway_id in gone or (route.is_repeatable and route.gateway_id not in self._outboxes))
        ]
        for request_id in requests:
            self.forget(request_id)
        return requests
