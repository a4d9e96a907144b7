"""What refusing a request costs the gateway: from the parsed headers of an HTTP request to its 429.

    python -m benchmarks.refusal [--requests 300] [--workers 8]

A gateway with the demo model's tokenizer, and workers that are members and nothing else. For prompts of several
lengths, the whole time in the gateway (as the ledger has it) of two kinds of refusals: *unread*, where no prompt at all
could meet the class's target, and *read*, where the prompt is needed to know. Then the parts of the second one:
reading the body, tokenizing, judging (hashing the blocks, predicting, choosing). The last column is the client's round
trip of an unread one, whose HTTP costs both sides. Medians in milliseconds and, for machines that others use, 10th
percentiles.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import aiohttp
import numpy as np

from halfmoon.pb.gateway_pb2 import LatencyProfile, WorkerIdentity
from halfmoon.pb.types_pb2 import DECODE, PREFILL, KVLayout
from halfmoon.policy.admission import Refused
from halfmoon.policy.classes import Caller
from services.gateway.__main__ import load_model
from services.gateway.attempt import RelayRequest
from services.gateway.bodies import AnyBody, intake_of, read_body
from services.gateway.intake import Intake
from services.gateway.progress import Progress
from services.gateway.served_model import ServedModel
from services.gateway.service import RunningGateway, running_gateway
from services.gateway.settings import GatewaySettings

_WORDS = "the gateway predicts how long the first token of this prompt would take on every worker and then refuses it "
_REFUSED = 429
_LENGTHS = (64, 512, 4_096, 32_768)  # tokens, about
_CONTEXT_TOKENS = 65_536  # whatever the demo model's is: nothing is computed
_TARGETS_S = {"unread": 1e-6, "read": 0.05}  # one token takes 11 ms, the shortest prompt 0.1 s


def main() -> None:
    """Prints one line a length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--workers", type=int, default=8, help="of each half")
    asyncio.run(_run(parser.parse_args()))


async def _run(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as state_dir:
        settings = GatewaySettings(port=0, state_dir=Path(state_dir), heartbeat_interval_s=1e6)
        model = replace(load_model(settings), context_tokens=_CONTEXT_TOKENS)
        async with running_gateway(settings, model) as gateway, aiohttp.ClientSession() as session:
            _join(gateway, model, args.workers)
            columns = ("unread", "read", "body", "tokenizing", "judging", "round, unread")
            print(f"{'tokens':>7} {' '.join(f'{one:>15}' for one in columns)}")
            for version, num_tokens in enumerate(_LENGTHS):
                await _measure(session, gateway, model, num_tokens, args.requests, 2 * version)


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


async def _measure(
    session: aiohttp.ClientSession,
    gateway: RunningGateway,
    model: ServedModel,
    num_tokens: int,
    num_requests: int,
    version: int,
) -> None:
    messages = [{"role": "user", "content": _WORDS * (num_tokens // 20)}]
    raw = json.dumps({"model": model.name, "messages": messages, "max_tokens": 100}).encode()
    inside_s, round_trips_s = {}, {}
    for offset, (kind, target_s) in enumerate(_TARGETS_S.items()):
        body = {"ttft_s": target_s, "version": version + offset}
        async with session.put(f"{gateway.http}/halfmoon/v1/classes/default", json=body) as response:
            response.raise_for_status()
        round_trips_s[kind] = await _refused(session, gateway, raw, num_requests)
        inside_s[kind] = await _in_gateway(session, gateway, num_requests)
    parts_s = _parts(gateway, model, raw, num_requests)
    columns = (inside_s["unread"], inside_s["read"], *zip(*parts_s, strict=True), round_trips_s["unread"])
    num_prompt = len(intake_of(_read(raw, model), model, _CONTEXT_TOKENS).prompts[0])
    print(f"{num_prompt:7} {' '.join(map(_shown_ms, columns))}", flush=True)


async def _refused(
    session: aiohttp.ClientSession, gateway: RunningGateway, raw: bytes, num_requests: int
) -> list[float]:
    """Seconds that each refused request took its client."""
    round_trips_s = []
    for _ in range(num_requests):
        began_s = time.perf_counter()
        async with session.post(f"{gateway.http}/v1/chat/completions", data=raw) as response:
            await response.read()
        if response.status == _REFUSED:  # one every ten seconds is let in, to see whether it is right to refuse
            round_trips_s.append(time.perf_counter() - began_s)
    return round_trips_s


async def _in_gateway(session: aiohttp.ClientSession, gateway: RunningGateway, num_requests: int) -> list[float]:
    """Seconds of the latest requests there."""
    await asyncio.sleep(0.5)  # rows are written behind the requests
    async with session.get(f"{gateway.http}/halfmoon/v1/requests?limit={num_requests}") as response:
        rows = await response.json()
    return [row["e2e_s"] for row in rows if row["http_status"] == _REFUSED]


def _parts(gateway: RunningGateway, model: ServedModel, raw: bytes, num_requests: int) -> list[tuple[float, ...]]:
    """Seconds to read the body, to tokenize, and to judge."""
    found = []
    for _ in range(num_requests):
        moments_s = [time.perf_counter()]
        body = _read(raw, model)
        moments_s.append(time.perf_counter())
        intake = intake_of(body, model, _CONTEXT_TOKENS)
        moments_s.append(time.perf_counter())
        found.append((*np.diff(moments_s), _judge(gateway, intake)))
    return found


def _read(raw: bytes, model: ServedModel) -> AnyBody:
    return read_body("chat.completions", raw, model, _CONTEXT_TOKENS)


def _judge(gateway: RunningGateway, intake: Intake) -> float:
    """Seconds from a request to its refusal."""
    qos = gateway.judge.gatekeeper.classes.of(Caller({}))
    request = RelayRequest("r", intake.prompts[0], intake.sampling, qos=qos)
    began_s = time.perf_counter()
    with gateway.judge.case(request, Progress(gateway.cluster.clock())) as case, suppress(Refused):
        case.place(())
    return time.perf_counter() - began_s


def _shown_ms(seconds: Sequence[float]) -> str:
    low, median = (1e3 * np.quantile(seconds, quantile) for quantile in (0.1, 0.5))
    return f"{median:8.2f} ({low:4.2f})"


if __name__ == "__main__":
    main()
