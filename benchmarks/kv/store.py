"""The store's paths side by side, each against a plain copy: into DRAM, out by RPC or in place, from the disk; and
digests of a block that could seal it.

    python -m benchmarks.kv.store --blocks 64 --repeat 5

Blocks have the demo model's layout (64 tokens, 1.4 MiB in bfloat16). Store and client share a process, so RPC figures
are a lower bound. Medians of rounds in which the paths take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import hmac
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path

import numpy as np
import xxhash
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from halfmoon.catalog.block_identity import block_id
from halfmoon.catalog.entry import Tier
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.rpc.server import running_server
from halfmoon.rpc.store.chain import Chain
from halfmoon.rpc.store.kvstore_client import KVStoreClient
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics
from halfmoon.rpc.transport.link import LinkSettings
from services.kvstore.assembly import Store, running_store
from services.kvstore.settings import KVStoreSettings
from services.kvstore.tiers.seal import Seal

LAYOUT = KVLayout(30, 3, 64, "bfloat16", 64)
RUN = 11  # blocks per call, as many as fit into a worker's 16 MiB
LIMIT_S = 60.0
KEY = bytes(range(32))
DIGESTS: dict[str, Callable[[memoryview], object]] = {
    "xxh3, without a key": xxhash.xxh3_64_intdigest,
    "BLAKE3, keyed": partial(Seal(KEY).digest, b""),
    "HMAC-SHA256": lambda block: hmac.digest(KEY, block, "sha256"),
    "BLAKE2b, keyed": lambda block: hashlib.blake2b(block, key=KEY, digest_size=32).digest(),
}


async def measure(num_blocks: int, num_rounds: int, directory: Path) -> dict[str, list[float]]:
    """Seconds of each path for all blocks, by round."""
    keys = [n.to_bytes(16, "big") for n in range(num_blocks)]
    data = np.random.default_rng(0).integers(0, 256, (num_blocks, LAYOUT.block_bytes), np.uint8)
    out = np.empty_like(data)
    budget = 3 * num_blocks * LAYOUT.block_bytes
    settings = KVStoreSettings(dram_bytes=budget, disk_dir=directory, disk_bytes=2 * budget)
    took: dict[str, list[float]] = {}
    async with (
        running_store(settings) as store,
        running_server("127.0.0.1:0", store.registrations, RpcMetrics(CollectorRegistry()), grace_s=0) as server,
    ):
        client = KVStoreClient(f"127.0.0.1:{server.port}")
        elsewhere = KVStoreClient(f"127.0.0.1:{server.port}", link_settings=LinkSettings(transports=()))

        async def copy() -> None:
            for n in range(num_blocks):
                np.copyto(out[n], data[n])

        async def put() -> None:
            await put_all(client)

        async def put_apart() -> None:
            await put_all(elsewhere)

        async def put_all(by: KVStoreClient) -> None:
            depth = 0
            while depth < num_blocks:
                run = slice(depth, min(depth + RUN, num_blocks))
                chain = Chain(keys[depth - 1] if depth else b"", depth)
                cells = [block.data for block in data[run]]
                depth += (await by.put_run(keys[run], LAYOUT, cells, chain, deadline_s=LIMIT_S)).num_held

        async def get() -> None:
            async with aclosing(client.get_run(keys, LAYOUT, deadline_s=LIMIT_S)) as blocks:
                n = 0
                async for cells in blocks:
                    out[n] = np.frombuffer(cells, np.uint8)
                    n += 1

        async def borrow() -> None:
            async with client.borrow(keys, deadline_s=LIMIT_S) as blocks:
                for n, block in enumerate(blocks):
                    out[n] = np.frombuffer(block.cells(), np.uint8)

        async def from_disk() -> None:
            await only_on_disk(store, keys)
            async with client.borrow(keys, deadline_s=LIMIT_S) as blocks:
                assert len(blocks) == num_blocks

        paths: dict[str, Callable[[], Awaitable[None]]] = {
            "a plain copy": copy,
            "put, shared memory": put,
            "put, gRPC": put_apart,
            "get, gRPC": get,
            "borrow, checked, copied out": borrow,
            "disk to DRAM (page cache)": from_disk,
            **{f"digest, {name}": partial(_digests, digest, data) for name, digest in DIGESTS.items()},
        }
        for _ in range(num_rounds + 1):  # the first round warms up
            for name, path in paths.items():
                await store.pool.settled()
                if name.startswith("put"):
                    await store.pool.drop(map(block_id, keys))  # blocks that are here are not put again
                started_s = time.perf_counter()
                await path()
                took.setdefault(name, []).append(time.perf_counter() - started_s)
                assert name.startswith(("put", "disk", "digest")) or np.array_equal(out, data)
        await client.close()
        await elsewhere.close()
    return {name: times[1:] for name, times in took.items()}


async def _digests(digest: Callable[[memoryview], object], data: NDArray[np.uint8]) -> None:
    for block in data:
        digest(block.data)


async def only_on_disk(store: Store, keys: Sequence[bytes]) -> None:
    """Drops the copies in DRAM."""
    for key in keys:
        store.pool.catalog.lose(block_id(key), Tier.DRAM)


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a line for each path."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        took = asyncio.run(measure(options.blocks, options.repeat, Path(directory)))
    num_bytes = options.blocks * LAYOUT.block_bytes
    plain_s = statistics.median(took["a plain copy"])
    print(f"{options.blocks} blocks of {LAYOUT.block_bytes / 2**20:.2f} MiB, {options.repeat} rounds")
    for name, times in took.items():
        median_s = statistics.median(times)
        print(
            f"{name:30}{num_bytes / median_s / 1e9:8.2f} GB/s{median_s / options.blocks * 1e3:9.2f} ms a block"
            f"{median_s / plain_s:8.1f}x the copy"
        )


if __name__ == "__main__":
    main()
