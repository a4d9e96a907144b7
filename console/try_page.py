"""Try it: a conversation with the served model, with what each answer took and where it ran.

The history lives in the browser's session and nowhere else.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import streamlit as st

from console.gateway_api import GatewayApi, GatewayError
from console.live import at_once, away, empty
from console.plain_text import plain
from console.quantities import seconds

_NO_CLASS = "by default"


class Stopwatch:
    """Owns when the pieces of one answer came, as this console saw it."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic()
        self._at_s: list[float] = []

    def timing(self, pieces: Iterator[str]) -> Iterator[str]:
        """Passes the pieces on."""
        for piece in pieces:
            if piece:
                self._at_s.append(time.monotonic())
            yield piece

    @property
    def ttft_s(self) -> float | None:
        """Until the first piece with text."""
        return self._at_s[0] - self._begun_s if self._at_s else None

    @property
    def tbt_s(self) -> float | None:
        """Mean gap between pieces."""
        return (self._at_s[-1] - self._at_s[0]) / (len(self._at_s) - 1) if len(self._at_s) > 1 else None


def render(api: GatewayApi) -> None:
    """The page."""
    st.title("Try it")
    try:
        cluster, classes = at_once(api.cluster, api.classes)
    except GatewayError as error:
        away(str(error), api.cluster)
        return
    max_tokens = int(st.sidebar.number_input("Most new tokens", 1, 32768, 256))
    temperature = float(st.sidebar.slider("Temperature", 0.0, 2.0, 0.0, 0.1))
    headers = _class_headers(classes)
    history: list[dict[str, Any]] = st.session_state.setdefault("history", [])
    if st.sidebar.button("New conversation", width="stretch"):
        history.clear()
    if cluster.get("missing"):
        st.warning(f"Requests are refused now: there is no {' and no '.join(cluster['missing'])}.")
    prompt = st.chat_input("Say something")
    if not history and not prompt:
        empty(
            "A conversation with the model", "Under each answer: how quick it was, and where it ran.", ":material/chat:"
        )
    for message in history:
        with st.chat_message(message["role"]):
            st.write(message["content"])
            if "note" in message:
                st.caption(message["note"])
    if prompt:
        _reply(api, cluster.get("served_model") or "", history, prompt, max_tokens, temperature, headers)


def class_headers(chosen: Mapping[str, Any]) -> dict[str, str]:
    """The header by which a request is of this class; none where no header does it."""
    for rule in chosen["rules"]:
        if rule["kind"] == "header":
            return {rule["header"]: rule["value"]}
    return {}


def note(found: Mapping[str, Any] | None, watch: Stopwatch) -> str:
    """What an answer took: as the gateway measured it, and as this console saw it."""
    placement = (found or {}).get("decision")
    measured = (placement or {}).get("measured")
    if placement is None or measured is None:
        return f"TTFT {seconds(watch.ttft_s)} · TBT {seconds(watch.tbt_s)}, as seen here"
    workers = list(dict.fromkeys([placement["prefill_worker"], placement["decode_worker"]]))
    predicted = placement["waited_s"] + placement["predicted"]["ttft_s"]
    parts = [
        f"TTFT **{seconds(measured['ttft_s'])}** (predicted {seconds(predicted)})",
        f"TBT **{seconds(measured['tbt_s'])}** (predicted {seconds(placement['predicted']['tbt_s'])})",
        f"{measured['output_tokens']} tokens",
        f"{measured['cached_tokens']} of {placement['prompt_tokens']} prompt tokens cached",
        " → ".join(plain(one) for one in workers),
        f"class {plain(placement['qos_class'])}",
    ]
    return " · ".join(parts)


def _class_headers(classes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Of the class that is chosen in the sidebar, among those that a header names."""
    named = {one["name"]: class_headers(one) for one in classes if class_headers(one)}
    if not named:
        return {}
    chosen = st.sidebar.selectbox("Class", [_NO_CLASS, *named])
    return named.get(chosen, {})


def _reply(
    api: GatewayApi,
    model: str,
    history: list[dict[str, Any]],
    prompt: str,
    max_tokens: int,
    temperature: float,
    headers: Mapping[str, str],
) -> None:
    """Streams one reply; the exchange joins the history only if it is whole."""
    question = {"role": "user", "content": prompt}
    messages = [{"role": one["role"], "content": one["content"]} for one in (*history, question)]
    request_id, watch = f"console-{secrets.token_hex(6)}", Stopwatch()
    st.chat_message("user").write(prompt)
    with st.chat_message("assistant"):
        try:
            pieces = api.chat(model, messages, max_tokens, temperature, request_id, headers)
            text = st.write_stream(watch.timing(pieces))
        except GatewayError as error:
            st.error(plain(error))
            return
        said = note(_found(api, request_id), watch)
        st.caption(said)
    history += [question, {"role": "assistant", "content": str(text), "note": said}]


def _found(api: GatewayApi, request_id: str) -> Mapping[str, Any] | None:
    """What the gateway says of it; None where it does not answer, which the next look at the page will tell."""
    try:
        return api.request(request_id)
    except GatewayError:
        return None
