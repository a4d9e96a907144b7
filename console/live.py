"""A part of a page that keeps itself up to date, and says so when it cannot."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar, overload

import streamlit as st

from console.gateway_api import GatewayError
from console.plain_text import plain
from console.quantities import ago

Found = TypeVar("Found")
One = TypeVar("One")
Two = TypeVar("Two")
Three = TypeVar("Three")
Four = TypeVar("Four")

REFRESH_S = 2.0


def live(
    key: str, fetch: Callable[[], Found], draw: Callable[[Found], None], every_s: float | None = REFRESH_S
) -> None:
    """Fetches and draws, again and again. While the gateway is away, what was known last stays, marked as such."""

    def now() -> None:
        remembered = st.session_state.setdefault("live", {})
        try:
            found = fetch()
        except GatewayError as error:
            disconnected(str(error), remembered[key][1] if key in remembered else None)
            if key in remembered:
                draw(remembered[key][0])
            return
        remembered[key] = (found, time.monotonic())
        draw(found)

    st.fragment(now, run_every=every_s)()


@overload
def at_once(one: Callable[[], One], two: Callable[[], Two], /) -> tuple[One, Two]: ...
@overload
def at_once(
    one: Callable[[], One], two: Callable[[], Two], three: Callable[[], Three], /
) -> tuple[One, Two, Three]: ...
@overload
def at_once(
    one: Callable[[], One], two: Callable[[], Two], three: Callable[[], Three], four: Callable[[], Four], /
) -> tuple[One, Two, Three, Four]: ...
def at_once(*looks: Callable[[], Any]) -> tuple[Any, ...]:
    """What the looks find, each in a thread of its own: a page waits for the slowest, not for all of them.

    Raises the first look's GatewayError that failed.
    """
    with ThreadPoolExecutor(len(looks)) as threads:
        return tuple(threads.map(lambda look: look(), looks))


def away(reason: str, look: Callable[[], object]) -> None:
    """In place of a part that does not live: says why it is not there, and draws the page anew when `look` succeeds."""

    def again() -> None:
        try:
            look()
        except GatewayError:
            return
        st.rerun(scope="app")

    disconnected(reason, None)
    st.fragment(again, run_every=REFRESH_S)()


def disconnected(reason: str, known_s: float | None) -> None:
    """The banner over what is out of date, or in place of what never came."""
    st.error(plain(reason), icon=":material/cloud_off:")
    if known_s is None:
        st.caption("Nothing is known yet. This page tries again by itself.")
    else:
        st.caption(f"Below is what was known {ago(time.monotonic() - known_s)}. This page tries again by itself.")


def empty(title: str, text: str, icon: str = ":material/hourglass_empty:") -> None:
    """In place of what there is none of yet."""
    with st.container(border=True, horizontal_alignment="center"):
        st.markdown(f"#### {icon} {title}", text_alignment="center")
        st.caption(text, text_alignment="center")
