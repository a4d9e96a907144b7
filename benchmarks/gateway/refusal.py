"""Cost of refusing a request in the gateway: from the parsed headers of an HTTP request to its 429.

    python -m benchmarks.gateway.refusal [--requests 100] [--workers 8]

A gateway with the demo model's tokenizer, and workers that are only members. For prompts of several lengths, each sent
once, it prints the whole time in the gateway (from the ledger) of three kinds of refusals: *early*, where no prompt at
all could meet the class's target; *cold*, where only a cached prefix could meet it and nobody holds this one's;
*shared*, where a worker holds the system prompt of 1,000 words before it. Then it prints the cost of a prompt that a
worker holds to its last block, so that it has to be admitted: from its body to its placement, *first* before the
gateway saw any of it, *again* after that, and the part spent on its prefix. The last column is the client's round trip
of a cold one, with HTTP on both sides. Medians in milliseconds and, for shared machines, 10th percentiles.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import NamedTuple

import aiohttp
import numpy as np

from halfmoon.kv.keys import block_keys, root_key
from halfmoon.pb.gateway_pb2 import LatencyProfile, WorkerIdentity
from halfmoon.pb.types_pb2 import DECODE, PREFILL, KVLayout
from halfmoon.policy.admission.qos_classes import Caller
from halfmoon.policy.view.block_index import BlockEvents, short_keys
from services.gateway.__main__ import load_model
from services.gateway.openai.endpoint_bodies import generation_request_of, read_body
from services.gateway.openai.served_model import ServedModel
from services.gateway.request import GatewayRequest
from services.gateway.routing.early_rejection import EarlyRejection
from services.gateway.routing.prompt_prefix import prompt_prefix_of
from services.gateway.routing.request_routing import RequestRouting
from services.gateway.service import RunningGateway, running_gateway
from services.gateway.settings import GatewaySettings

_SENTENCE = "the gateway predicts how long first token of this prompt would take on every worker and then refuses it"
_REFUSED = 429
_LENGTHS = (64, 512, 4_096, 32_768)  # words
_SYSTEM_WORDS = 1_000
_CONTEXT_TOKENS = 65_536  # independent of the demo model, since nothing is computed
_TARGETS_S = {"early": 1e-6, "cold": 0.05, "shared": 0.05}  # one token takes 11 ms, the shortest prompt 0.1 s
_CACHED_TARGET_S = 0.1  # the rest of a prompt, a block at most, takes 74 ms
_ENDPOINT = "chat.completions"


@dataclass(frozen=True, slots=True)
class Bench:
    """One gateway, used by one client."""

    gateway: RunningGateway
    model: ServedModel
    same_model: ServedModel  # to tokenize what the gateway has not seen yet
    session: aiohttp.ClientSession
    versions: itertools.count[int]  # versions of the class

    async def set_target(self, ttft_s: float) -> None:
        """Sets the default class's TTFT target."""
        body = {"ttft_s": ttft_s, "version": next(self.versions)}
        async with self.session.put(f"{self.gateway.http}/halfmoon/v1/classes/default", json=body) as response:
            response.raise_for_status()

    def hold(self, body: bytes) -> None:
        """Makes the first worker hold this prompt's blocks and no others."""
        membership = self.gateway.cluster.membership
        layout, member = membership.kv_layouts[0], membership.members()[0]
        root = root_key(membership.model_fingerprint, layout)
        keys = block_keys(root, _prompt_of(body, self.same_model), layout.block_tokens)
        membership.index.apply(member.holder, BlockEvents(1, short_keys(keys), is_snapshot=True))

    async def refused(self, bodies: Sequence[bytes]) -> list[float]:
        """Seconds that each refused request took its client."""
        round_trips_s = []
        for body in bodies:
            began_s = time.perf_counter()
            async with self.session.post(f"{self.gateway.http}/v1/chat/completions", data=body) as response:
                await response.read()
            if response.status == _REFUSED:  # one every ten seconds is admitted as a probe
                round_trips_s.append(time.perf_counter() - began_s)
        return round_trips_s

    async def in_gateway(self, num_requests: int) -> list[float]:
        """Seconds in the gateway of the latest requests."""
        await asyncio.sleep(0.5)  # rows are written in the background
        async with self.session.get(f"{self.gateway.http}/halfmoon/v1/requests?limit={num_requests}") as response:
            rows = await response.json()
        return [row["e2e_s"] for row in rows if row["http_status"] == _REFUSED]

    def admitted(self, raw: bytes) -> Admitting:
        """Times one request from its body to its placement. Raises Refused."""
        early_rejection = EarlyRejection(self.gateway.routing)
        began_s = time.perf_counter()
        body = read_body(_ENDPOINT, raw, self.model, _CONTEXT_TOKENS).body
        qos = self.gateway.routing.admission.classes.of(Caller({}))
        request = GatewayRequest(
            "r", _ENDPOINT, datetime.now(UTC), self.gateway.cluster.clock(), qos=qos, has_gaps=True
        )
        early_rejection.reject_early(request)
        unread_s = time.perf_counter()
        early_rejection.reject_by_prefix(request, partial(prompt_prefix_of, body, self.model, b""))
        begun_s = time.perf_counter()
        request.begin_outputs(generation_request_of(body, self.model, _CONTEXT_TOKENS, b""), self.model)
        with closing(RequestRouting(self.gateway.routing, request.outputs[0])) as routing:
            routing.place(())
        return Admitting(time.perf_counter() - began_s, begun_s - unread_s)


