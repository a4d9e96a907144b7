"""The console: `streamlit run console/app.py -- --gateway http://127.0.0.1:8000`."""

from __future__ import annotations

import sys

import streamlit as st

from console import chat_page, cluster_page, requests_page
from console.gateway_api import GatewayApi
from console.settings import api_key, gateway_url

PAGES = {"Cluster": cluster_page.render, "Requests": requests_page.render, "Chat": chat_page.render}


def main() -> None:
    """Draws the chosen page; Streamlit runs this again at every interaction."""
    st.set_page_config(page_title="Halfmoon", page_icon="🌓", layout="wide")
    try:
        api = GatewayApi(gateway_url(sys.argv[1:]), api_key())
    except ValueError as err:
        st.error(str(err))
        return
    st.sidebar.title("Halfmoon")
    page = st.sidebar.radio("Page", list(PAGES), label_visibility="collapsed")
    st.sidebar.caption(api.url)
    PAGES[page](api)


if __name__ == "__main__":
    main()
