"""Time to restore a known prefix: computed, loaded, or both at once, over links of several speeds.

    python -m benchmarks.prefixes.restore [--tokens 4000] [--rates 10 50 200] [--repeat 3]

The demo model runs in this process, a store in another. Their link is limited to each rate in turn (MB/s), and to the
rate at which loading takes as long as computing did in this run. The three methods take turns, so that other load on
the machine affects all alike. Printed are medians; ratios are medians of each turn's ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import get_args

from benchmarks.prefixes.restoring_worker import Method, Restored, Worker, made_up, running_store, running_worker


async def run(num_tokens: int, rates_mbps: list[float], repeat: int) -> None:
    """Prints the table."""
    prompt = made_up(num_tokens, 1)
    async with running_store() as store, running_worker(num_tokens) as worker:
        layout = worker.engine.engine.layout
        filled = await worker.fill(prompt, store)
        megabytes = num_tokens // layout.block_tokens * layout.block_bytes / 1e6
        computed = await worker.restore(prompt, store, None, "compute")
        balance_mbps = megabytes / computed.ttft_s
        print(
            f"{num_tokens} tokens, {megabytes:.0f} MB, {layout.dtype}, median of {repeat}; ratio: better single / both"
        )
        print(f"{'MB/s':>6}{'compute s':>11}{'load s':>9}{'both s':>9}{'ratio':>7}{'loaded':>8}")
        for mbps in sorted([*rates_mbps, round(balance_mbps, 1)]):
            await _row(worker, prompt, store, mbps, repeat, filled)


async def _row(worker: Worker, prompt: list[int], store: str, mbps: float, repeat: int, filled: Restored) -> None:
    turns = []
    for _ in range(repeat):
        turn = {method: await worker.restore(prompt, store, mbps, method) for method in get_args(Method)}
        turns.append(turn)
        if {result.token_id for result in turn.values()} != {filled.token_id}:
            print(f"  different tokens: {turn}")
    compute_s, load_s, both_s = (
        statistics.median(turn[method].ttft_s for turn in turns) for method in get_args(Method)
    )
    ratio = statistics.median(
        min(turn["compute"].ttft_s, turn["load"].ttft_s) / turn["restore"].ttft_s for turn in turns
    )
    loaded = statistics.median(turn["restore"].num_loaded_tokens for turn in turns)
    print(f"{mbps:6.0f}{compute_s:11.2f}{load_s:9.2f}{both_s:9.2f}{ratio:7.2f}{loaded / len(prompt):8.0%}", flush=True)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rates", type=float, nargs="*", default=[10, 50, 200], help="MB/s")
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    asyncio.run(run(arguments.tokens, arguments.rates, arguments.repeat))


if __name__ == "__main__":
    main()
