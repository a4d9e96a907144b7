"""Answers that a worker keeps for repeats: whose they are, how long, and how many."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.errors import NotFound
from halfmoon.pb.prefill_pb2 import FirstToken
from halfmoon.pb.types_pb2 import NOT_FINISHED, STOP, Repeatable, Token
from halfmoon.worker.servicers.kept_answers import KeptAnswers


def token(request_id: str, position: int, *, last: bool = False) -> Token:
    return Token(
        request_id=request_id, token_id=position, position=position, finish_reason=STOP if last else NOT_FINISHED
    )


def begun(kept: KeptAnswers, request_id: str, key: bytes = b"k", gateway_id: str = "a") -> None:
    first = FirstToken(token=token(request_id, 0))
    kept.begin(request_id, gateway_id, Repeatable(key=key), first)
    kept.add(first.token, 0.0)


def test_an_answer_is_found_by_its_key_alone() -> None:
    kept = KeptAnswers()
    begun(kept, "r", b"one")
    begun(kept, "s", b"two")
    (found,) = kept.find(b"one")
    assert (found.request_id, found.num_tokens, found.is_settled) == ("r", 1, False)
    assert kept.find(b"three") == []


def test_answers_of_other_keys_are_not_looked_at() -> None:
    kept = KeptAnswers()
    for number in range(100):
        begun(kept, f"r{number}", b"%d" % number)
    begun(kept, "again", b"7")
    assert {found.request_id for found in kept.find(b"7")} == {"r7", "again"}
    kept.drop("r7")
    assert [found.request_id for found in kept.find(b"7")] == ["again"]
    kept.drop("again")
    assert kept.find(b"7") == []


def test_an_answer_without_its_first_token_is_not_found_yet() -> None:
    kept = KeptAnswers()
    kept.begin("r", "a", Repeatable(key=b"k"))
    assert kept.find(b"k") == []
    kept.note_first("r", FirstToken(token=token("r", 0)))
    assert len(kept.find(b"k")) == 1


def test_a_later_attempt_has_the_tokens_of_earlier_ones() -> None:
    kept = KeptAnswers()
    kept.begin("r", "a", Repeatable(key=b"k", attempt=1, tokens=[token("q", 0), token("q", 1)]), FirstToken())
    kept.add(token("r", 2), 0.0)
    assert [old.position for old in kept.adopt("r", "b").tokens] == [0, 1, 2]
    assert not kept.find(b"k")[0].repeatable.tokens


def test_a_running_answer_outlives_its_gateway_for_a_while() -> None:
    kept = KeptAnswers(keep_s=60)
    begun(kept, "r")
    kept.expire(1e6)
    assert "r" in kept, "its gateway is there"
    kept.leave("a", 100.0)
    kept.expire(160.0)
    assert "r" in kept
    kept.adopt("r", "b")
    kept.expire(1e6)
    assert "r" in kept, "another gateway has it"
    kept.leave("b", 100.0)
    kept.expire(160.1)
    assert "r" not in kept
    assert kept.num_bytes == 0
    with pytest.raises(NotFound):
        kept.adopt("r", "c")


def test_an_ended_answer_is_kept_for_a_while_whatever_its_gateway_does() -> None:
    kept = KeptAnswers(keep_s=60)
    begun(kept, "r")
    kept.add(token("r", 1, last=True), 10.0)
    kept.drop("r")
    kept.settle("r", 20.0)
    kept.expire(70.0)
    assert kept.find(b"k")[0].is_settled
    kept.expire(70.1)
    assert (len(kept), kept.num_bytes) == (0, 0)


def test_what_is_given_up_is_dropped() -> None:
    kept = KeptAnswers()
    begun(kept, "r")
    kept.drop("r")
    assert (len(kept), kept.num_bytes) == (0, 0)


def test_without_room_the_answer_that_ended_first_goes_and_then_the_oldest() -> None:
    kept = KeptAnswers(max_bytes=4_000)
    for name in ("a", "b", "c"):
        begun(kept, name)
    kept.add(token("c", 1, last=True), 1.0)
    kept.add(token("b", 1, last=True), 2.0)
    gone = []
    for position in range(1, 1_000):
        before = {name for name in ("a", "b", "c") if name in kept}
        kept.add(token("a", position), 3.0)
        gone += sorted(before - {name for name in before if name in kept})
    assert gone == ["c", "b", "a"]
    assert kept.num_bytes == 0


@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "add", "end", "drop", "settle", "leave", "expire"]), st.integers(0, 5))
    ),
    st.integers(0, 5_000),
)
def test_bytes_are_those_of_what_is_kept_and_never_above_the_bound(
    steps: list[tuple[str, int]], max_bytes: int
) -> None:
    kept = KeptAnswers(keep_s=3, max_bytes=max_bytes)
    for now_s, (step, number) in enumerate(steps):
        name = f"r{number}"
        match step:
            case "begin" if name not in kept:
                begun(kept, name, gateway_id=f"g{number}")
            case "add":
                kept.add(token(name, 1), now_s)
            case "end":
                kept.add(token(name, 2, last=True), now_s)
            case "drop":
                kept.drop(name)
            case "settle":
                kept.settle(name, now_s)
            case "leave":
                kept.leave(f"g{number}", now_s)
            case "expire":
                kept.expire(now_s)
        assert kept.num_bytes <= max_bytes
    kept_bytes = sum(kept.adopt(f"r{number}", "z").num_bytes for number in range(6) if f"r{number}" in kept)
    assert kept.num_bytes == kept_bytes
