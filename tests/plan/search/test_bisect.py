"""The bisection is found within the tolerance, from any guess, with few questions where the guess is good."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import example, given
from hypothesis import strategies as st

from halfmoon.plan.search.bisect import highest_feasible

TOLERANCE = 1.05


def held_up_to(bisection: float, asked: list[float]) -> Callable[[float], str | None]:
    def held(value: float) -> str | None:
        asked.append(value)
        return f"at {value}" if value <= bisection else None

    return held


@given(st.floats(0.01, 1000.0), st.floats(0.01, 1000.0), st.floats(0.0, 100.0), st.floats(0.1, 1000.0))
def test_it_is_within_the_tolerance_and_between_least_and_most(
    bisection: float, guess: float, least: float, more: float
) -> None:
    asked: list[float] = []
    most = least + more
    found = highest_feasible(held_up_to(bisection, asked), guess, TOLERANCE, least=least, most=most)
    assert all(least <= one <= most for one in asked)
    if bisection < least:
        assert found is None
    elif bisection >= most:
        assert found is not None
        assert found.value == most
    elif found is not None:
        assert found.value <= bisection < TOLERANCE * found.value * 1.0001
        assert found.result == f"at {found.value}"


@given(st.floats(1.0, 1000.0), st.floats(0.96, 1.04))
@example(1.0, 0.9600000000000001)  # 1.05 times that, over that, is more than 1.05
def test_two_questions_are_enough_where_the_guess_is_good(bisection: float, error: float) -> None:
    asked: list[float] = []
    found = highest_feasible(held_up_to(bisection, asked), bisection * error, TOLERANCE)
    assert found is not None
    assert len(asked) == 2


def test_what_is_known_of_the_least_is_not_asked_again() -> None:
    asked: list[float] = []
    found = highest_feasible(held_up_to(10.0, asked), 10.2, TOLERANCE, least=10.0, at_least="known")
    assert found is not None
    assert (found.value, found.result) == (10.0, "known")
    assert asked == [10.2]


def test_nothing_is_held_where_no_value_is() -> None:
    assert highest_feasible(held_up_to(0.0, []), 1.0, TOLERANCE) is None
