"""Offers and choices survive the wire; anything else is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.errors import InvalidRequest
from halfmoon.kv.codec import Codec
from halfmoon.kv.negotiation import (
    MAX_OFFERS,
    Acceptance,
    Offer,
    decode_accept,
    decode_open,
    encode_accept,
    encode_open,
)

names = st.text(min_size=1, max_size=20)
codecs = st.frozensets(st.sampled_from(Codec))
counts = st.integers(0, (1 << 32) - 1)
offers = st.lists(st.builds(Offer, names, st.binary(max_size=300)), max_size=MAX_OFFERS)


@given(offers, st.binary(max_size=300))
def test_offers_and_body_come_back(offered: list[Offer], body: bytes) -> None:
    assert decode_open(encode_open(offered, body)) == (tuple(offered), body)


@given(names, st.lists(st.tuples(names, st.text(max_size=50)), max_size=MAX_OFFERS), counts, counts, codecs)
def test_an_acceptance_comes_back(
    name: str, declined: list[tuple[str, str]], taken_us: int, held_tokens: int, known: frozenset[Codec]
) -> None:
    acceptance = Acceptance(name, tuple(declined), taken_us, held_tokens, known)
    assert decode_accept(encode_accept(acceptance)) == acceptance


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_taken_or_refused(payload: bytes) -> None:
    for decode in (decode_open, decode_accept):
        try:
            decode(payload)
        except InvalidRequest:
            continue


@given(offers)
def test_what_is_cut_short_is_refused(offered: list[Offer]) -> None:
    whole = encode_open(offered, b"")
    for end in range(len(whole)):
        with pytest.raises(InvalidRequest):
            decode_open(whole[:end])


def test_an_acceptance_names_a_transport() -> None:
    with pytest.raises(InvalidRequest, match="must name"):
        decode_accept(b"\0")


def test_an_acceptance_says_how_long_it_took() -> None:
    whole = encode_accept(Acceptance("shm", taken_us=1 << 40))
    assert decode_accept(whole).taken_us == (1 << 32) - 1
    with pytest.raises(InvalidRequest, match="how long"):
        decode_accept(whole[:-1])
