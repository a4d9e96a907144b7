"""Which names of a service are answered, and which pages are its own."""

from __future__ import annotations

import pytest

from halfmoon.rpc.addresses.allowed_hosts import AllowedHosts, host_name, is_same_origin

FOREIGN = (
    "evil.example",
    "evil.example:8000",
    "127.0.0.1.evil.example",
    "localhost.evil.example",
    "localhost@evil.example",
    "evil.example#localhost",
    "localhost/evil.example",
    "10.0.0.1",
    "[fe80::1]",
    "",
    "localhost:port",
    "[::1",
    "localhost\tevil",
    "[::1].evil.example",
    "[::1]evil:8000",
    "[::1]:8000.evil.example",
    "[localhost]",
    "localhost, evil.example",
    "localhost:99999",
)


@pytest.mark.parametrize("listen_host", ["127.0.0.1", "::1", "localhost", "127.0.0.9"])
def test_on_loopback_only_names_of_loopback_are_answered(listen_host: str) -> None:
    hosts = AllowedHosts(listen_host)
    for own in ("localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:1", "[::1]", "[::1]:8000", None):
        assert hosts.allows(own), own
    for foreign in FOREIGN:
        assert not hosts.allows(foreign), foreign


def test_further_names_count_everywhere() -> None:
    for listen_host in ("127.0.0.1", "0.0.0.0"):
        hosts = AllowedHosts(listen_host, ("Chat.example", "[fd00::7]"))
        assert hosts.allows("chat.example:443")
        assert hosts.allows("[fd00::7]:8000")
        assert hosts.allows("127.0.0.1:8000")  # probes of its own machine
        assert not hosts.allows("evil.example")
    assert AllowedHosts("127.0.0.1", ("*",)).allows("evil.example")


def test_beyond_loopback_any_name_is_answered() -> None:
    for listen_host in ("0.0.0.0", "::", "10.0.0.1", "", None):
        assert AllowedHosts(listen_host).allows("gateway.example")
    named = AllowedHosts("10.0.0.1", ("chat.example",))
    assert named.allows("10.0.0.1:8000")
    assert not named.allows("gateway.example")


@pytest.mark.parametrize(
    ("origin", "host", "is_same"),
    [
        ("http://localhost:8000", "localhost:8000", True),
        ("http://LocalHost", "localhost:80", True),
        ("https://chat.example", "chat.example:443", True),
        ("https://chat.example", "chat.example", True),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("http://localhost:3000", "localhost:8000", False),
        ("http://127.0.0.1:8000", "localhost:8000", False),
        ("http://evil.example", "localhost:8000", False),
        ("http://evil.example:none", "localhost:8000", False),
        ("null", "localhost:8000", False),
        ("null", None, False),
        ("", "localhost:8000", False),
        ("http://none", None, False),
        ("http://[::1].evil:8000", "[::1]:8000", False),
        ("http://localhost:8000/evil", "localhost:8000", False),
        ("http://evil@localhost:8000", "localhost:8000", False),
        ("http://localhost:8000, http://evil.example", "localhost:8000", False),
    ],
)
def test_which_page_is_of_the_same_server(origin: str, host: str | None, is_same: bool) -> None:
    assert is_same_origin(origin, host) is is_same


def test_names_of_hosts() -> None:
    assert [host_name(host) for host in ("A.example:80", "[::1]:8", "x.")] == ["a.example", "::1", "x"]
