"""A real OTLP receiver (gRPC), which keeps the spans that it is sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status


@dataclass(frozen=True)
class Received:
    """One span, and whose it is."""

    service: str
    span: Span

    @property
    def name(self) -> str:
        return self.span.name

    @property
    def error(self) -> str | None:
        """What its status says, where that is an error."""
        return self.span.status.message if self.span.status.code == Status.STATUS_CODE_ERROR else None

    @property
    def attributes(self) -> Mapping[str, Any]:
        return {one.key: getattr(one.value, str(one.value.WhichOneof("value"))) for one in self.span.attributes}


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Owns what came."""

    def __init__(self) -> None:
        self.url = ""
        self.spans: list[Received] = []
        self.gate: asyncio.Event | None = None  # nobody is answered before it opens
        self.has_been_called = asyncio.Event()
        self._came = asyncio.Event()

    async def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Any
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        self.has_been_called.set()
        if self.gate is not None:
            await self.gate.wait()
        for resource in request.resource_spans:
            named = {one.key: one.value.string_value for one in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [Received(named["service.name"], span) for span in scope.spans]
        self._came.set()
        return trace_service_pb2.ExportTraceServiceResponse()

    async def until(self, is_there: Callable[[list[Received]], bool]) -> list[Received]:
        """The spans, once they are as wanted."""
        while not is_there(self.spans):
            self._came.clear()
            await self._came.wait()
        return list(self.spans)


@asynccontextmanager
async def running_receiver() -> AsyncIterator[Receiver]:
    """A receiver on a free port."""
    server = grpc.aio.server()
    receiver = Receiver()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)  # type: ignore[no-untyped-call]
    receiver.url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield receiver
    finally:
        await server.stop(None)


def detached(spans: list[Received], root: bytes) -> list[str]:
    """Names of the spans whose parent is neither among them nor `root`."""
    known = {one.span.span_id for one in spans} | {root}
    return [one.name for one in spans if one.span.parent_span_id not in known]
