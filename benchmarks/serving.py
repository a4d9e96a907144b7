"""The same load on several OpenAI-compatible servers in turns, and the ratios between them.

    python -m benchmarks.serving ours=http://127.0.0.1:8000/demo theirs=http://127.0.0.1:9000/smollm2 --repeat 3

Each server is NAME=URL/MODEL. Every repeat runs every scenario on every server before the next repeat begins, so slow
drifts of the machine affect all alike. Figures are medians over the repeats; ratios are to the first server, and above
1 where the server is better. Prompts are random token ids, so no server's tokenizer counts; prefixes are shared only
where intended, and never with an earlier run. TBT is the wait between two messages; of its median, tokens that share a
message share its wait.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import aiohttp
import psutil

_VOCABULARY = range(1000, 30000)  # ordinary text in every common tokenizer with 32k ids or more
_TIMEOUT_S = 600
_SETTLE_S = 3.0  # pause between turns, at least: threads spin for a while, and blocks go to a store when nothing runs
_MOST_SETTLE_S = 15.0
_IDLE_CORES = 0.2


@dataclass(frozen=True, slots=True)
class Server:
    """One system under test."""

    name: str
    url: str
    model: str

    @classmethod
    def parse(cls, text: str) -> Server:
        """Parses NAME=URL/MODEL."""
        name, _, rest = text.partition("=")
        url, _, model = rest.rpartition("/")
        if not (name and url.startswith("http") and model):
            raise argparse.ArgumentTypeError(f"{text!r} is not NAME=URL/MODEL, such as ours=http://127.0.0.1:8000/demo")
        return cls(name, url, model)


@dataclass(frozen=True, slots=True)
class Sample:
    """One streamed request: seconds from sending to each token's arrival."""

    arrivals_s: Sequence[float]

    @property
    def ttft_s(self) -> float:
        """Time to first token."""
        return self.arrivals_s[0]

    @property
    def waits(self) -> list[tuple[float, int]]:
        """Seconds between messages, and how many tokens the second one has."""
        messages = sorted(Counter(self.arrivals_s).items())
        return [(after - before, num) for (before, _), (after, num) in pairwise(messages)]

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first."""
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / max(1, len(self.arrivals_s) - 1)


@dataclass(slots=True)
class Client:
    """Sends requests to one server."""

    server: Server
    session: aiohttp.ClientSession
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    sampling: Mapping[str, float] = field(default_factory=lambda: {"temperature": 0})  # fields of each request

    def prompt(self, num_tokens: int) -> list[int]:
        """Random token ids."""
        return self.rng.choices(_VOCABULARY, k=num_tokens)

    async def stream(self, prompt: list[int], num_output: int) -> Sample:
        """One request of exactly `num_output` tokens.

        llama.cpp streams no log-probabilities here. Its tokens are counted by its usage: it sends a chunk for each, but
        for those that end within a character, which count with the last one.
        """
        body = {
            "model": self.server.model,
            "prompt": prompt,
            "max_tokens": num_output,
            "min_tokens": num_output,
            "ignore_eos": True,
            "stream": True,
            "logprobs": 0,  # a token without text of its own then has a chunk too
            **self.sampling,
        }
        started_s = time.perf_counter()
        arrivals: list[float] = []
        has_logprobs = False
        async with self.session.post(f"{self.server.url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"{self.server.name} answered {response.status}: {await response.text()}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    choice = (event.get("choices") or [{}])[0]
                    logprobs = choice.get("logprobs")
                    has_logprobs |= bool(logprobs)
                    has_text = bool(choice.get("text"))
                    num_tokens = len(logprobs["tokens"]) if logprobs else int(has_text and not has_logprobs)
                    num_sent = (event.get("usage") or {}).get("completion_tokens", 0)
                    num_tokens = max(num_tokens, num_sent - len(arrivals))
                    arrivals += [time.perf_counter() - started_s] * num_tokens
        if len(arrivals) != num_output:
            raise RuntimeError(f"{self.server.name} sent {len(arrivals)} tokens where {num_output} were due")
        return Sample(arrivals)


Figures = dict[str, float]
Scenario = Callable[[Client], Awaitable[Figures]]


async def single(client: Client) -> Figures:
    """One request of 512 tokens in, 64 out, on an idle server."""
    sample = await client.stream(client.prompt(512), 64)
    return {"single ttft s": sample.ttft_s, "single tpot ms": 1000 * sample.tpot_s}


def at_once(num_requests: int) -> Scenario:
    """Requests of 512 tokens in, 64 out, sent at the same time."""

    async def scenario(client: Client) -> Figures:
        started_s = time.perf_counter()
        samples = await asyncio.gather(*(client.stream(client.prompt(512), 64) for _ in range(num_requests)))
        tokens_s = sum(len(sample.arrivals_s) for sample in samples) / (time.perf_counter() - started_s)
        return {f"{num_requests} at once tokens/s": tokens_s}

    return scenario


async def long_prompt(client: Client) -> Figures:
    """A prompt of 1,532 tokens twice; the second time its prefix is cached."""
    prompt = client.prompt(1532)
    cold = await client.stream(prompt, 8)
    again = await client.stream(prompt, 8)
    return {"1532 cold ttft s": cold.ttft_s, "1532 again ttft s": again.ttft_s}


def mixed(name: str, num_chats: int, chat_tokens: int, num_long: int, long_tokens: int, every_s: float) -> Scenario:
    """Open loop: chats (64 tokens out) arrive at random while a long prompt (8 out) arrives every few seconds.

    The slower the machine, the shorter the prompts that it keeps up with; the more chats decode at any time, the more
    of their tokens wait for a prompt.
    """

    async def scenario(client: Client) -> Figures:
        rng = random.Random(client.rng.random())

        async def later(at_s: float, num_prompt: int, num_output: int) -> Sample:
            await asyncio.sleep(at_s)
            return await client.stream(client.prompt(num_prompt), num_output)

        chats = [later(rng.uniform(0, 2 + num_long * every_s), chat_tokens, 64) for _ in range(num_chats)]
        long = [later(1 + every_s * index, long_tokens, 8) for index in range(num_long)]
        samples = await asyncio.gather(*chats, *long)
        waits = [wait for sample in samples[:num_chats] for wait in sample.waits]
        gaps = sorted(gap_s for gap_s, _ in waits)
        median_s = statistics.median(gap_s / num for gap_s, num in waits for _ in range(num))
        ttfts = sorted(sample.ttft_s for sample in samples[:num_chats])
        return {
            f"{name} chat ttft p50 s": statistics.median(ttfts),
            f"{name} chat ttft max s": ttfts[-1],
            f"{name} tbt p50 ms": 1000 * median_s,
            f"{name} tbt p95 ms": 1000 * gaps[int(0.95 * len(gaps))],
            f"{name} tbt p99 ms": 1000 * gaps[int(0.99 * len(gaps))],
            f"{name} tbt max ms": 1000 * gaps[-1],
        }

    return scenario


SCENARIOS: dict[str, Scenario] = {
    "single": single,
    "eight": at_once(8),
    "burst": at_once(24),
    "long": long_prompt,
    "mixed": mixed("mixed", 8, 128, 5, 1024, 2.0),
    "dense": mixed("dense", 12, 64, 6, 512, 3.0),
}


def drop_waiting_policy() -> None:
    """Lets what this process starts from now on wait for its threads as it does by itself.

    A shell may have `OMP_WAIT_POLICY=PASSIVE` for our workers: alone it costs llama.cpp up to two thirds of its rate.
    """
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        os.environ.pop(name, None)


async def _settle() -> None:
    """Waits until this machine is idle, so that no server's turn pays for the one before it."""
    began_s = time.monotonic()
    await asyncio.sleep(_SETTLE_S)
    psutil.cpu_percent(percpu=True)
    while time.monotonic() < began_s + _MOST_SETTLE_S:
        await asyncio.sleep(0.5)
        if sum(psutil.cpu_percent(percpu=True)) < 100 * _IDLE_CORES:
            return


