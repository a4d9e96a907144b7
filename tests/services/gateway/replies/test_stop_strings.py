"""Stop strings, whatever the pieces are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.replies.stop_strings import StopStrings

SHORT = st.text("ab", max_size=12)


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def first_stop(text: str, stops: list[str], least: int = 0) -> tuple[str, str | None]:
    """The law, one character at a time: the stop string that is complete first, of several the longest.

    Of those that are not complete within the first `least` characters.
    """
    for end in range(least + 1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(st.lists(SHORT), STOPS)
def test_stop_strings_do_not_depend_on_the_pieces(pieces: list[str], stops: list[str]) -> None:
    matcher, out = StopStrings(stops), ""
    for piece in pieces:
        out += matcher.push(piece)
        if matcher.matched is not None:
            break
    else:
        out += matcher.flush()
    assert (out, matcher.matched) == first_stop("".join(pieces), stops)


@given(st.lists(SHORT), st.lists(SHORT), STOPS)
def test_where_a_text_must_not_end_a_stop_string_is_text(before: list[str], after: list[str], stops: list[str]) -> None:
    matcher, out = StopStrings(stops), ""
    for piece in before:
        out += matcher.push(piece, may_end=False)
    assert matcher.matched is None
    for piece in after:
        out += matcher.push(piece)
        if matcher.matched is not None:
            break
    else:
        out += matcher.flush()
    text, least = "".join(before + after), len("".join(before))
    assert (out, matcher.matched) == first_stop(text, stops, least)


@given(st.lists(SHORT), STOPS)
def test_no_text_is_held_without_need(pieces: list[str], stops: list[str]) -> None:
    matcher, out, given_text = StopStrings(stops), "", ""
    for piece in pieces:
        given_text += piece
        out += matcher.push(piece)
        if matcher.matched is not None:
            return
        held = given_text[len(out) :]
        assert not held or any(stop.startswith(held) for stop in stops)
