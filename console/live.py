"""Parts of a page that refresh themselves, and say so when they cannot."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar, overload

import streamlit as st

from console.gateway_api import GatewayError
from console.plain_text import plain
from console.quantities import ago

_MESSAGE = "message"  # in the session, between a change and the rerun that shows it
_FAILED = "live_failed"  # in the session: why each live part cannot be refreshed now, by key
State = TypeVar("State")
One = TypeVar("One")
Two = TypeVar("Two")
Three = TypeVar("Three")
Four = TypeVar("Four")

REFRESH_S = 2.0


def live(key: str, fetch: Callable[[], State], draw: Callable[[State], None]) -> None:
    """Fetches and draws repeatedly. While the gateway is away, the last known state stays, marked as stale."""

    def now() -> None:
        remembered = st.session_state.setdefault("live", {})
        failed = st.session_state.setdefault(_FAILED, {})
        try:
            state = fetch()
        except GatewayError as error:
            failed[key] = str(error)
            disconnected(str(error), remembered[key][1] if key in remembered else None)
            if key in remembered:
                draw(remembered[key][0])
            return
        failed.pop(key, None)
        remembered[key] = (state, time.monotonic())
        draw(state)

    st.fragment(now, run_every=REFRESH_S)()


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
    """Results of the look-ups, each in its own thread, so that a page waits only for the slowest.

    Raises the GatewayError of the first look-up that failed.
    """
    with ThreadPoolExecutor(len(looks)) as threads:
        return tuple(threads.map(lambda look: look(), looks))


def away(look: Callable[[], object], beside: str | None = None) -> None:
    """Replaces a part that cannot be drawn: gives the reason, and reruns the page when `look` succeeds.

    A reason that the live part `beside` gives is not given again. `look` must fail when the part cannot be drawn.
    """

    def again() -> None:
        try:
            look()
        except GatewayError as error:
            if str(error) != st.session_state.get(_FAILED, {}).get(beside):
                disconnected(str(error), None)
            return
        st.rerun(scope="app")

    st.fragment(again, run_every=REFRESH_S)()


@contextmanager
def refusals_shown() -> Iterator[None]:
    """Shows why the gateway did not do what is asked inside, where the block then ends."""
    try:
        yield
    except GatewayError as error:
        st.error(plain(error))


def rerun_with(message: str, widgets: Mapping[str, Any] | None = None) -> None:
    """Runs the page again, which then says what was done and sets these `widgets`, by key (`show_message`)."""
    st.session_state[_MESSAGE] = (message, widgets or {})
    st.rerun()


def show_message() -> None:
    """Shows the message of the last `rerun_with`, once. Every page begins with it on which something can be changed."""
    if _MESSAGE in st.session_state:
        message, widgets = st.session_state.pop(_MESSAGE)
        for key, value in widgets.items():
            st.session_state[key] = value
        st.toast(message, icon=":material/check_circle:")


def disconnected(reason: str, known_s: float | None) -> None:
    """Banner above stale data, or in place of data that never arrived."""
    st.error(plain(reason), icon=":material/cloud_off:")
    if known_s is None:
        st.caption("No data yet. This page retries by itself.")
    else:
        st.caption(f"The data below is from {ago(time.monotonic() - known_s)}. This page retries by itself.")


def empty(title: str, text: str, icon: str = ":material/hourglass_empty:") -> None:
    """Placeholder for data that does not exist yet."""
    with st.container(border=True, horizontal_alignment="center"):
        st.markdown(f"#### {icon} {title}", text_alignment="center")
        st.caption(text, text_alignment="center")
