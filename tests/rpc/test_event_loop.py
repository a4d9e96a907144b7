"""A loop with long rounds takes what gRPC has for it."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor

import grpc

from halfmoon.rpc.event_loop import ServiceLoop

NUM_CALLS = 1_000


def _echo(request: bytes, context: grpc.ServicerContext) -> bytes:
    return request


def _work() -> None:
    """What others do in a round of the loop."""
    time.sleep(0.005)


async def _rounds_for_calls(port: int) -> int:
    """Makes calls at once, and counts the rounds of the loop, each of 5 ms, until all are answered."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        await channel.channel_ready()
        calls = asyncio.gather(*(channel.unary_unary("/test.Echo/Echo")(b"x") for _ in range(NUM_CALLS)))
        num_rounds = 0
        while not calls.done():
            num_rounds += 1
            _work()
            await asyncio.sleep(0)
        assert await calls == [b"x"] * NUM_CALLS
        return num_rounds


def test_a_round_of_the_loop_takes_many_events_of_grpc() -> None:
    """Each call has several, and a few hundred fit the socket that wakes the loop."""
    server = grpc.server(ThreadPoolExecutor(4))
    handler = grpc.unary_unary_rpc_method_handler(_echo)
    server.add_registered_method_handlers("test.Echo", {"Echo": handler})
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", {"Echo": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with asyncio.Runner(loop_factory=ServiceLoop) as runner:
            num_rounds = runner.run(_rounds_for_calls(port))
    finally:
        server.stop(None)
    assert num_rounds < NUM_CALLS / 2
