"""Addresses that names stand for."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest

from halfmoon.errors import InvalidRequest
from halfmoon.rpc.addresses.resolved import check_dialled, resolved
from halfmoon.rpc.service import read_settings
from services.decode.settings import DecodeSettings

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


@pytest.mark.parametrize("address", ["127.0.0.1:7000", "gateway:7000", "[::1]:7000", "unix:/run/it", "a:1, b:65535"])
def test_addresses_of_others_are_taken_as_they_are(address: str) -> None:
    assert check_dialled(address) == address


@pytest.mark.parametrize(
    "address", ["", "gateway", "7000", "gateway:", "gateway:x", "gateway:0", "a:65536", "a:-1", "::1", "a:1,b", "a:1,"]
)
def test_what_nobody_can_listen_on_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match=r"is not an address: give HOST:PORT"):
        check_dialled(address)


@pytest.mark.parametrize("option", ["gateway", "kv-store"])
def test_a_worker_says_which_option_it_is(option: str) -> None:
    options = {"gateway": "gateway:7000", option: "gateway:99999"}
    arguments = [f"--{name}={value}" for name, value in options.items()]
    with pytest.raises(InvalidRequest, match=rf"^--{option}: 'gateway:99999' is not an address"):
        read_settings(DecodeSettings, arguments)
