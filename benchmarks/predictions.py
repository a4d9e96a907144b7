"""Errors of the gateway's predictions under a steady load.

    python -m benchmarks.predictions [--seconds 60] [--rate 0.8] [--prefill 1] [--decode 1]
    python -m benchmarks.predictions --url http://127.0.0.1:8000 --json errors.json
    python -m benchmarks.predictions --up '--engine sim --sim-profile llama2-70b-8xa800' --prompt 512 4096 --rate 1

Starts `halfmoon up` (or uses the one at `--url`) and sends prompts of random tokens at Poisson times. Prompt lengths
are log-uniform within `--prompt`, outputs within `--output`; a share `--repeat` of the prompts begins with half of an
earlier one. The first `--settle` seconds are not counted. Errors are predicted over measured, from the ledger's rows
(for steps, from the gateway's view of its workers): the median absolute error, the mean absolute error (MAPE), and the
signed mean (bias, above 0 where too much was predicted).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import shlex
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.live_system import running_system

_VOCABULARY = range(1000, 30000)
_MAX_ROWS = 1_000
_PARTS = {
    "TTFT": ("predicted_ttft_s", "ttft_s"),
    "queue + prefill": ("predicted_ttft_s", "worker_s"),
    "prefill": ("predicted_prefill_s", "prefill_s"),
    "TBT": ("predicted_tbt_s", "mean_tbt_s"),
}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", help="URL of a running gateway; default: start one")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--settle", type=float, default=15, help="seconds not counted at the start")
    parser.add_argument("--rate", type=float, default=0.8, help="requests a second")
    parser.add_argument("--prompt", type=int, nargs=2, default=(64, 1024), metavar=("LEAST", "MOST"))
    parser.add_argument("--output", type=int, nargs=2, default=(16, 64), metavar=("LEAST", "MOST"))
    parser.add_argument("--repeat", type=float, default=0.0, help="share of prompts that begin like an earlier one")
    parser.add_argument("--stream", action="store_true", help="stream the answers")
    parser.add_argument("--prefill", type=int, default=1)
    parser.add_argument("--decode", type=int, default=1)
    parser.add_argument("--up", default="", help="further arguments of `halfmoon up`, such as '--engine sim'")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write every row here")
    asyncio.run(_run(parser.parse_args()))


async def _run(args: argparse.Namespace) -> None:
    async with _gateway(args) as url, aiohttp.ClientSession() as session:
        rows = await _drive(session, url, args)
        async with session.get(f"{url}/halfmoon/v1/cluster") as response:
            workers = (await response.json())["workers"]
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "workers": workers}))
    _print(rows, workers)


@asynccontextmanager
async def _gateway(args: argparse.Namespace) -> AsyncIterator[str]:
    """Yields the URL of the running gateway, or of one started for the benchmark."""
    if args.url:
        yield args.url
        return
    with tempfile.TemporaryDirectory() as state_dir:
        shape = ("--prefill", str(args.prefill), "--decode", str(args.decode), *shlex.split(args.up))
        async with running_system(shape, Path(state_dir)) as url:
            yield url


async def _drive(session: aiohttp.ClientSession, url: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Sends the load; returns the ledger's rows of requests sent after settling."""
    rng = random.Random(args.seed)
    async with session.get(f"{url}/v1/models") as response:
        model = (await response.json())["data"][0]["id"]
    began_s = time.monotonic()
    counted: set[str] = set()
    earlier: list[list[int]] = []
    async with asyncio.TaskGroup() as tasks:
        due_s, number = 0.0, 0
        while (due_s := due_s + rng.expovariate(args.rate)) < args.seconds:
            await asyncio.sleep(max(0.0, began_s + due_s - time.monotonic()))
            name = f"p{args.seed}-{number}-{random.getrandbits(32):08x}"
            number += 1
            prompt = rng.choices(_VOCABULARY, k=_log_uniform(rng, *args.prompt))
            if earlier and rng.random() < args.repeat:
                known = rng.choice(earlier)
                prompt[: len(known) // 2] = known[: len(known) // 2]
            earlier.append(prompt)
            body = {"model": model, "prompt": prompt, "max_tokens": rng.randint(*args.output), "stream": args.stream}
            tasks.create_task(_complete(session, url, name, {**body, "ignore_eos": True}))
            if due_s >= args.settle:
                counted.add(name)
    await asyncio.sleep(0.5)  # rows are written in the background
    async with session.get(f"{url}/halfmoon/v1/requests?limit={_MAX_ROWS}") as response:
        recorded = await response.json()
    return [{**row, "worker_s": _sum(row, "queue_s", "prefill_s")} for row in recorded if row["request_id"] in counted]


async def _complete(session: aiohttp.ClientSession, url: str, name: str, body: dict[str, Any]) -> None:
    async with session.post(f"{url}/v1/completions", json=body, headers={"X-Request-Id": name}) as response:
        await response.read()


def _log_uniform(rng: random.Random, least: int, most: int) -> int:
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))


def _sum(row: dict[str, Any], *names: str) -> float | None:
    values = [row[name] for name in names]
    return None if None in values else sum(values)


def _print(rows: Sequence[dict[str, Any]], workers: Iterable[dict[str, Any]]) -> None:
    print(f"{len(rows)} requests, {sum(row['status'] == 'ok' for row in rows)} of them good")
    print(f"{'':16} {'num':>5} {'median error':>13} {'MAPE':>7} {'bias':>7} {'measured p50':>13}")
    for name, (predicted, measured) in _PARTS.items():
        pairs = [(row[predicted], row[measured]) for row in rows if row[predicted] and row[measured]]
        if pairs:
            before, after = np.array(pairs).T
            errors = before / after - 1
            figures = (np.median(np.abs(errors)), np.abs(errors).mean(), errors.mean())
            _print_line(name, len(pairs), figures, f"{1000 * np.median(after):10.1f} ms")
    for worker in workers:
        for kind, errors in worker["prediction_errors"].items():
            if errors["num"]:
                figures = (errors["median_absolute"], errors["mean_absolute"], errors["bias"])
                _print_line(f"{kind} at {worker['worker_id'][:9]}", errors["num"], figures, "")


def _print_line(name: str, num: int, figures: Sequence[float], measured: str) -> None:
    median, mean, bias = (f"{100 * figure:.1f} %" for figure in figures)
    print(f"{name:20} {num:5} {median:>9} {mean:>9} {bias:>9} {measured:>13}")


if __name__ == "__main__":
    main()
