"""Stop strings, whatever the pieces are."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.gateway.replies.stop_strings import StopStrings

SHORT = st.text("ab", max_size=12)


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), max_size=3)


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The law, one character at a time: the stop string that is complete first, of several the longest."""
    for end in range(1, len(text) + 1):
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
