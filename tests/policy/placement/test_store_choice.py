"""Which store takes new blocks."""

from __future__ import annotations

from math import inf

from halfmoon.policy.placement.store_choice import choose_store, runs


def test_the_nearest_store_takes_blocks_while_it_has_room() -> None:
    assert choose_store([inf, inf, inf]) == 0
    assert choose_store([inf, 5.0]) == 0
    assert choose_store([3.0]) == 0


def test_a_full_store_gives_way_to_one_with_room_or_with_older_blocks() -> None:
    assert choose_store([100.0, inf, inf]) == 1
    assert choose_store([100.0, 151.0, 160.0]) == 2
    assert choose_store([0.0, 0.0]) == 0


def test_a_small_difference_sends_nothing_away() -> None:
    assert choose_store([100.0, 149.0]) == 0


def test_runs_are_successive_blocks() -> None:
    assert runs(7, {0, 1, 3, 5, 6, 9}) == [range(2), range(3, 4), range(5, 7)]
    assert runs(3, set()) == []
