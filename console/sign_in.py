"""Access to the console: open where only this machine reaches it, otherwise for holders of the operator token."""

from __future__ import annotations

import hmac

import streamlit as st

from halfmoon.rpc.addresses.loopback import is_loopback


def is_right(given: str, token: str) -> bool:
    """Compares in constant time."""
    return hmac.compare_digest(given.encode(), token.encode())


def may_enter(address: str | None, token: str | None) -> bool:
    """Whether the visitor may enter; if not, the page shows what to do. `address` is Streamlit's `server.address`."""
    if is_loopback(address) or st.session_state.get("entered"):
        return True
    if token is None:
        st.error(
            "The console is reachable from other machines and has no operator token: set "
            "HALFMOON_CONSOLE_OPERATOR_TOKEN, or bind it to 127.0.0.1.",
            icon=":material/lock:",
        )
        return False
    with st.form("entrance", width=420):
        st.markdown("#### :material/lock: Operator token")
        given = st.text_input("Operator token", type="password", label_visibility="collapsed")
        if st.form_submit_button("Enter", type="primary"):
            st.session_state["entered"] = is_right(given, token)
            if st.session_state["entered"]:
                st.rerun()
            st.error("This is not the operator token.")
    return False
