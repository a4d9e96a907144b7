"""A service's life: start, health, ready, stop. Shutdown is one function, `RunningServer.stop`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, Literal

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer

from halfmoon.errors import InvalidRequest
from halfmoon.rpc.addresses.towards import ALL_ADDRESSES
from halfmoon.rpc.credentials.access import OPEN_ACCESS, CallAccess
from halfmoon.rpc.credentials.listeners import check_listener
from halfmoon.rpc.event_loop import ServiceLoop
from halfmoon.rpc.interceptor import ServiceInterceptor
from halfmoon.rpc.peer import KEEPALIVE_OPTIONS
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics
from halfmoon.rpc.telemetry.spans import NO_TRACER, Tracer
from halfmoon.rpc.tls.server_credentials import server_credentials

SUPERVISED_ENV = "HALFMOON_SUPERVISED"  # set by `halfmoon up`: the end of stdin means that the parent is gone

_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a taken port raises an error instead of sharing connections at random
    *KEEPALIVE_OPTIONS,
)


MAX_MESSAGE_BYTES = 4 << 20  # gRPC's default limit for received messages


class RunningServer:
    """Owns a started gRPC server and its health service."""

    def __init__(self, server: grpc.aio.Server, health: HealthServicer, port: int) -> None:
        self._server = server
        self._health = health
        self.port = port

    async def set_serving(self) -> None:
        """Makes the health service answer SERVING from now on."""
        await self._health.set("", health_pb2.HealthCheckResponse.SERVING)

    async def stop(self, grace_s: float) -> None:
        """Sets health to NOT_SERVING, refuses new calls, cancels running ones after `grace_s` seconds. Idempotent."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


@asynccontextmanager
async def running_server(
    listen: str,
    add_services: Sequence[Callable[[grpc.aio.Server], None]],
    metrics: RpcMetrics,
    grace_s: float = 2.0,
    tracer: Tracer = NO_TRACER,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    access: CallAccess = OPEN_ACCESS,
) -> AsyncIterator[RunningServer]:
    """A server on `listen` (host:port, port 0 picks one). Not yet SERVING: call `set_serving` once the rest is up.

    `access` checks every call; with a certificate only TLS is spoken. Raises InvalidRequest if the address cannot be
    bound, or is open to strangers.
    """
    check_listener(listen, access.credential)
    options = (*_OPTIONS, ("grpc.max_receive_message_length", max_message_bytes))
    server = grpc.aio.server(interceptors=[ServiceInterceptor(metrics, tracer, access)], options=options)
    health = HealthServicer()
    await health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    for add in add_services:
        add(server)
    try:
        port = _opened(server, listen, access, metrics)
    except RuntimeError as err:
        raise InvalidRequest(f"cannot listen on {listen}: is the port taken?", param="listen") from err
    await server.start()
    running = RunningServer(server, health, port)
    try:
        yield running
    finally:
        await running.stop(grace_s)


def _opened(server: grpc.aio.Server, listen: str, access: CallAccess, metrics: RpcMetrics) -> int:
    port: int
    tls = None if access.credential is None or listen.startswith("unix:") else access.credential.tls
    if tls is None:
        port = server.add_insecure_port(listen)
    else:
        port = server.add_secure_port(listen, server_credentials(tls))
        metrics.certificate_expires.set_function(lambda: tls.current.expires_s)
    return port


def advertised_address(listen: str, port: int, advertise: str | None) -> str:
    """Address at which others reach a service on `listen`: `advertise` if set, else the listening address itself."""
    if advertise:
        return advertise
    host = listen.rpartition(":")[0]
    return f"{'127.0.0.1' if host in ALL_ADDRESSES else host}:{port}"


StopReason = Literal["signal", "orphaned"]


async def until_told_to_stop() -> StopReason:
    """Returns at SIGTERM, SIGINT or, under a supervisor, when the supervisor is gone ("orphaned")."""
    stop = asyncio.Event()
    reasons: list[StopReason] = []
    loop = asyncio.get_running_loop()

    def told(reason: StopReason) -> None:
        reasons.append(reason)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told, "signal")
    if os.environ.get(SUPERVISED_ENV):
        loop.add_reader(sys.stdin.fileno(), _on_stdin, loop, told)
    await stop.wait()
    return reasons[0]


async def until_told_to_drain() -> None:
    """Returns at SIGUSR1: finish what was accepted, however long that takes, then end. SIGTERM may still hurry it."""
    drain = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, drain.set)
    await drain.wait()


def _on_stdin(loop: asyncio.AbstractEventLoop, told: Callable[[StopReason], None]) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        loop.remove_reader(sys.stdin.fileno())
        told("orphaned")


def run_service(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Runs a service's main coroutine to its end, on uvloop if installed."""
    with asyncio.Runner(loop_factory=ServiceLoop) as runner:
        runner.run(main())