class Admitting(NamedTuple):
    """Seconds of an admission, and of its prefix step."""

    all_s: float
    prefix_s: float


def main() -> None:
    """Prints one line per length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--workers", type=int, default=8, help="workers of each phase")
    asyncio.run(_run(parser.parse_args()))


async def _run(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as state_dir:
        settings = GatewaySettings(port=0, state_dir=Path(state_dir), heartbeat_interval_s=1e6, slo="off")
        model, same_model = (replace(load_model(settings), context_tokens=_CONTEXT_TOKENS) for _ in range(2))
        async with running_gateway(settings, model) as gateway, aiohttp.ClientSession() as session:
            _join(gateway, model, args.workers)
            columns = (*_TARGETS_S, "cached, first", "of that prefix", "cached, again", "of that prefix", "round, cold")
            print(f"{'tokens':>7} {' '.join(f'{column:>15}' for column in columns)}")
            bench = Bench(gateway, model, same_model, session, itertools.count())
            for num_words in _LENGTHS:
                await _measure(bench, num_words, args.requests)


def _join(gateway: RunningGateway, model: ServedModel, num_workers: int) -> None:
    membership = gateway.cluster.membership
    layout = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16", block_tokens=64)
    profile = LatencyProfile(kind="k", prefill=(0.01, 1e-3, 1e-8), step=(0.02, 1e-3, 1e-6))
    for number in range(2 * num_workers):
        identity = WorkerIdentity(
            worker_id=f"w{number}",
            role=PREFILL if number < num_workers else DECODE,
            address="nowhere:1",
            model_fingerprint=model.fingerprint,
            layout=layout,
            context_tokens=_CONTEXT_TOKENS,
            total_blocks=2_000,
            profile=profile,
        )
        membership.set_listening(membership.join(identity, gateway.cluster.clock()), True)


async def _measure(bench: Bench, num_words: int, num_requests: int) -> None:
    inside_s, round_trips_s = {}, {}
    for kind, target_s in _TARGETS_S.items():
        await bench.set_target(target_s)
        system = _text("system", _SYSTEM_WORDS) if kind == "shared" else None
        if system is not None:
            bench.hold(_body(bench.model, "something else", system))
        bodies = [_body(bench.model, _text(f"{kind} {number}", num_words), system) for number in range(num_requests)]
        round_trips_s[kind] = await bench.refused(bodies)
        inside_s[kind] = await bench.in_gateway(num_requests)
    await bench.set_target(_CACHED_TARGET_S)
    first, again = [], []
    for number in range(min(num_requests, 20)):
        body = _body(bench.model, _text(f"cached {number}", num_words))
        bench.hold(body)
        first.append(bench.admitted(body))
        again.append(bench.admitted(body))
    columns = (*inside_s.values(), *zip(*first, strict=True), *zip(*again, strict=True), round_trips_s["cold"])
    print(f"{len(_prompt_of(body, bench.same_model)):7} {' '.join(map(_shown_ms, columns))}", flush=True)


def _text(name: str, num_words: int) -> str:
    """A text that differs from all others from its first word on."""
    return f"{name} {' '.join(random.Random(name).choices(_SENTENCE.split(), k=num_words))}"


def _body(model: ServedModel, text: str, system: str | None = None) -> bytes:
    messages = [{"role": "user", "content": text}]
    before = [] if system is None else [{"role": "system", "content": system}]
    return json.dumps({"model": model.name, "messages": before + messages, "max_tokens": 100}).encode()


def _prompt_of(raw: bytes, model: ServedModel) -> tuple[int, ...]:
    body = read_body(_ENDPOINT, raw, model, _CONTEXT_TOKENS).body
    return generation_request_of(body, model, _CONTEXT_TOKENS, b"").prompts[0]


def _shown_ms(seconds: Sequence[float]) -> str:
    low, median = (1e3 * np.quantile(seconds, quantile) for quantile in (0.1, 0.5))
    return f"{median:8.2f} ({low:4.2f})"


if __name__ == "__main__":
    main()
