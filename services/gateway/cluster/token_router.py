"""Delivers what workers report about running requests to the attempts that they belong to."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from halfmoon.errors import HalfmoonError, Unavailable
from halfmoon.pb.decode_pb2 import AdoptedTokens, StepTokens
from halfmoon.pb.prefill_pb2 import FirstToken, HandedOver, KVSource
from halfmoon.pb.types_pb2 import Token
from halfmoon.policy.values import Placement


class TokenArrived(NamedTuple):
    """A token from the decode worker's stream; the time is on the gateway's monotonic clock."""

    token: Token
    at_s: float


@dataclass(frozen=True, slots=True)
class FirstTokenArrived:
    """The prefill worker's token."""

    first: FirstToken
    at_s: float


@dataclass(frozen=True, slots=True)
class Adopted:
    """A worker's answer to an adoption, with all tokens so far."""

    answer: AdoptedTokens  # its first message
    tokens: Sequence[Token]
    at_s: float


@dataclass(frozen=True, slots=True)
class PrefillEnded:
    """The Prefill call ended, successfully if `error` is None."""

    error: HalfmoonError | None


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """A worker left the cluster, or its token stream broke and may have lost tokens."""

    worker_id: str
    error: HalfmoonError


@dataclass(frozen=True, slots=True)
class WorkerLeaves:
    """A worker will no longer decode: it drains, or serves another role by now. What runs there may go on elsewhere."""

    worker_id: str


@dataclass(frozen=True, slots=True)
class Moving:
    """The answer goes on at another worker, which has nearly all of its KV."""

    placement: Placement
    source: KVSource  # the worker that it leaves
    loaded_tokens: int  # whose KV the new worker has loaded for it
    num_there: int  # leading tokens whose KV it has


class GatewayStopping(Unavailable):
    """The gateway stops; another attempt cannot help."""


class TakenOver(HalfmoonError):
    """A repeat of the request goes on with its answer."""

    def __init__(self) -> None:
        super().__init__("this request was repeated: its answer goes on there")


@dataclass(frozen=True, slots=True)
class Stopping:
    """The gateway stops, or a repeat takes the answer over."""

    error: GatewayStopping | TakenOver


Event = (
    TokenArrived
    | FirstTokenArrived
    | HandedOver
    | PrefillEnded
    | Adopted
    | WorkerLost
    | WorkerLeaves
    | Moving
    | Stopping
)


class PutEvents(Protocol):
    """Takes events that came together, in order. Neither waits nor raises."""

    def __call__(self, *events: Event) -> None: ...


class Route(NamedTuple):
    """Where one attempt's events go, and which workers it is on."""

    worker_ids: frozenset[str]
    put: PutEvents


class TokenRouter:
    """Owns the routes, by request id. Knows nothing of connections."""

    def __init__(self) -> None:
        self._routes: dict[str, Route] = {}
        self._stopping = asyncio.Event()

    def __len__(self) -> int:
        return len(self._routes)

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    @contextmanager
    def route(self, request_id: str, route: Route) -> Iterator[None]:
        """Inside the block, events of `request_id` go to `route`; outside it they are dropped.

        Raises GatewayStopping after `stop`.
        """
        self.check_running()
        assert request_id not in self._routes
        self._routes[request_id] = route
        try:
            yield
        finally:
            del self._routes[request_id]

    def deliver(self, step: StepTokens, at_s: float) -> None:
        """Delivers the tokens of a message, those of a request together; drops those without a route."""
        arrived: defaultdict[str, list[TokenArrived]] = defaultdict(list)
        for token in step.tokens:
            arrived[token.request_id].append(TokenArrived(token, at_s))
        for request_id, events in arrived.items():
            route = self._routes.get(request_id)
            if route is not None:
                route.put(*events)

    def lose(self, worker_id: str, error: HalfmoonError) -> None:
        """Notifies every attempt on `worker_id` that the worker is lost."""
        for route in self._routes.values():
            if worker_id in route.worker_ids:
                route.put(WorkerLost(worker_id, error))

    def leave(self, worker_id: str) -> None:
        """Notifies every attempt on `worker_id` that the worker will no longer decode."""
        for route in tuple(self._routes.values()):
            if worker_id in route.worker_ids:
                route.put(WorkerLeaves(worker_id))

    def stop(self) -> None:
        """Ends every attempt, and every pause between attempts, with GatewayStopping."""
        self._stopping.set()
        for route in self._routes.values():
            route.put(Stopping(_stopping_error()))

    def check_running(self) -> None:
        """Raises GatewayStopping after `stop`."""
        if self._stopping.is_set():
            raise _stopping_error()

    async def pause(self, seconds: float, until: Awaitable[Any] | None = None) -> None:
        """Waits for `seconds`, or until `until` is done. Raises GatewayStopping as soon as `stop` is called."""
        waiting = [asyncio.ensure_future(event) for event in (self._stopping.wait(), until) if event is not None]
        try:
            await asyncio.wait(waiting, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for future in waiting:
                future.cancel()
        self.check_running()


def _stopping_error() -> GatewayStopping:
    return GatewayStopping("the gateway is shutting down", retry_after_ms=1_000)
