"""KV transfers over a raw-bytes gRPC stream: one bidirectional call per transfer, on a channel of its own.

`kv.receiver` and `kv.sender` hold the law of the frames; `rpc.transport` says where payloads lie.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import grpc

from halfmoon.rpc.transport.receiving import KVIntake, next_message, parse_body
from halfmoon.rpc.transport.sending import TransferSender, transfer_to

__all__ = [
    "KV_TRANSFER",
    "PUSH",
    "KVIntake",
    "TransferSender",
    "next_message",
    "parse_body",
    "raw_service",
    "transfer_to",
]

KV_TRANSFER = "halfmoon.KVTransfer"
PUSH = "Push"

RawHandler = Callable[[AsyncIterator[bytes], grpc.aio.ServicerContext], AsyncIterator[bytes]]


def raw_service(service: str, handlers: dict[str, RawHandler]) -> Callable[[grpc.aio.Server], None]:
    """Adds bidirectional methods whose messages are bytes, without a serializer."""

    def add(server: grpc.aio.Server) -> None:
        methods = {name: grpc.stream_stream_rpc_method_handler(handler) for name, handler in handlers.items()}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, methods),))

    return add
