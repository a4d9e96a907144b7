"""What refusing a request costs the gateway: from the parsed headers of an HTTP request to its 429.

    python -m benchmarks.refusal [--requests 300] [--workers 8]

A gateway with the demo model's tokenizer, and workers that are members and nothing else, whose speed rules out the only
class's target. For prompts of several lengths: the whole time in the gateway (as the ledger has it), what of that is
reading the body and tokenizing, what judging (hashing the blocks, predicting, choosing) takes, and the client's round
trip, whose HTTP costs both sides. Medians in milliseconds and, for machines that others use, 10th percentiles.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import aiohttp
import numpy as np

from halfmoon.pb.gateway_pb2 import LatencyProfile, WorkerIdentity
from halfmoon.pb.types_pb2 import DECODE, PREFILL, KVLayout
from halfmoon.policy.admission import Refused
from halfmoon.policy.classes import Caller
from services.gateway.__main__ import load_model
from services.gateway.attempt import RelayRequest
from services.gateway.intake import Intake, take_in_chat
from services.gateway.progress import Progress
from services.gateway.served_model import ServedModel
from services.gateway.service import RunningGateway, running_gateway
from services.gateway.settings import GatewaySettings

_WORDS = "the gateway predicts how long the first token of this prompt would take on every worker and then refuses it "
_REFUSED = 429
_LENGTHS = (64, 512, 4_096)  # tokens, about


def main() -> None:
    """Prints one line a length."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--workers", type=int, default=8, help="of each half")
    asyncio.run(_run(parser.parse_args()))


async def _run(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as state_dir:
        settings = GatewaySettings(port=0, state_dir=Path(state_dir), heartbeat_interval_s=1e6)
        model = load_model(settings)
        async with running_gateway(settings, model) as gateway, aiohttp.ClientSession() as session:
            _join(gateway, model, args.workers)
            url = f"{gateway.http}/halfmoon/v1/classes/default"
            async with session.put(url, json={"ttft_s": 1e-6}) as response:
                response.raise_for_status()
            print(f"{'tokens':>7} {'gateway':>15} {'tokenizing':>15} {'judging':>15} {'round trip':>15}")
            for num_tokens in _LENGTHS:
                await _measure(session, gateway, model, num_tokens, args.requests)


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
            context_tokens=8_192,
            total_blocks=1_000,
            profile=profile,
        )
        membership.set_listening(membership.join(identity, gateway.cluster.clock()), True)


async def _measure(
    session: aiohttp.ClientSession, gateway: RunningGateway, model: ServedModel, num_tokens: int, num_requests: int
) -> None:
    text = _WORDS * (num_tokens // 20)
    messages = [{"role": "user", "content": text}]
    body = json.dumps({"model": model.name, "messages": messages, "max_tokens": 100}).encode()
    round_trips_s, tokenizing_s, judging_s = [], [], []
    for _ in range(num_requests):
        began_s = time.perf_counter()
        async with session.post(f"{gateway.http}/v1/chat/completions", data=body) as response:
            await response.read()
        if response.status == _REFUSED:  # one every ten seconds is let in, to see whether it is right to refuse
            round_trips_s.append(time.perf_counter() - began_s)
        began_s = time.perf_counter()
        intake = take_in_chat(body, model, 8_192)
        tokenizing_s.append(time.perf_counter() - began_s)
        judging_s.append(_judge(gateway, intake))
    await asyncio.sleep(0.5)  # rows are written behind the requests
    url = f"{gateway.http}/halfmoon/v1/requests?limit={num_requests}"
    async with session.get(url) as response:
        rows = await response.json()
    inside_s = [row["e2e_s"] for row in rows if row["http_status"] == _REFUSED]
    columns = map(_shown_ms, (inside_s, tokenizing_s, judging_s, round_trips_s))
    print(f"{len(intake.prompts[0]):7} {' '.join(columns)}")


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
