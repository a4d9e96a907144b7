"""KV over a link that the kernel itself makes slow, between two network namespaces. Needs root and `tc`'s tbf."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmoon.kv.kv_layout import KVLayout
from halfmoon.rpc.credentials.credential import credential_from, new_secret
from halfmoon.rpc.credentials.sources import environment_of
from tests.network_namespace import HERE, network_namespace
from tests.rpc.transport.conftest import ends

ROOT = Path(__file__).parents[3]
RATE_MB = 20
NUM_LAYERS = 8  # of 1 MiB
SENDER = """
import asyncio, json, sys
from halfmoon.kv.frame import KVRange
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.rpc.credentials.sources import own_credential
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.transfer import transfer_to
from halfmoon.rpc.transport.link import KVLink

async def main():
    declined = []
    layout = KVLayout(int(sys.argv[2]), 1, 64, "float32", 64)
    link = KVLink(Peer(sys.argv[1], own_credential("worker"), "worker"), None, declined.append)
    async with transfer_to(link, layout, deadline_s=60) as transfer:
        await transfer.open(KVRange(0, layout.num_layers, 0, 1, 0, 2048), b"across")
        for layer in range(layout.num_layers):
            await transfer.data(KVRange(layer, layer + 1, 0, 1, 0, 2048), bytes([layer]) * (1 << 20))
        await transfer.commit(b"")
    estimate = link.estimator.estimate
    print(json.dumps([transfer.transport, declined, estimate.bandwidth_bytes_per_s]))
    await link.close()

asyncio.run(main())
"""


@pytest.fixture
def namespace() -> Iterator[str]:
    """A network namespace, its way here limited to `RATE_MB`."""
    with network_namespace(rate_mb=RATE_MB) as name:
        yield name


async def test_a_slow_network_between_two_namespaces(namespace: str) -> None:
    credential = credential_from(new_secret(), "worker")
    async with ends(host=HERE, credential=credential) as it:
        it.sink.layout = KVLayout(NUM_LAYERS, 1, 64, "float32", 64)
        command = ("ip", "netns", "exec", namespace, sys.executable, "-c", SENDER)
        env = {**os.environ, "PYTHONPATH": str(ROOT), **environment_of(credential)}
        sender = await asyncio.create_subprocess_exec(
            *command, it.link.peer.address, str(NUM_LAYERS), stdout=PIPE, env=env
        )
        output, _ = await sender.communicate()
        transport, declined, bandwidth_bytes_per_s = json.loads(output)
    assert (transport, declined) == ("grpc", ["shm"])
    assert it.sink.arrived[b"across"] == {layer: bytes([layer]) * (1 << 20) for layer in range(NUM_LAYERS)}
    assert bandwidth_bytes_per_s < 1.2 * RATE_MB * 1e6  # the kernel lets no more through, however fast we are
