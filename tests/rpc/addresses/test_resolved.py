"""Addresses that names stand for."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from halfmoon.rpc.addresses.resolved import resolved

V4, V6 = socket.AF_INET, socket.AF_INET6


@pytest.mark.parametrize("address", ["10.0.0.1:7000", "[fe80::1]:7000", "unix:/run/gateway", "unix:/run/x:7", "name"])
async def test_what_is_no_name_with_a_port_is_itself(address: str) -> None:
    assert await resolved(address) == {address}


@pytest.mark.parametrize(
    ("ips", "expected"),
    [
        ([(V4, "10.0.0.1"), (V4, "10.0.0.2"), (V4, "10.0.0.1")], {"10.0.0.1:7", "10.0.0.2:7"}),
        ([(V6, "::1"), (V4, "127.0.0.1")], {"127.0.0.1:7"}),
        ([(V6, "fd00::1"), (V6, "fd00::2")], {"[fd00::1]:7", "[fd00::2]:7"}),
        ([], {"gateway:7"}),
    ],
)
async def test_a_name_is_all_its_addresses_of_one_family(
    monkeypatch: pytest.MonkeyPatch, ips: list[tuple[int, str]], expected: set[str]
) -> None:
    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        assert (host, port) == ("gateway", 7)
        return [
            (family, socket.SOCK_STREAM, 6, "", (ip, port) if family == V4 else (ip, port, 0, 0)) for family, ip in ips
        ]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    assert await resolved("gateway:7") == expected
