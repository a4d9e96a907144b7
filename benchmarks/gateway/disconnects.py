"""Clients that disconnect at a random moment: while sending, waiting or reading.

    python -m benchmarks.gateway.disconnects http://127.0.0.1:8000 --model demo --times 1000

does this on a running system and prints what is left on its workers.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import aiohttp

_AT_ONCE = 24
_IDLE_NAMES = ("num_running", "num_waiting", "num_reserved", "num_held")


class Case(NamedTuple):
    """A client's request, and how far it gets."""

    path: str
    body: bytes
    leaves: str  # "sending" or "waiting" or "reading"

    @property
    def name(self) -> str:
        """Name for counting."""
        return f"{self.path} {self.leaves}"


def random_case(rng: random.Random, model: str, num_tokens: int) -> Case:
    """A request to any endpoint, streamed or not, with one choice or several, constrained or not."""
    messages = [{"role": "user", "content": "w" * rng.randrange(1, 100)}]
    prompt: Any = rng.choice(["Once upon a time", ["one", "two", "three"], [3, 5, 7] * rng.randrange(1, 30)])
    common: dict[str, Any] = {"model": model, "max_tokens": rng.randrange(1, num_tokens), "stream": rng.random() < 0.6}
    several = {"n": rng.randrange(1, 4), "ignore_eos": True}
    response = {"model": model, "input": "tell", "stream": common["stream"], "max_output_tokens": common["max_tokens"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array", "items": {"type": "null"}}}}
    path, body = rng.choice(
        [
            ("/v1/chat/completions", {**common, **several, "messages": messages}),
            ("/v1/chat/completions", {**common, "messages": messages, "response_format": form}),
            ("/v1/completions", {**common, **several, "prompt": prompt, "logprobs": rng.randrange(3)}),
            ("/v1/completions", {**common, "prompt": "a", "structured_outputs": {"regex": "[ab]{3,}"}}),
            ("/v1/completions", {**common, "prompt": prompt, "stream": False, "best_of": 3, "ignore_eos": True}),
            ("/v1/completions", {**common, "prompt": prompt, "echo": True, "max_tokens": 0}),
            ("/v1/responses", {**response, "ignore_eos": True}),
            ("/tokenize", {"prompt": "x" * rng.randrange(10_000)}),
            ("/detokenize", {"tokens": [3, 5, 7]}),
        ]
    )
    return Case(path, json.dumps(body).encode(), rng.choice(["sending", "waiting", "reading", "reading"]))


async def send_and_leave(host: str, port: int, case: Case, rng: random.Random, most_s: float) -> None:
    """Disconnects within about `most_s` or, when reading, of the first byte; every other time by a reset."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        head = f"POST {case.path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(case.body)}\r\n\r\n".encode()
        whole = head + case.body
        until = rng.randrange(1, len(whole)) if case.leaves == "sending" else len(whole)
        writer.write(whole[:until])
        await writer.drain()
        with suppress(TimeoutError):
            if case.leaves == "reading":
                await asyncio.wait_for(reader.read(1), 5 * most_s)  # a whole answer takes its time
            async with asyncio.timeout(rng.random() * most_s):
                while await reader.read(1 << 16):
                    pass
    except ConnectionError:
        pass
    finally:
        if rng.random() < 0.5:
            writer.transport.abort()
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


async def disconnect(
    url: str, make_case: Callable[[random.Random], Case], times: int, most_s: float, seed: int = 0
) -> Counter[str]:
    """Runs many such clients, some concurrently; returns the number of each kind."""
    host, _, port = url.removeprefix("http://").partition(":")
    rng, places, kinds = random.Random(seed), asyncio.Semaphore(_AT_ONCE), Counter[str]()

    async def run_client(own: random.Random) -> None:
        async with places:
            case = make_case(own)
            kinds[case.name] += 1
            await send_and_leave(host, int(port), case, own, most_s)

    async with asyncio.TaskGroup() as clients:
        for _ in range(times):
            clients.create_task(run_client(random.Random(rng.random())))
    return kinds


async def _by_hand(url: str, model: str, times: int, num_tokens: int, most_s: float) -> None:
    async with aiohttp.ClientSession(url) as session:
        before = await _free_blocks(session)
        kinds = await disconnect(url, lambda rng: random_case(rng, model, num_tokens), times, most_s)
        for name, count in sorted(kinds.items()):
            print(f"{count:5} {name}")
        print(f"free blocks before: {before}")
        async with asyncio.timeout(60):
            while (after := await _free_blocks(session)) is None:  # noqa: ASYNC110 (nothing tells)
                await asyncio.sleep(0.2)
        print(f"free blocks after, nothing running: {after}")
        async with session.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        print("\n".join(line for line in lines if line.startswith("halfmoon_gateway_requests")))


async def _free_blocks(session: aiohttp.ClientSession) -> dict[str, int] | None:
    """Free blocks of every worker; None while something is running on one of them."""
    async with session.get("/halfmoon/v1/cluster") as response:
        workers = (await response.json())["workers"]
    if any(worker["load"][name] for worker in workers for name in _IDLE_NAMES):
        return None
    return {worker["worker_id"]: worker["load"]["free_blocks"] for worker in workers}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--times", type=int, default=1_000)
    parser.add_argument("--tokens", type=int, default=60, help="longest output")
    parser.add_argument("--seconds", type=float, default=1.0, help="longest time until a client leaves")
    options = parser.parse_args()
    asyncio.run(_by_hand(options.url.rstrip("/"), options.model, options.times, options.tokens, options.seconds))
