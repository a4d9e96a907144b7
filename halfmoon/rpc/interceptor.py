"""The one server interceptor: who may call, errors to statuses, request ids and deadlines to context, metrics, spans.

Handlers are coroutines (one response) or async generators (a stream of responses); they raise our errors and never call
`context.abort`. The text of an unknown exception stays in the log.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from halfmoon.errors import HalfmoonError, InvalidRequest, Unavailable
from halfmoon.rpc.context import REQUEST_ID_KEY, request_scope
from halfmoon.rpc.credentials.access import OPEN_ACCESS, CallAccess
from halfmoon.rpc.credentials.refusals import RefusalLog
from halfmoon.rpc.status import status_of, trailers_of
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics
from halfmoon.rpc.telemetry.spans import NO_TRACER, Tracer, span_scope

log = logging.getLogger(__name__)

_NO_FAILURES = (grpc.StatusCode.OK, grpc.StatusCode.CANCELLED)  # for spans: a client that has what it wants may hang up


class ServiceInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Wraps every handler of a server, and answers in its place those calls that `access` refuses."""

    def __init__(self, metrics: RpcMetrics, tracer: Tracer = NO_TRACER, access: CallAccess = OPEN_ACCESS) -> None:
        self._metrics = metrics
        self._tracer = tracer
        self._access = access
        self._refusals = RefusalLog()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        """The method's handler, guarded; None (UNIMPLEMENTED) passes through, but not for strangers."""
        refusal = self._access.refusal(handler_call_details.method, handler_call_details.invocation_metadata or ())
        if refusal is not None:
            self._metrics.refused.labels(refusal.grpc_status).inc()
            return _refusing(refusal, self._refusals)
        handler = await continuation(handler_call_details)
        if handler is None:
            return handler
        return _guarded(handler, handler_call_details.method, self._metrics, self._tracer, self._check_certificate)

    def _check_certificate(self, method: str, context: grpc.aio.ServicerContext) -> None:
        """Raises the refusal of a caller whose certificate is not of a role that may call this."""
        metadata = context.invocation_metadata() or ()
        refusal = self._access.certificate_refusal(method, metadata, context.auth_context)
        if refusal is not None:
            self._metrics.refused.labels(refusal.grpc_status).inc()
            self._refusals.note(refusal, context.peer())
            raise refusal


def _guarded(
    handler: Any,
    method: str,
    metrics: RpcMetrics,
    tracer: Tracer,
    check: Callable[[str, grpc.aio.ServicerContext], None],
) -> Any:
    kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    behaviour = getattr(handler, kind)
    parse = handler.request_deserializer and partial(_parsed, handler.request_deserializer)

    def message(request: Any) -> Any:
        """The argument of the method. A single message comes as bytes, so that it is parsed after the check."""
        return request if handler.request_streaming or parse is None else parse(request)

    async def unary(request: Any, context: grpc.aio.ServicerContext) -> Any:
        with _scope(method, context, metrics, tracer) as outcome:
            try:
                check(method, context)
                return await behaviour(message(request), context)
            except BaseException as err:
                error = _domain_error(err, method)
                outcome.status = status_of(error)
        return await _abort(context, error)

    async def streaming(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        with _scope(method, context, metrics, tracer) as outcome:
            try:
                check(method, context)
                async with aclosing(behaviour(message(request), context)) as responses:
                    async for response in responses:
                        yield response
                return
            except BaseException as err:
                error = _domain_error(err, method)
                outcome.status = status_of(error)
        await _abort(context, error)

    make = getattr(grpc, f"{kind}_rpc_method_handler")
    wrapped = streaming if handler.response_streaming else unary
    return make(wrapped, parse if handler.request_streaming else None, handler.response_serializer)


def _parsed(deserialize: Callable[[bytes], Any], message: bytes) -> Any:
    try:
        return deserialize(message)
    except DecodeError as error:
        raise InvalidRequest("the message of this call is damaged, or of another method") from error


def _refusing(error: HalfmoonError, refusals: RefusalLog) -> Any:
    """A handler that ends the call before a message of it is read or parsed, whatever the method's kind."""

    async def refuse(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        refusals.note(error, context.peer())
        await _abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


class _Outcome:
    """The outcome of a call, for the metrics; a call cancelled from outside stays CANCELLED."""

    def __init__(self) -> None:
        self.status = grpc.StatusCode.CANCELLED


@contextmanager
def _scope(method: str, context: grpc.aio.ServicerContext, metrics: RpcMetrics, tracer: Tracer) -> Iterator[_Outcome]:
    metadata = dict(context.invocation_metadata() or ())
    outcome, started_s = _Outcome(), time.monotonic()
    span = tracer.call(method, metadata)
    metrics.in_flight.labels(method).inc()
    try:
        with request_scope(str(metadata.get(REQUEST_ID_KEY, "")), context.time_remaining()), span_scope(span):
            yield outcome
            if outcome.status is grpc.StatusCode.CANCELLED:
                outcome.status = grpc.StatusCode.OK
    finally:
        metrics.in_flight.labels(method).dec()
        metrics.handled.labels(method, outcome.status.name).inc()
        metrics.seconds.labels(method).observe(time.monotonic() - started_s)
        error = None if outcome.status in _NO_FAILURES else outcome.status.name
        span.end(error=error, attributes={"rpc.response.status_code": outcome.status.name})


def _domain_error(err: BaseException, method: str) -> HalfmoonError:
    """Re-raises `err` if it cancels this very call; otherwise returns the error to answer with."""
    if isinstance(err, HalfmoonError):
        return err
    task = asyncio.current_task()
    if isinstance(err, GeneratorExit) or (isinstance(err, asyncio.CancelledError) and task and task.cancelling()):
        raise err
    if isinstance(err, asyncio.CancelledError):  # from inside: otherwise the client would hang until its deadline
        return Unavailable("the work behind this call was cancelled")
    if isinstance(err, BaseExceptionGroup):
        ours, _ = err.split(HalfmoonError)
        if ours is not None:
            return _first(ours)
    if not isinstance(err, Exception):
        raise err
    log.error("rpc.failed", exc_info=err, extra={"method": method})
    return HalfmoonError("internal error: see the log of the service that answered")


def _first(group: BaseExceptionGroup[HalfmoonError]) -> HalfmoonError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, HalfmoonError)
    return error


async def _abort(context: grpc.aio.ServicerContext, error: HalfmoonError) -> None:
    await context.abort(status_of(error), error.message, trailers_of(error))
