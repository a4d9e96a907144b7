"""A part of a page that keeps itself up to date, and says so when it cannot."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import streamlit as st

from console.gateway_api import GatewayError
from console.quantities import ago

Found = TypeVar("Found")

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


def disconnected(reason: str, known_s: float | None) -> None:
    """The banner over what is out of date, or in place of what never came."""
    st.error(reason, icon=":material/cloud_off:")
    if known_s is None:
        st.caption("Nothing is known yet. This page tries again by itself.")
    else:
        st.caption(f"Below is what was known {ago(time.monotonic() - known_s)}. This page tries again by itself.")


def empty(title: str, text: str, icon: str = ":material/hourglass_empty:") -> None:
    """In place of what there is none of yet."""
    with st.container(border=True, horizontal_alignment="center"):
        st.markdown(f"#### {icon} {title}", text_alignment="center")
        st.caption(text, text_alignment="center")
