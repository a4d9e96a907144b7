"""KV over a link that the kernel itself makes slow, between two network namespaces. Needs root and `tc`'s tbf."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmoon.kv.kv_layout import KVLayout
from halfmoon.rpc.credentials.credential import credential_from, new_secret
from halfmoon.rpc.credentials.sources import environment_of
from tests.rpc.transport.conftest import ends

ROOT = Path(__file__).parents[3]
HERE, THERE = "10.213.71.1", "10.213.71.2"
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


def run(command: str) -> str:
    """Its output. Raises CalledProcessError if it fails."""
    return subprocess.run(command.split(), check=True, capture_output=True, text=True).stdout


@pytest.fixture
def namespace() -> Iterator[str]:
    """A network namespace, its way here limited to `RATE_MB`."""
    if os.geteuid() or not all(shutil.which(tool) for tool in ("ip", "tc")):
        pytest.skip("needs root, ip and tc")
    name, link = f"halfmoon-{os.getpid()}", f"hm{os.getpid()}"
    try:
        run(f"ip netns add {name}")
        run(f"ip link add {link} type veth peer name far netns {name}")
        run(f"ip addr add {HERE}/30 dev {link}")
        run(f"ip link set {link} up")
        run(f"ip -n {name} addr add {THERE}/30 dev far")
        run(f"ip -n {name} link set far up")
        run(f"tc -n {name} qdisc add dev far root tbf rate {8 * RATE_MB}mbit burst 64kb latency 200ms")
        yield name
    except subprocess.CalledProcessError as err:
        pytest.skip(f"{err.cmd}: {err.stderr}")
    finally:
        subprocess.run(["ip", "link", "del", link], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


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
