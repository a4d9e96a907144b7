"""Offers and choices survive the wire; anything else is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.errors import InvalidRequest
from halfmoon.kv.negotiation import (
    MAX_OFFERS,
    Offer,
    TransportChoice,
    decode_choice,
    decode_open,
    encode_choice,
    encode_open,
)

names = st.text(min_size=1, max_size=20)
offers = st.lists(st.builds(Offer, names, st.binary(max_size=300)), max_size=MAX_OFFERS)


@given(offers, st.binary(max_size=300))
def test_offers_and_body_come_back(offered: list[Offer], body: bytes) -> None:
    assert decode_open(encode_open(offered, body)) == (tuple(offered), body)


@given(names, st.lists(st.tuples(names, st.text(max_size=50)), max_size=MAX_OFFERS), st.integers(0, (1 << 32) - 1))
def test_a_choice_comes_back(name: str, declined: list[tuple[str, str]], taken_us: int) -> None:
    choice = TransportChoice(name, tuple(declined), taken_us)
    assert decode_choice(encode_choice(choice)) == choice


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_taken_or_refused(payload: bytes) -> None:
    for decode in (decode_open, decode_choice):
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


def test_a_choice_names_a_transport() -> None:
    with pytest.raises(InvalidRequest, match="must name"):
        decode_choice(b"\0")


def test_a_choice_says_how_long_it_took() -> None:
    whole = encode_choice(TransportChoice("shm", taken_us=1 << 40))
    assert decode_choice(whole).taken_us == (1 << 32) - 1
    with pytest.raises(InvalidRequest, match="how long"):
        decode_choice(whole[:-1])
