"""What listens where only this machine reaches it."""

from __future__ import annotations

from halfmoon.rpc.addresses.loopback import is_loopback, is_loopback_url


def test_what_loopback_is() -> None:
    hosts = ("127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost")
    others = ("0.0.0.0", "::", "[::]", "10.0.0.1", "[fd00::1]", "example.org", "", None)
    assert [is_loopback(host) for host in (*hosts, *others)] == [True] * 5 + [False] * 8
    urls = ("http://127.0.0.1:1/v1", "https://[::1]:2", "http://example.org", "http://[::1", "127.0.0.1:1", "")
    assert [is_loopback_url(url) for url in urls] == [True] * 2 + [False] * 4
