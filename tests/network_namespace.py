"""A second host: a network namespace of this machine, joined to it by a link. Needs root and `ip`."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

HERE, THERE = "10.213.71.1", "10.213.71.2"


def run(command: str) -> str:
    """Its output. Raises CalledProcessError if it fails."""
    return subprocess.run(command.split(), check=True, capture_output=True, text=True).stdout


@contextmanager
def network_namespace(*, rate_mb: int | None = None) -> Iterator[str]:
    """Provides a namespace whose address is `THERE`, and this side's `HERE`. Skips the test where that cannot be.

    `rate_mb`: to which the kernel limits the way from there to here, in MB a second.
    """
    if os.geteuid() or not all(shutil.which(tool) for tool in ("ip", "tc")):
        pytest.skip("needs root, ip and tc")
    name, link = f"halfmoon-{os.getpid()}", f"hm{os.getpid()}"
    try:
        try:
            run(f"ip netns add {name}")
            run(f"ip link add {link} type veth peer name far netns {name}")
            run(f"ip addr add {HERE}/30 dev {link}")
            run(f"ip link set {link} up")
            run(f"ip -n {name} addr add {THERE}/30 dev far")
            run(f"ip -n {name} link set far up")
            run(f"ip -n {name} link set lo up")
            if rate_mb is not None:
                run(f"tc -n {name} qdisc add dev far root tbf rate {8 * rate_mb}mbit burst 64kb latency 200ms")
        except subprocess.CalledProcessError as err:
            pytest.skip(f"{err.cmd}: {err.stderr}")
        yield name
    finally:
        subprocess.run(["ip", "link", "del", link], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
