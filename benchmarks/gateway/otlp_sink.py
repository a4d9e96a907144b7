"""An OTLP receiver that discards its input unread: `python -m benchmarks.gateway.otlp_sink`."""

from __future__ import annotations

import asyncio
import logging

import grpc

from halfmoon.rpc.telemetry.logs import configure_logs

log = logging.getLogger(__name__)

_SERVICE = "opentelemetry.proto.collector.trace.v1.TraceService"


async def _export(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    return b""  # an empty ExportTraceServiceResponse


async def serve() -> None:
    """Runs until killed."""
    server = grpc.aio.server()
    methods = {"Export": grpc.unary_unary_rpc_method_handler(_export)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    log.info("service.ready", extra={"address": f"http://127.0.0.1:{port}"})
    await server.wait_for_termination()


if __name__ == "__main__":
    configure_logs("otlp_sink")
    asyncio.run(serve())
