"""A channel to another service: every call has a deadline, every stream is cancelled when its reader goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Self

import grpc

from halfmoon.errors import DataLoss, Unavailable
from halfmoon.rpc.context import REQUEST_ID_KEY, bounded_deadline_s, request_id
from halfmoon.rpc.status import error_from

LONG_LIVED_S = 24 * 3600.0  # a stream that lives as long as its two ends; both reconnect when it expires

_KEEPALIVE_MS = 10_000
CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),  # a channel of its own is a connection of its own
)


class Peer:
    """Owns one channel to one address. Use as an async context manager, or `close` it."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Cancels what still runs on the channel and closes it."""
        await self.channel.close()

    async def call(self, method: Callable[..., Any], request: Any, *, deadline_s: float) -> Any:
        """One unary call. Raises what the peer raised, DeadlineExceeded, Unavailable or DataLoss."""
        with self._in_our_tree():
            return _parsed(await method(request, timeout=bounded_deadline_s(deadline_s), metadata=_metadata()))

    @asynccontextmanager
    async def stream(
        self, method: Callable[..., Any], request: Any, *, deadline_s: float
    ) -> AsyncIterator[AsyncIterator[Any]]:
        """A response stream; leaving the block cancels the call. `request` is a message, or an async iterator."""
        with self._in_our_tree():
            call = method(request, timeout=bounded_deadline_s(deadline_s), metadata=_metadata())
        try:
            yield self._responses(call)
        finally:
            call.cancel()

    def raw_stream(self, method: str, *, deadline_s: float) -> grpc.aio.StreamStreamCall:
        """A bidirectional call of raw bytes. Its owner cancels it."""
        with self._in_our_tree():
            return self.channel.stream_stream(method)(timeout=bounded_deadline_s(deadline_s), metadata=_metadata())

    async def _responses(self, call: Any) -> AsyncIterator[Any]:
        with self._in_our_tree():
            async for response in call:
                yield _parsed(response)

    @contextmanager
    def _in_our_tree(self) -> Iterator[None]:
        """What gRPC raises, as an error of our tree. A cancellation of the current task stays one."""
        try:
            yield
        except grpc.aio.AioRpcError as failure:
            raise error_from(failure) from failure
        except grpc.aio.UsageError as failure:  # the channel is closed
            raise Unavailable(f"the connection to {self.address} is closed") from failure
        except asyncio.CancelledError as failure:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # not us: the peer cancelled the call, the channel closed under it, or its request iterator failed
            raise Unavailable(f"the call to {self.address} was cancelled") from failure


def _parsed(response: Any) -> Any:
    """The response. Raises DataLoss for what grpc gives in place of a message that cannot be parsed."""
    if response is None:
        raise DataLoss("a message of the peer cannot be parsed")
    return response


def _metadata() -> tuple[tuple[str, str], ...]:
    return ((REQUEST_ID_KEY, request_id()),) if request_id() else ()
