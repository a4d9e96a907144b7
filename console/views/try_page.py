"""The Try it page: a conversation with the served model, with each answer's latency and workers.

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
    """Owns the arrival times of one answer's pieces, as seen by this console."""

    def __init__(self) -> None:
        self._begun_s = time.monotonic()
        self._at_s: list[float] = []

    def timing(self, pieces: Iterator[str]) -> Iterator[str]:
        """Passes the pieces on and notes their times."""
        for piece in pieces:
            if piece:
                self._at_s.append(time.monotonic())
            yield piece

    @property
    def ttft_s(self) -> float | None:
        """Time to the first piece with text."""
        return self._at_s[0] - self._begun_s if self._at_s else None

    @property
    def tbt_s(self) -> float | None:
        """Mean gap between pieces."""
        return (self._at_s[-1] - self._at_s[0]) / (len(self._at_s) - 1) if len(self._at_s) > 1 else None


def render(api: GatewayApi) -> None:
    """Draws the page."""
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
        st.warning(f"Requests are being refused: there is no {' and no '.join(cluster['missing'])}.")
    prompt = st.chat_input("Say something")
    if not history and not prompt:
        empty("A conversation with the model", "Each answer shows its latency and its workers.", ":material/chat:")
    for message in history:
        with st.chat_message(message["role"]):
            st.write(message["content"])
            if "note" in message:
                st.caption(message["note"])
    if prompt:
        _reply(api, cluster.get("served_model") or "", history, prompt, max_tokens, temperature, headers)


def class_headers(chosen: Mapping[str, Any]) -> dict[str, str]:
    """Header that selects this class; empty if no header does."""
    for rule in chosen["rules"]:
        if rule["kind"] == "header":
            return {rule["header"]: rule["value"]}
    return {}


def note(record: Mapping[str, Any] | None, watch: Stopwatch) -> str:
    """Describes an answer's latency as the gateway measured it, or as this console saw it."""
    placement = (record or {}).get("decision")
    measured = (placement or {}).get("measured")
    if placement is None or measured is None:
        return f"TTFT {seconds(watch.ttft_s)} · TBT {seconds(watch.tbt_s)}, as seen by this console"
    workers = list(dict.fromkeys([placement["prefill_worker"], placement["decode_worker"]]))
    predicted = placement["waited_s"] + placement["predicted"]["ttft_s"]
    parts = [
        f"TTFT **{seconds(measured['ttft_s'])}** (predicted {seconds(predicted)})",
        f"TBT **{seconds(measured['tbt_s'])}** (predicted {seconds(placement['predicted']['tbt_s'])})",
        f"{measured['output_tokens']} tokens",
        f"{measured['cached_tokens']} of {placement['prompt_tokens']} prompt tokens cached",
        " → ".join(plain(worker) for worker in workers),
        f"class {plain(placement['qos_class'])}",
    ]
    return " · ".join(parts)


def _class_headers(classes: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Headers of the class chosen in the sidebar, among classes that a header selects."""
    named = {qos_class["name"]: class_headers(qos_class) for qos_class in classes if class_headers(qos_class)}
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
    """Streams one reply. The exchange joins the history only if it is complete."""
    question = {"role": "user", "content": prompt}
    messages = [{"role": message["role"], "content": message["content"]} for message in (*history, question)]
    request_id, watch = f"console-{secrets.token_hex(6)}", Stopwatch()
    st.chat_message("user").write(prompt)
    with st.chat_message("assistant"):
        try:
            pieces = api.chat(model, messages, max_tokens, temperature, request_id, headers)
            text = st.write_stream(watch.timing(pieces))
        except GatewayError as error:
            st.error(plain(error))
            return
        caption = note(_record(api, request_id), watch)
        st.caption(caption)
    history += [question, {"role": "assistant", "content": str(text), "note": caption}]


def _record(api: GatewayApi, request_id: str) -> Mapping[str, Any] | None:
    """The gateway's record of a request; None if it does not answer."""
    try:
        return api.request(request_id)
    except GatewayError:
        return None
