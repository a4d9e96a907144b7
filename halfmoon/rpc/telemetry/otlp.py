"""Spans recorded with OpenTelemetry's SDK and exported by OTLP over gRPC. Imported only if tracing is enabled.

A thread exports from a bounded queue: a slow or absent receiver costs spans, never a request. Sampling, limits and the
queue are the SDK's, configured by OpenTelemetry's environment variables.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import halfmoon
from halfmoon.rpc.context import REQUEST_ID_KEY
from halfmoon.rpc.telemetry.spans import NO_ATTRIBUTES, NO_SPAN, Attributes, Span, Tracer

_GOODBYE_S = 1.0  # to export what is left when the process ends
_MAX_STATE_CHARS = 512  # of a client's tracestate: the minimum in W3C's recommendation; every call and span carries it
_W3C = TraceContextTextMapPropagator()


@contextmanager
def exporting_tracer(service: str, endpoint: str | None) -> Iterator[Tracer]:
    """A tracer that exports its spans to `endpoint`; None: the environment's.

    At the end, remaining spans are exported within a second, or lost.
    """
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)  # an absent receiver costs a line per batch, not per try
    resource = Resource.create(
        {
            "service.namespace": "halfmoon",
            "service.name": os.environ.get("OTEL_SERVICE_NAME") or f"halfmoon-{service}",
            "service.version": halfmoon.__version__,
            "service.instance.id": uuid.uuid4().hex,
        }
    )
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
    try:
        yield _OtlpTracer(provider.get_tracer("halfmoon", halfmoon.__version__))
    finally:
        ending = threading.Thread(target=provider.shutdown, daemon=True)  # it waits for an absent receiver
        ending.start()
        ending.join(_GOODBYE_S)


class _OtlpTracer:
    """Begins spans. Owns nothing."""

    def __init__(self, tracer: trace.Tracer) -> None:
        self._tracer = tracer

    def request(self, name: str, headers: Mapping[str, str], start_s: float, attributes: Attributes) -> Span:
        parent = _W3C.extract(_bounded(headers))
        start_ns = _unix_ns(start_s)
        return _OtlpSpan(
            self._tracer, self._tracer.start_span(name, parent, SpanKind.SERVER, attributes, start_time=start_ns)
        )

    def call(self, method: str, headers: Mapping[str, str]) -> Span:
        if "traceparent" not in headers:
            return NO_SPAN
        name = method.removeprefix("/")
        attributes = {"rpc.system.name": "grpc", "rpc.method": name}
        if REQUEST_ID_KEY in headers:
            attributes["halfmoon.request_id"] = headers[REQUEST_ID_KEY]
        return _OtlpSpan(
            self._tracer, self._tracer.start_span(name, _W3C.extract(headers), SpanKind.SERVER, attributes)
        )


class _OtlpSpan:
    """Owns one span of the SDK."""

    def __init__(self, tracer: trace.Tracer, span: trace.Span) -> None:
        self._tracer = tracer
        self._span = span
        self._context = trace.set_span_in_context(span)
        self._has_ended = False
        self.is_recording = span.is_recording()

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        carrier: dict[str, str] = {}
        _W3C.inject(carrier, self._context)
        return tuple(carrier.items())

    def child(self, name: str, start_s: float | None = None, attributes: Attributes = NO_ATTRIBUTES) -> Span:
        if not self.is_recording:
            return self
        start_ns = None if start_s is None else _unix_ns(start_s)
        return _OtlpSpan(
            self._tracer, self._tracer.start_span(name, self._context, attributes=attributes, start_time=start_ns)
        )

    def event(self, name: str, at_s: float) -> None:
        self._span.add_event(name, timestamp=_unix_ns(at_s))

    def end(self, end_s: float | None = None, error: str | None = None, attributes: Attributes = NO_ATTRIBUTES) -> None:
        if self._has_ended or not self.is_recording:
            return
        self._has_ended = True
        self._span.set_attributes(attributes)
        if error is not None:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(None if end_s is None else _unix_ns(end_s))


def _bounded(headers: Mapping[str, str]) -> dict[str, str]:
    """A client's trace context, without a tracestate that is too long: gRPC limits the metadata of a call."""
    context = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
    return {name: value for name, value in context.items() if len(value) <= _MAX_STATE_CHARS}


def _unix_ns(at_s: float) -> int:
    """Converts a moment of `time.monotonic()` to the clock that all hosts share."""
    return time.time_ns() - int((time.monotonic() - at_s) * 1e9)
