"""A conversation with the served model. The history lives in the browser's session and nowhere else."""

from __future__ import annotations

import streamlit as st

from console.gateway_api import GatewayApi, GatewayError


def render(api: GatewayApi) -> None:
    """The page."""
    st.header("Chat")
    try:
        cluster = api.cluster()
    except GatewayError as err:
        st.error(str(err))
        return
    max_tokens = int(st.sidebar.number_input("Most new tokens", 1, 32768, 256))
    temperature = float(st.sidebar.slider("Temperature", 0.0, 2.0, 0.0, 0.1))
    history: list[dict[str, str]] = st.session_state.setdefault("history", [])
    if st.sidebar.button("New conversation"):
        history.clear()
    prompt = st.chat_input("Say something")
    for message in history:
        st.chat_message(message["role"]).write(message["content"])
    if prompt:
        _reply(api, cluster.get("served_model") or cluster.get("model") or "", history, prompt, max_tokens, temperature)


def _reply(
    api: GatewayApi, model: str, history: list[dict[str, str]], prompt: str, max_tokens: int, temperature: float
) -> None:
    """Streams one reply; the exchange joins the history only if it is whole."""
    question = {"role": "user", "content": prompt}
    st.chat_message("user").write(prompt)
    with st.chat_message("assistant"):
        try:
            text = st.write_stream(api.chat(model, [*history, question], max_tokens, temperature))
        except GatewayError as err:
            st.error(str(err))
            return
    history += [question, {"role": "assistant", "content": str(text)}]
