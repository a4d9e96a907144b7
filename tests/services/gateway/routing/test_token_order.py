"""The order of one output's tokens, which come on two streams."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.errors import HalfmoonError
from halfmoon.pb.types_pb2 import LENGTH, Token
from services.gateway.routing.token_order import TokenOrder
from tests.services.gateway.fakes import token


def test_decode_tokens_wait_for_the_first_one() -> None:
    order = TokenOrder(5)
    assert order.push(token(6)) == []
    assert order.push(token(7)) == []
    assert order.push(token(4)) == []
    assert [one.position for one in order.push(token(5))] == [5, 6, 7]
    assert order.push(token(6)) == []
    assert [one.position for one in order.push(token(8))] == [8]


def test_a_last_token_may_wait_for_the_first_one() -> None:
    order = TokenOrder(0)
    order.push(token(1))
    assert not order.has_last
    order.push(token(2, finish=LENGTH))
    assert order.has_last
    order.push(token(0))
    assert not order.has_last


def test_a_gap_is_an_error() -> None:
    order = TokenOrder(0)
    order.push(token(0))
    with pytest.raises(HalfmoonError, match="token 1 was lost"):
        order.push(token(2))
    late = TokenOrder(0)
    late.push(token(2))
    with pytest.raises(HalfmoonError, match="token 1 was lost"):
        late.push(token(0))


@given(st.integers(0, 5), st.integers(1, 8).flatmap(lambda n: st.permutations(range(1, n))), st.integers(0, 3))
def test_tokens_before_the_first_come_out_in_order(start: int, early: list[int], num_late: int) -> None:
    order, out = TokenOrder(start), []
    late = range(len(early) + 1, len(early) + 1 + num_late)
    for offset in [*early, 0, *late]:
        out += [one.position - start for one in order.push(token(start + offset))]
    assert out == list(range(len(early) + 1 + num_late))


@given(st.integers(1, 12).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(0, n))))
def test_tokens_that_overtake_an_adoption_wait_for_it(case: tuple[int, int, int]) -> None:
    """The worker's answer has the tokens before `held`; those from `live` on came on the stream before it."""
    num_tokens, held, live = case
    tokens = [Token(position=position) for position in range(num_tokens)]
    order = TokenOrder(0)
    due = [token for one in tokens[min(live, held) :] for token in order.push(one)]
    due += order.push_together(tokens[:held])
    assert [token.position for token in due] == list(range(num_tokens))
