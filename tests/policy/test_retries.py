"""Who is tried next, and when a request is given up."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.retries import MAX_FAILOVERS, MAX_REFUSALS, FailedAttempt, Reason, Retries


def failed(
    reason: Reason, *, gave_tokens: bool = False, decode: str = "d", after_ms: int | None = None
) -> FailedAttempt:
    return FailedAttempt(reason, "p", decode, gave_tokens, after_ms)


@pytest.mark.parametrize("reason", ["no room", "lost"])
def test_who_has_no_token_is_given_up_after_three_refusals_in_a_row(reason: Reason) -> None:
    retries = Retries()
    assert [retries.add(failed(reason)) for _ in range(MAX_REFUSALS)] == [True, True, False]


def test_whose_answer_has_begun_waits_for_room() -> None:
    retries = Retries()
    assert retries.add(failed("lost", gave_tokens=True))
    assert retries.pause_s == 0.1
    assert all(retries.add(failed("no room")) for _ in range(50))
    assert retries.pause_s == 1.0  # nobody is asked ten times a second for minutes
    assert [retries.add(failed("lost")) for _ in range(MAX_REFUSALS)] == [True, True, False]


def test_who_gives_way_is_given_up_unless_its_answer_has_begun() -> None:
    attempt = failed("no room")._replace(gives_way=True)
    assert not Retries().add(attempt)
    retries = Retries()
    assert retries.add(failed("lost", gave_tokens=True))
    assert retries.add(attempt)
    assert Retries().add(attempt, have_others_begun=True)


def test_an_output_waits_for_room_once_others_of_its_request_have_begun() -> None:
    retries = Retries()
    assert [retries.add(failed("no room")) for _ in range(MAX_REFUSALS - 1)] == [True, True]
    assert all(retries.add(failed("no room"), have_others_begun=True) for _ in range(50))
    assert not retries.add(failed("lost"), have_others_begun=True)


def test_tokens_end_a_row_of_refusals_and_are_not_got_for_ever() -> None:
    retries = Retries()
    for _ in range(MAX_FAILOVERS):
        assert retries.add(failed("lost"))
        assert retries.add(failed("lost"))
        assert retries.add(failed("lost", gave_tokens=True))
    assert not retries.add(failed("lost", gave_tokens=True))


def test_after_two_losses_the_gateway_has_time_to_learn_who_else_has_died() -> None:
    retries = Retries()
    assert retries.notice_s == 0.0
    retries.add(failed("decode lost", gave_tokens=True, decode="a"))
    assert retries.notice_s == 0.0, "the usual case: one worker"
    retries.add(failed("decode lost", decode="b"))
    assert retries.notice_s == 0.5
    retries.add(failed("no room", decode="c"))
    assert retries.notice_s == 0.0
    retries.add(failed("lost", decode="d"))
    assert retries.notice_s == 1.0


def test_a_loss_long_before_is_no_reason_to_pause() -> None:
    retries = Retries()
    retries.add(failed("decode lost", gave_tokens=True, decode="a"))
    retries.add(failed("decode lost", gave_tokens=True, decode="b"))
    assert retries.notice_s == 0.0, "the second attempt decoded meanwhile"
    assert retries.has_lost
    retries.add(failed("decode lost", decode="c"))
    assert retries.notice_s == 0.5


def test_the_next_attempt_is_elsewhere_until_nobody_is_left() -> None:
    retries = Retries()
    assert (retries.exclusions(), retries.last_reason, retries.pause_s) == ([()], None, 0.0)
    retries.add(failed("no room", decode="a", after_ms=30))
    assert (retries.exclusions(), retries.last_reason, retries.pause_s) == ([("a",)], "no room", 0.03)
    retries.add(failed("lost", decode="b"))
    assert retries.exclusions() == [("a", "b", "p"), ("a", "b"), ("a", "p")]
    assert (retries.last_reason, retries.pause_s) == ("lost", 0.1)
    retries.note_pause()
    assert retries.exclusions() == [()]
    retries.add(failed("no room", after_ms=60_000))
    assert retries.pause_s == 1.0


def test_a_prefill_worker_that_is_not_to_blame_is_asked_again() -> None:
    retries = Retries()
    retries.add(failed("no room", decode="a"))
    assert not retries.has_lost
    retries.add(failed("decode lost", decode="b", gave_tokens=True))
    assert retries.exclusions() == [("a", "b")]
    assert retries.has_lost


def test_work_that_a_worker_no_longer_takes_counts_as_no_refusal() -> None:
    retries = Retries()
    assert all(retries.add(failed("stale", decode="a")) for _ in range(2 * MAX_REFUSALS))
    assert not retries.has_lost
    assert retries.exclusions()[0] == (*["a"] * 6, *["p"] * 6)
    assert [retries.add(failed("lost")) for _ in range(MAX_REFUSALS)] == [True, True, False]
    retries = Retries()
    assert not all(retries.add(failed("stale")) for _ in range(1000))  # but not for ever


@given(
    st.lists(
        st.tuples(st.sampled_from(["no room", "lost", "decode lost"]), st.sampled_from("abc"), st.booleans()),
        max_size=12,
    )
)
def test_a_full_decode_worker_is_not_asked_again_before_a_pause(attempts: list[tuple[Reason, str, bool]]) -> None:
    retries = Retries()
    for reason, decode, gave_tokens in attempts:
        retries.add(failed(reason, decode=decode, gave_tokens=gave_tokens and reason == "lost"))
    full = {decode for reason, decode, _ in attempts if reason == "no room"}
    assert all(full <= set(excluded) for excluded in retries.exclusions())
