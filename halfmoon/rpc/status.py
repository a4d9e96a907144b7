"""Errors of our tree to gRPC statuses and back. The class travels in a trailer, so both ends raise the same one."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc

from halfmoon import errors
from halfmoon.errors import HalfmoonError

_CLASS_KEY = "halfmoon-error"
_PARAM_KEY = "halfmoon-param"
_RETRY_KEY = "retry-after-ms"
_MOST_DIGITS = 9

_BY_STATUS: dict[grpc.StatusCode, type[HalfmoonError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidRequest,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.PERMISSION_DENIED: errors.Forbidden,
    grpc.StatusCode.NOT_FOUND: errors.NotFound,
    grpc.StatusCode.ALREADY_EXISTS: errors.AlreadyHere,
    grpc.StatusCode.DATA_LOSS: errors.DataLoss,
    grpc.StatusCode.FAILED_PRECONDITION: errors.Incompatible,
    grpc.StatusCode.UNIMPLEMENTED: errors.Incompatible,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.NoCapacity,
    grpc.StatusCode.UNAVAILABLE: errors.Unavailable,
    grpc.StatusCode.CANCELLED: errors.Unavailable,  # ours would be a CancelledError; this is the peer's doing
    grpc.StatusCode.ABORTED: errors.Cancelled,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlineExceeded,
}


def status_of(error: HalfmoonError) -> grpc.StatusCode:
    """The gRPC status that carries `error`."""
    return grpc.StatusCode[error.grpc_status]


def trailers_of(error: HalfmoonError) -> tuple[tuple[str, str], ...]:
    """Trailing metadata from which `error_from` restores the error."""
    trailers = [(_CLASS_KEY, type(error).__name__)]
    if error.param is not None:
        trailers.append((_PARAM_KEY, error.param))
    if error.retry_after_ms is not None:
        trailers.append((_RETRY_KEY, str(error.retry_after_ms)))
    return tuple(trailers)


def is_from_service(failure: grpc.Call) -> bool:
    """Whether one of our services failed the call, rather than gRPC, which found no peer or lost the connection."""
    return any(key == _CLASS_KEY for key, _ in failure.trailing_metadata() or ())


def error_from(failure: grpc.aio.AioRpcError) -> HalfmoonError:
    """The error behind a failed call."""
    trailers = {key: value for key, value in failure.trailing_metadata() or () if isinstance(value, str)}
    # Without our trailer the error is gRPC's own, even with status INTERNAL: a connection broke.
    by_status = _BY_STATUS.get(failure.code(), errors.Unavailable)
    cls = errors.error_classes().get(trailers.get(_CLASS_KEY, ""), by_status)
    message = failure.details() or failure.code().name
    fields: dict[str, Any] = {"param": trailers.get(_PARAM_KEY), "retry_after_ms": _milliseconds(trailers)}
    try:
        return cls(message, **fields)
    except TypeError:  # a class that only this service raises, and makes in another way
        return by_status(message, **fields)


def _milliseconds(trailers: Mapping[str, str]) -> int | None:
    """When to come back, as far as the peer says so in a way that can be read."""
    given = trailers.get(_RETRY_KEY, "")
    return int(given) if given.isascii() and given.isdigit() and len(given) <= _MOST_DIGITS else None


@contextmanager
def in_our_tree(peer: str) -> Iterator[None]:
    """Converts what gRPC raises inside, in a call to the address `peer`, to an error of our tree.

    A cancellation of the current task stays one.
    """
    try:
        yield
    except grpc.aio.AioRpcError as failure:
        raise error_from(failure) from failure
    except grpc.aio.UsageError as failure:  # the channel is closed
        raise errors.Unavailable(f"the connection to {peer} is closed") from failure
    except asyncio.CancelledError as failure:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        # not ours: the peer cancelled the call, the channel closed under it, or its request iterator failed
        raise errors.Unavailable(f"the call to {peer} was cancelled") from failure
