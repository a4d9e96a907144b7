"""TTFT of a long conversation's second turn after losing every cache in turn.

    python -m benchmarks.prefixes.second_turn [--tokens 4000] [--turn 48]

Runs a prefill worker with the demo model and a store as separate processes, as in `halfmoon up`, without a gateway. The
first turn is computed and its KV goes to the store. The second turn is the first one plus a few tokens. Cold: an
unknown prompt of equal length. Then: on the worker that kept its cache; after the worker was killed (kill -9) and
restarted (the blocks are in the store's memory); after both were killed (on its disk); and after both were killed and
the disk was wiped (in the cold tier, a folder through obstore). Ratios are to cold, in one run; the time is the
caller's, over gRPC.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

from benchmarks.prefixes.restoring_worker import killed_at_the_end, made_up
from halfmoon.engine.checkpoint.checkpoint import prepare_checkpoint
from halfmoon.pb import kvstore_pb2, prefill_pb2, prefill_pb2_grpc, types_pb2
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.store.kvstore_client import KVStoreClient

_SETTLE_S = 120.0
_PREFILL_S = 200.0
_NO_GATEWAY = "127.0.0.1:1"  # the worker retries it now and then


class FirstToken(NamedTuple):
    """The first token of one prompt, and how it was obtained."""

    ttft_s: float
    token_id: int
    num_loaded_tokens: int


class Worker:
    """A prefill worker as a gateway sees it."""

    _names = itertools.count()

    def __init__(self, peer: Peer, fingerprint: str) -> None:
        self._stub = prefill_pb2_grpc.PrefillStub(peer.channel)
        self._peer = peer
        self._fingerprint = fingerprint

    async def prefill(self, prompt: Sequence[int]) -> FirstToken:
        """Requests the first token of `prompt`."""
        sampling = types_pb2.SamplingParams(max_tokens=1, top_p=1, repetition_penalty=1, ignore_eos=True)
        generation = types_pb2.Generation(
            request_id=str(next(self._names)), model_fingerprint=self._fingerprint, prompt_token_ids=prompt,
            sampling=sampling, gateway_id="benchmark",
        )  # fmt: skip
        request = prefill_pb2.PrefillRequest(generation=generation, decode_address=_NO_GATEWAY)
        began_s = time.perf_counter()
        async with self._peer.stream(self._stub.Prefill, request, deadline_s=_PREFILL_S) as events:
            first = (await anext(events)).first_token
        return FirstToken(time.perf_counter() - began_s, first.token.token_id, first.num_loaded_tokens)


@asynccontextmanager
async def running_worker(store: str, fingerprint: str) -> AsyncIterator[Worker]:
    """Runs a worker process, killed at the end."""
    arguments = ("--gateway", _NO_GATEWAY, "--kv-store", store, "--calibrate", "never")
    async with killed_at_the_end("services.prefill", *arguments) as address, Peer(address) as peer:
        yield Worker(peer, fingerprint)


async def run(num_tokens: int, turn_tokens: int, directory: Path) -> None:
    """Prints the table."""
    first_turn = made_up(num_tokens, 1)
    second_turn = first_turn + made_up(turn_tokens, 2)
    disk, cold = directory / "disk", directory / "cold"
    cold.mkdir()
    tiers = ("--dram-bytes", "1GiB", "--disk-dir", str(disk), "--cold-url", f"file://{cold}")
    fingerprint = (await asyncio.to_thread(prepare_checkpoint, "demo")).fingerprint
    print(
        f"{num_tokens} tokens, then {turn_tokens} more\n{'second turn':28}{'TTFT s':>8}{'cold/this':>10}{'loaded':>8}"
    )
    async with killed_at_the_end("services.kvstore", *tiers) as store:
        async with running_worker(store, fingerprint) as worker:
            await worker.prefill(first_turn)
            await _until(store, lambda stats: stats.num_stored_total >= num_tokens // 64 and _is_copied_down(stats))
            cold_turn = await worker.prefill(made_up(len(second_turn), 3))
            kept = await worker.prefill(second_turn)
            _print("cold", cold_turn, cold_turn)
            _print("cache kept", kept, cold_turn)
        async with running_worker(store, fingerprint) as worker:
            _compare("worker killed", await worker.prefill(second_turn), kept, cold_turn)
    async with killed_at_the_end("services.kvstore", *tiers) as store, running_worker(store, fingerprint) as worker:
        _compare("worker and store killed", await worker.prefill(second_turn), kept, cold_turn)
    shutil.rmtree(disk)
    async with killed_at_the_end("services.kvstore", *tiers) as store, running_worker(store, fingerprint) as worker:
        await _until(store, _is_listed)
        _compare("and the disk wiped", await worker.prefill(second_turn), kept, cold_turn)


def _compare(name: str, first: FirstToken, kept: FirstToken, cold: FirstToken) -> None:
    _print(name, first, cold)
    if first.token_id != kept.token_id:
        print("  the token differs from the one with the cache kept")


def _print(name: str, first: FirstToken, cold: FirstToken) -> None:
    print(f"{name:28}{first.ttft_s:8.3f}{cold.ttft_s / first.ttft_s:10.1f}{first.num_loaded_tokens:8}", flush=True)


async def _until(store: str, condition: Callable[[kvstore_pb2.StatsResponse], bool]) -> None:
    client = KVStoreClient(store)
    async with asyncio.timeout(_SETTLE_S):
        while not condition(await client.stats(deadline_s=10)):  # noqa: ASYNC110 - another process has no event
            await asyncio.sleep(0.1)
    await client.close()


def _is_copied_down(stats: kvstore_pb2.StatsResponse) -> bool:
    return not any(tier.num_waiting for tier in stats.tiers)


def _is_listed(stats: kvstore_pb2.StatsResponse) -> bool:
    """Whether the store has listed the cold tier."""
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
