"""Ids of events, and how a stream goes on after one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.errors import InvalidRequest
from services.gateway.replies.event_ids import EventIds


def event(index: int, number: int) -> bytes:
    return b"data: %d.%d\n\n" % (index, number)


def streamed(ids: EventIds, order: list[int]) -> list[tuple[int, bytes]]:
    """Each output's events, numbered, in an order of outputs."""
    numbers = dict.fromkeys(range(max(order, default=0) + 1), 0)
    found = []
    for index in order:
        numbers[index] += 1
        found += [(index, made) for made in ids.new(index, [event(index, numbers[index])])]
    return found


def test_one_output_counts_its_events() -> None:
    made = EventIds(1).new(0, [b"data: a\n\n", b"data: b\n\n"])
    assert made == [b"id: 1\ndata: a\n\n", b"id: 2\ndata: b\n\n"]
    assert EventIds(1, "1").new(0, [b"data: a\n\n", b"data: b\n\n"]) == made[1:]


@given(st.integers(1, 3).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1)))), st.data())
def test_what_came_and_the_rest_are_all_events_of_each_output(case: tuple[int, list[int]], data: st.DataObject) -> None:
    num_outputs, order = case
    whole = streamed(EventIds(num_outputs), order)
    cut = data.draw(st.integers(0, len(whole)))
    last_id = whole[cut - 1][1].splitlines()[0][4:].decode() if cut else None
    rest = streamed(EventIds(num_outputs, last_id), data.draw(st.permutations(order)))
    for index in range(num_outputs):
        texts = [made.split(b"\n", 1)[1] for output, made in whole[:cut] + rest if output == index]
        assert texts == [made.split(b"\n", 1)[1] for output, made in whole if output == index]
    if num_outputs == 1:
        assert [made for _, made in rest] == [made for _, made in whole[cut:]]


@pytest.mark.parametrize("last_id", ["x", "-1", "1.2", "1" * 12, "1.", "²"])
def test_what_is_no_id_of_this_stream_is_refused(last_id: str) -> None:
    with pytest.raises(InvalidRequest, match="Last-Event-ID"):
        EventIds(1, last_id)
