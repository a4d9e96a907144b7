"""Faults of the network: partitions between two services, and lost packets.

All services of a system share the loopback device, so it gets one in a network namespace of its own, where nftables
drops packets. netem would be the kernel's own tool for loss; many kernels come without it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import time
from typing import Any

import psutil

from benchmarks.chaos_parts.fault import Act, Fault
from benchmarks.chaos_parts.system import System

_CUT_S = 15.0
_LOSS_PERCENT = 5
_TABLE = "halfmoon_chaos"
_AGAIN_S = 0.05  # new connections between the two are found and cut within this time


def missing() -> str | None:
    """Why there can be no network faults here, if so."""
    if os.geteuid() != 0:
        return "network namespaces take root"
    return None if shutil.which("nft") and shutil.which("unshare") else "nftables or unshare is not installed"


def cut(role: str, other: str) -> Act:
    """Drops every packet between a process of one role and one of another for 15 s."""

    async def act(system: System, here: Any) -> str:
        processes = system.processes()
        pair = (processes[role][0], processes[other][0])
        _nft(f"add table inet {_TABLE}")
        _nft(f"add set inet {_TABLE} cut {{ type inet_service . inet_service; }}")
        _nft(f"add chain inet {_TABLE} out {{ type filter hook output priority 0; }}")
        _nft(f"add rule inet {_TABLE} out tcp sport . tcp dport @cut drop")
        found: set[tuple[int, int]] = set()
        give_up_s = time.monotonic() + _CUT_S
        while time.monotonic() < give_up_s:
            if fresh := await asyncio.to_thread(_between, *pair) - found:
                found |= fresh
                _nft(f"add element inet {_TABLE} cut {{ {', '.join(f'{a} . {b}, {b} . {a}' for a, b in fresh)} }}")
            await asyncio.sleep(_AGAIN_S)
        _nft(f"delete table inet {_TABLE}")
        return f"{len(found)} connections cut"

    return act


def _between(first: psutil.Process, second: psutil.Process) -> set[tuple[int, int]]:
    """Port pairs of TCP connections between the two processes; none if one is gone."""
    try:
        pairs = [
            {(c.laddr.port, c.raddr.port) for c in process.net_connections("tcp") if c.raddr}
            for process in (first, second)
        ]
    except psutil.NoSuchProcess:
        return set()
    return {(here, there) for here, there in pairs[0] if (there, here) in pairs[1]}


async def lose_packets(system: System, here: Any) -> str:
    """Drops 5 % of all packets for 15 s, between services and to clients."""
    _nft(f"add table inet {_TABLE}")
    _nft(f"add chain inet {_TABLE} out {{ type filter hook output priority 0; }}")
    _nft(f"add rule inet {_TABLE} out meta l4proto tcp numgen random mod 100 < {_LOSS_PERCENT} drop")
    await asyncio.sleep(_CUT_S)
    _nft(f"delete table inet {_TABLE}")
    return ""


def _nft(command: str) -> None:
    subprocess.run(["nft", command], check=True)


def network_faults() -> list[Fault]:
    """All faults of the network, in the table's order."""
    pairs = (
        ("gateway", "decode"),
        ("gateway", "prefill"),
        ("prefill", "decode"),
        ("prefill", "kvstore"),
        ("gateway", "kvstore"),
    )
    partitions = [
        Fault(
            name=f"partition {role} - {other} for 15 s", act=cut(role, other), missing=missing, is_inside_namespace=True
        )
        for role, other in pairs
    ]
    loss = Fault(name="5 % of packets lost for 15 s", act=lose_packets, missing=missing, is_inside_namespace=True)
    return [*partitions, loss]
