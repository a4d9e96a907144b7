"""Running answers move from one decode worker to another: pauses in steps, bytes, and whether a text changes.

python -m benchmarks.moves                           one prefill and two decode workers, six streams, three drains
python -m benchmarks.moves --streams 2 --drains 5
python -m benchmarks.moves --vllm PYTHON             over vLLM, which PYTHON has
python -m benchmarks.moves --simulated               steps take their time without computing: what calls cost
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from benchmarks.chaos_parts.fault import SIMULATED, VLLM_STARTS_S, vllm_arguments
from benchmarks.chaos_parts.system import System, running_system

_WORKERS = ("--prefill", "1", "--decode", "2", "--kv-memory", "256MiB", "--dram-bytes", "128MiB")
_TEXT = "The moon rose over the quiet harbour, and the fishermen counted their boats before the tide. "
_BEFORE_S = 2.0  # streams run for so long before the drain
_TOKENS = 400


async def answer(http: aiohttp.ClientSession, number: int) -> str:
    """One greedy answer; every second one has a long prompt."""
    prompt = f"{number} {_TEXT * (1 + 11 * (number % 2))}"
    body = {"model": "demo", "prompt": prompt, "max_tokens": _TOKENS, "temperature": 0, "ignore_eos": True}
    body["seed"] = number  # simulated workers always draw
    async with http.post("/v1/completions", json=body) as response:
        response.raise_for_status()
        return str((await response.json())["choices"][0]["text"])


async def drained_once(system: System, http: aiohttp.ClientSession, num_streams: int) -> list[str]:
    """The texts of some streams, while the decode worker that has most of them drains and returns."""
    streams = [asyncio.create_task(answer(http, number)) for number in range(num_streams)]
    await asyncio.sleep(_BEFORE_S)
    decodes = [worker for worker in await system.workers() if worker["role"] == "decode"]
    busiest = max(decodes, key=lambda worker: worker["load"]["num_running"])
    path = f"/halfmoon/v1/workers/{busiest['worker_id']}/drain"
    async with http.post(path, json={"returns": True}) as response:
        response.raise_for_status()
    texts = [*await asyncio.gather(*streams)]
    await system.until_whole(120.0)
    return texts


def report(lines: Sequence[dict[str, Any]], num_texts: int, num_changed: int) -> str:
    """The figures of all moves, as a Markdown table."""
    moved = [line for line in lines if line.get("event") == "request.moved"]
    moving = [line for line in lines if line.get("event") == "request.moving"]
    retried = [line["reason"] for line in lines if line.get("event") == "request.retried"]
    steps = sorted(pause_s / line["usual_s"] for line in moved for pause_s in line["pauses_s"])
    pauses_ms = sorted(1000 * pause_s for line in moved for pause_s in line["pauses_s"])
    usual_ms = median(1000 * line["usual_s"] for line in moved) if moved else float("nan")
    parts_ms = [
        [1000 * one for one in part]
        for line in moved
        for part in zip(line["pauses_s"], line["queues_s"], line["computes_s"], strict=False)
    ]
    bytes_each = median(line["kv_bytes"] for line in moving) if moving else 0
    rows = {
        "answers; moves": f"{num_texts}; {len(moving)}",
        "changed; tried again": f"{num_changed}; {len(retried)} {', '.join(sorted({*retried}))}",
        "gap at a move, ms: median, most": f"{median(pauses_ms):.0f}, {pauses_ms[-1]:.0f}" if pauses_ms else "-",
        "of it the new worker's queue, its step, all else, ms: medians": (
            f"{median(queue for _, queue, _ in parts_ms):.0f}, {median(step for *_, step in parts_ms):.0f}, "
            f"{median(gap - queue - step for gap, queue, step in parts_ms):.0f}"
            if parts_ms
            else "-"
        ),
        "usual gap, ms": f"{usual_ms:.0f}",
        "gap at a move, in usual gaps: median, 90 %, most": (
            f"{median(steps):.2f}, {steps[int(0.9 * (len(steps) - 1))]:.2f}, {steps[-1]:.2f}" if steps else "-"
        ),
        "tokens computed again at a move: median": f"{median(line['tail_tokens'] for line in moving) if moving else 0}",
        "KV loaded ahead, MB a move: median": f"{bytes_each / 1e6:.1f}",
    }
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])


async def run(num_streams: int, num_drains: int, engine: Sequence[str]) -> str:
    """Runs all drains on one system. `engine`: options of `halfmoon up`."""
    arguments = (*_WORKERS, *engine)
    with tempfile.TemporaryDirectory(prefix="halfmoon-moves-") as folder:
        async with running_system(arguments, Path(folder) / "state", 3, {}, VLLM_STARTS_S) as system:
            timeout = aiohttp.ClientTimeout(total=600)
            async with aiohttp.ClientSession(system.url, timeout=timeout) as http:
                undisturbed = [*await asyncio.gather(*(answer(http, number) for number in range(num_streams)))]
                since, changed = system.log_sizes(), 0
                for _ in range(num_drains):
                    texts = await drained_once(system, http, num_streams)
                    changed += sum(text != whole for text, whole in zip(texts, undisturbed, strict=True))
                lines = [json.loads(line) for line in system.log_lines(since) if line.startswith("{")]
    return report(lines, num_streams * num_drains, changed)


def main() -> None:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=6)
    parser.add_argument("--drains", type=int, default=3)
    engine = parser.add_mutually_exclusive_group()
    engine.add_argument("--simulated", action="store_true")
    engine.add_argument("--vllm", type=Path, metavar="PYTHON", help="workers compute with this interpreter's vLLM")
    options = parser.parse_args()
    chosen = SIMULATED if options.simulated else ("--dtype", "float32")
    chosen = chosen if options.vllm is None else (*chosen, *vllm_arguments(options.vllm.absolute()))
    print(asyncio.run(run(options.streams, options.drains, chosen)))


if __name__ == "__main__":
    main()
