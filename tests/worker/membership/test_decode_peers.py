"""Whom a worker may hand prompts over to."""

from __future__ import annotations

import asyncio

import pytest

from halfmoon.errors import Unavailable
from halfmoon.worker.membership.decode_peers import DecodePeers

AT_ONCE_S = 0.0
PATIENTLY_S = 60.0


async def test_only_what_a_gateway_of_its_own_has_named() -> None:
    peers = DecodePeers(is_open=False)
    peers.begin_anew("g0")
    peers.change("g0", ["a:1", "b:1"], [])
    peers.change("g1", ["c:1"], [])
    await asyncio.gather(*(peers.check(address, AT_ONCE_S) for address in ("a:1", "b:1", "c:1")))
    with pytest.raises(Unavailable, match="no gateway of this worker has a member at evil:1"):
        await peers.check("evil:1", AT_ONCE_S)


async def test_members_that_leave_are_members_no_more() -> None:
    peers = DecodePeers(is_open=False)
    peers.change("g0", ["a:1", "b:1"], [])
    peers.change("g1", ["b:1"], [])
    peers.change("g0", ["c:1"], ["a:1", "b:1"])
    await peers.check("b:1", AT_ONCE_S)  # the other gateway's still
    with pytest.raises(Unavailable):
        await peers.check("a:1", AT_ONCE_S)
    peers.begin_anew("g1")
    with pytest.raises(Unavailable):
        await peers.check("b:1", AT_ONCE_S)


async def test_a_request_may_overtake_the_news() -> None:
    peers = DecodePeers(is_open=False)
    waiting = asyncio.ensure_future(peers.check("a:1", PATIENTLY_S))
    await asyncio.sleep(0)
    peers.change("g0", ["b:1"], [])
    await asyncio.sleep(0)
    assert not waiting.done()
    peers.change("g0", ["a:1"], [])
    await waiting


async def test_without_a_credential_everybody_will_do() -> None:
    await DecodePeers(is_open=True).check("a:1", AT_ONCE_S)


def test_whoever_no_gateway_names_any_more_has_left() -> None:
    peers = DecodePeers(is_open=True)
    assert not peers.has_left("a:1")  # without gateways nobody says so
    peers.change("g0", ["a:1"], [])
    peers.change("g1", ["a:1"], [])
    peers.change("g0", [], ["a:1"])
    assert not peers.has_left("a:1")
    peers.change("g1", [], ["a:1"])
    assert peers.has_left("a:1")
