"""The time to the first token of a long conversation's second turn, after everything that can be lost was lost.

    python -m benchmarks.second_turn [--tokens 4000] [--turn 48]

The demo model in this process, the store in another. The first turn is computed, and its KV put into the store; the
second turn is the first one and a few more tokens. Cold: without a store. Then with a prefix cache that knows nothing,
as after the worker was started again (the blocks are in the store's memory), after the store was started again (on its
disk), and after its disk was wiped, too (in the cold tier: a folder through obstore). Also on a worker that kept its
cache. Ratios to cold, in one run; time to the first token is taken at the worker.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.restoring_worker import Restored, Worker, made_up, running_store, running_worker
from halfmoon.pb import kvstore_pb2
from halfmoon.rpc.kvstore_client import KVStoreClient

_SETTLE_S = 120.0


async def run(num_tokens: int, turn_tokens: int, directory: Path) -> None:
    """Prints the table."""
    first_turn = made_up(num_tokens, 1)
    second_turn = first_turn + made_up(turn_tokens, 2)
    disk, cold = directory / "disk", directory / "cold"
    cold.mkdir()
    tiers = ("--disk-dir", str(disk), "--cold-url", f"file://{cold}")
    print(
        f"{num_tokens} tokens, then {turn_tokens} more\n{'second turn':24}{'TTFT s':>8}{'cold/this':>10}{'loaded':>8}"
    )
    async with running_worker(len(second_turn)) as worker:
        async with running_store(*tiers) as store:
            await worker.fill(first_turn, store)
            await _until(store, _is_copied_down)
            kept = await worker.prefill(second_turn, None)
            cold_turn = await worker.restore(second_turn, store, None, "compute")
            _print("cold", cold_turn, cold_turn)
            _print("cache kept", kept, cold_turn)
            await _restored("worker restarted", worker, second_turn, store, cold_turn)
        async with running_store(*tiers) as store:
            await _restored("store restarted", worker, second_turn, store, cold_turn)
        shutil.rmtree(disk)
        async with running_store(*tiers) as store:
            await _until(store, _is_listed)
            await _restored("disk wiped", worker, second_turn, store, cold_turn)


async def _restored(name: str, worker: Worker, prompt: list[int], store: str, cold: Restored) -> None:
    restored = await worker.restore(prompt, store, None, "restore")
    _print(name, restored, cold)
    if restored.token_id != cold.token_id:
        print("  another token than cold")


def _print(name: str, one: Restored, cold: Restored) -> None:
    print(f"{name:24}{one.ttft_s:8.3f}{cold.ttft_s / one.ttft_s:10.1f}{one.num_loaded_tokens:8}", flush=True)


async def _until(store: str, condition: Callable[[kvstore_pb2.StatsResponse], bool]) -> None:
    client = KVStoreClient(store)
    async with asyncio.timeout(_SETTLE_S):
        while not condition(await client.stats(deadline_s=10)):  # noqa: ASYNC110 - another process has no event
            await asyncio.sleep(0.1)
    await client.close()


def _is_copied_down(stats: kvstore_pb2.StatsResponse) -> bool:
    return not any(tier.num_waiting for tier in stats.tiers)


def _is_listed(stats: kvstore_pb2.StatsResponse) -> bool:
    """Whether the store knows what the cold tier has."""
    return any(tier.num_blocks for tier in stats.tiers)


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--turn", type=int, default=48, help="tokens that the second turn adds")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(run(arguments.tokens, arguments.turn, Path(directory)))


if __name__ == "__main__":
    main()
