"""What listens where only this machine reaches it."""

from __future__ import annotations

from halfmoon.rpc.addresses.loopback import is_loopback


def test_what_loopback_is() -> None:
    hosts = ("127.0.0.1", "127.1.2.3", "::1", "localhost", "0.0.0.0", "::", "10.0.0.1", "example.org", "", None)
    assert [is_loopback(host) for host in hosts] == [True] * 4 + [False] * 6