async def measure(
    servers: Sequence[Server], names: Sequence[str], repeat: int, sampling: Mapping[str, float]
) -> dict[str, dict[str, list[float]]]:
    """All figures of all repeats: figure -> server -> values."""
    results: dict[str, dict[str, list[float]]] = {}
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # llama.cpp closes idle connections within seconds
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        seed = random.SystemRandom().getrandbits(32)  # new prompts in every run, the same for all servers
        clients = [Client(server, session, random.Random(seed), sampling) for server in servers]
        for client in clients:
            await client.stream(client.prompt(16), 4)  # warm
        for _ in range(repeat):
            for name in names:
                for client in clients:
                    await _settle()
                    for figure, value in (await SCENARIOS[name](client)).items():
                        results.setdefault(figure, {}).setdefault(client.server.name, []).append(value)
    return results


def table(results: dict[str, dict[str, list[float]]], servers: Sequence[Server]) -> str:
    """Table of medians, with each server's ratio to the first."""
    first = servers[0].name
    lines = [f"{'':24}" + "".join(f"{server.name:>16}" for server in servers)]
    for figure, by_server in results.items():
        medians = {name: statistics.median(values) for name, values in by_server.items()}
        higher_is_better = figure.endswith("/s")
        cells = []
        for server in servers:
            value = medians[server.name]
            ratio = value / medians[first] if higher_is_better else medians[first] / value
            cells.append(f"{value:9.3f} {'' if server.name == first else f'{ratio:.2f}x':>6}")
        lines.append(f"{figure:24}" + "".join(cells))
    return "\n".join(lines)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--sampling`."""
    parser.add_argument(
        "--sampling",
        type=json.loads,
        default={"temperature": 0},
        metavar="JSON",
        help='fields of every request, such as \'{"temperature": 1.0, "top_p": 0.95}\'; greedy if not given',
    )


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("servers", nargs="+", type=Server.parse, metavar="NAME=URL/MODEL")
    parser.add_argument("--scenarios", default=",".join(SCENARIOS), help=f"any of {', '.join(SCENARIOS)}")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="write every value here too")
    add_sampling(parser)
    arguments = parser.parse_args()
    names = arguments.scenarios.split(",")
    for name in names:
        if name not in SCENARIOS:
            parser.error(f"unknown scenario {name!r}; known: {', '.join(SCENARIOS)}")
    results = asyncio.run(measure(arguments.servers, names, arguments.repeat, arguments.sampling))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(results, file, indent=1)
    print(table(results, arguments.servers))


if __name__ == "__main__":
    main()
