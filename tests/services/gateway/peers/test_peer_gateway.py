"""Addresses and keys of peers, and what is read from an answer's end."""

from __future__ import annotations

import pytest

from halfmoon.errors import InvalidRequest
from halfmoon.policy.admission.qos_classes import ClassTable, QosClass
from halfmoon.policy.admission.tenants import ANYONE, Tenant
from services.gateway.peers.offer import Offer
from services.gateway.peers.peer_gateway import peer_keys
from services.gateway.replies.passed_answer import PassedAnswer, counted_end, without_end
from services.gateway.replies.reply_format import Usage


def test_one_key_is_for_all_peers_and_several_are_in_their_order() -> None:
    urls = ("http://a:1/", "https://b")
    assert peer_keys(urls, ()) == [("http://a:1", None), ("https://b", None)]
    assert peer_keys(urls, ("k",)) == [("http://a:1", "k"), ("https://b", "k")]
    assert peer_keys(urls, ("k", "l")) == [("http://a:1", "k"), ("https://b", "l")]
    assert peer_keys((), ()) == []


@pytest.mark.parametrize("url", ["a:1", "ftp://a", "http://", "http://user:pass@a:1", "http://a:1?x=1"])
def test_an_address_that_cannot_be_one_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="a peer is"):
        peer_keys((url,), ())


def test_keys_that_fit_no_peer_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="one for each"):
        peer_keys(("http://a", "http://b", "http://c"), ("k", "l"))


def test_the_end_of_a_stream_tells_its_counts_however_it_is_cut() -> None:
    end, passed = counted_end(Usage(7, 2, 3)), PassedAnswer("http://a", 0.1, None)
    passed.begin(1.0)
    for at_s, part in enumerate((b"data: 1\n\n", b"data: 2\n\n", end[:5], end[5:]), 2):
        passed.add(part, float(at_s))
    passed.end()
    assert passed.usage == Usage(7, 2, 3)
    assert (passed.ttft_s, passed.gaps_s) == (1.0, [1.0, 1.0])


def test_a_whole_answer_has_the_mean_gap() -> None:
    body, passed = b'{"a": 1}' + counted_end(Usage(7, 2, 3)), PassedAnswer("http://a", 0.1, None)
    passed.begin(1.0)
    passed.end_whole(body, 2.0)
    assert (without_end(body), passed.usage, passed.gaps_s) == (b'{"a": 1}', Usage(7, 2, 3), [0.5, 0.5])


def test_an_answer_without_counts_has_none() -> None:
    passed = PassedAnswer("http://a", 0.1, None)
    passed.end_whole(b"{}", 2.0)
    assert (without_end(b"{}"), passed.usage, passed.gaps_s) == (b"{}", Usage(0, 0, 0), [])


def test_the_class_of_an_offer_is_the_one_of_its_name_that_the_tenant_may_use_and_degrades_nothing() -> None:
    gold, own = QosClass("gold", degradation=("cap_max_tokens",)), QosClass("own")
    offer = Offer(step="ask", gateway="g", model="m", qos_class="gold")
    assert offer.in_class(own, ClassTable((gold,)), ANYONE) == QosClass("gold")
    assert offer.in_class(own, ClassTable((gold,)), Tenant("t", classes=("own",))) == own
    assert offer.in_class(own, ClassTable(()), ANYONE) == own
