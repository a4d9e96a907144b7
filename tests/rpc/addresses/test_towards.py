"""This host's own address."""

from __future__ import annotations

import socket

import pytest

from halfmoon.rpc.addresses.towards import address_towards, own_host


def test_the_address_towards_another_one_is_of_the_same_network() -> None:
    assert address_towards("127.0.0.1:7000") == "127.0.0.1"


@pytest.mark.parametrize("other", ["127.0.0.1:", "127.0.0.1", ":7000", "127.0.0.1:0", "127.0.0.1:65536", "h:-1", "h:١"])
def test_an_address_without_a_port_leads_nowhere(other: str) -> None:
    with pytest.raises(ValueError, match="has no port from 1 to 65535"):
        address_towards(other)


@pytest.mark.parametrize(
    ("listen", "others", "expected"),
    [
        ("127.0.0.3:0", "127.0.0.1:7", ""),
        ("unix:/run/x", "127.0.0.1:7", ""),
        ("0.0.0.0:7001", "127.0.0.1:7,10.0.0.9:7", "127.0.0.1"),
        ("0.0.0.0:7001", "gateway:no-port", "10.0.0.5"),
    ],
)
def test_the_address_of_a_listener(monkeypatch: pytest.MonkeyPatch, listen: str, others: str, expected: str) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda name: "10.0.0.5")
    assert own_host(listen, others) == expected


def test_a_host_whose_own_name_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> str:
        raise socket.gaierror(name)

    monkeypatch.setattr(socket, "gethostbyname", unknown)
    assert own_host("0.0.0.0:7001", "gateway:no-port") == ""
