"""The Try it page: conversations with the served model, with each answer's latency and workers.

Two settings can be compared: both are asked the same, each goes on with its own answers. The history lives in the
browser's session and nowhere else.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread
from typing import Any, NamedTuple

import streamlit as st

from console.conversation import (
    SCHEMA_EXAMPLE,
    TOOLS_EXAMPLE,
    Answer,
    ChatSettings,
    read_schema,
    read_tools,
)
from console.gateway_api import GatewayApi, GatewayError
from console.live import at_once, away, empty
from console.plain_text import plain
from console.quantities import seconds

_NO_CLASS = "by default"
_MODEL_DEFAULT = "the model's own"
_FORMATS = ("Text", "JSON", "Schema")
_EFFORTS = ("none", "low", "medium", "high")
_REDRAW_S = 0.08
_LABEL_CHARS = 80

History = list[dict[str, Any]]
"""Messages of the API, and under "note" and "is_json" how the page shows them."""


class Side(NamedTuple):
    """One of the conversations beside each other."""

    name: str  # "A" or "B"
    settings: ChatSettings
    history: History


def render(api: GatewayApi) -> None:
    """Draws the page."""
    st.title("Try it")
    look = partial(at_once, api.cluster, api.classes)
    try:
        cluster, classes = look()
    except GatewayError:
        away(look)
        return
    sides = _sides(classes)
    if cluster.get("missing"):
        st.warning(f"Requests are being refused: there is no {' and no '.join(cluster['missing'])}.")
    prompt = st.chat_input("Say something")
    if prompt and sides:
        for side in sides:
            side.history.append({"role": "user", "content": prompt})
    if not any(side.history for side in sides):
        empty("A conversation with the model", "Each answer shows its latency and its workers.", ":material/chat:")
    places = st.columns(len(sides)) if len(sides) > 1 else [st.container()]
    asked = []
    for side, place in zip(sides, places, strict=False):
        with place:
            if len(sides) > 1:
                st.caption(f"**{side.name}** · {described(side.settings)}")
            for message in side.history:
                _draw_message(message)
            if _results_given(side) or prompt:
                asked.append((side, st.empty()))
    if asked:
        _ask(api, cluster.get("served_model") or "", asked)


def class_headers(chosen: Mapping[str, Any]) -> dict[str, str]:
    """Header that selects this class; empty if no header does."""
    for rule in chosen["rules"]:
        if rule["kind"] == "header":
            return {rule["header"]: rule["value"]}
    return {}


def note(record: Mapping[str, Any] | None, watch: Answer) -> str:
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


def described(settings: ChatSettings) -> str:
    """A side's settings in a line."""
    parts = [
        "temperature of the model" if settings.temperature is None else f"temperature {settings.temperature:g}",
        "" if settings.top_p is None else f"top p {settings.top_p:g}",
        f"at most {settings.max_tokens} tokens",
        f"reasoning {settings.reasoning_effort}" if settings.reasoning_effort else "",
        _counted(len(settings.tools), "tool") if settings.tools else "",
        "JSON" if settings.is_json else "",
        f"class {plain(settings.class_name)}" if settings.class_name else "",
    ]
    return " · ".join(part for part in parts if part)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _sides(classes: Sequence[Mapping[str, Any]]) -> list[Side]:
    """The sides with the sidebar's settings; none if these cannot be read."""
    histories: dict[str, History] = st.session_state.setdefault("conversations", {"A": []})
    is_comparing = st.sidebar.toggle("Compare two settings")
    if st.sidebar.button("New conversation", width="stretch"):
        histories.clear()
        histories["A"] = []
    if is_comparing:
        histories.setdefault("B", [dict(message) for message in histories["A"]])
    else:
        histories.pop("B", None)
    sides = []
    for name, history in sorted(histories.items()):
        place = st.sidebar.expander(f"Settings {name}", expanded=True) if is_comparing else st.sidebar.container()
        with place:
            try:
                sides.append(Side(name, _settings(name, classes), history))
            except ValueError as error:
                st.error(plain(error))
                return []
    return sides


def _settings(key: str, classes: Sequence[Mapping[str, Any]]) -> ChatSettings:
    """The settings of one side, as its widgets have them. Raises ValueError for text that is not what it should be."""
    max_tokens = int(st.number_input("Most new tokens", 1, 32768, 256, key=f"max_tokens {key}"))
    has_own = st.checkbox("Temperature and top p of the model", key=f"defaults {key}")
    temperature = st.slider("Temperature", 0.0, 2.0, 0.0, 0.1, key=f"temperature {key}", disabled=has_own)
    top_p = st.slider("Top p", 0.05, 1.0, 1.0, 0.05, key=f"top_p {key}", disabled=has_own)
    named = {one["name"]: class_headers(one) for one in classes if class_headers(one)}
    class_name = st.selectbox("Class", [_NO_CLASS, *named], key=f"class {key}") if named else _NO_CLASS
    effort = st.selectbox("Reasoning effort", [_MODEL_DEFAULT, *_EFFORTS], key=f"effort {key}")
    system = st.text_area("System message", key=f"system {key}", height=68)
    kind = st.selectbox("Answer as", _FORMATS, key=f"format {key}")
    response_format = None
    if kind == "JSON":
        response_format = {"type": "json_object"}
    elif kind == "Schema":
        response_format = read_schema(st.text_area("JSON schema", SCHEMA_EXAMPLE, key=f"schema {key}", height=140))
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice = "auto"
    if st.toggle("Tools", key=f"has tools {key}"):
        tool_choice = st.selectbox("Calls", ["auto", "required", "none"], key=f"choice {key}")
        tools = read_tools(st.text_area("Tools as JSON", TOOLS_EXAMPLE, key=f"tools {key}", height=180))
    return ChatSettings(
        max_tokens,
        None if has_own else float(temperature),
        None if has_own or top_p == 1 else float(top_p),
        None if effort == _MODEL_DEFAULT else effort,
        system.strip(),
        tools,
        tool_choice,
        response_format,
        "" if class_name == _NO_CLASS else class_name,
        named.get(class_name, {}),
    )


def _draw_message(message: Mapping[str, Any]) -> None:
    with st.chat_message("assistant" if message["role"] == "tool" else message["role"]):
        if message.get("reasoning"):
            with st.expander("Reasoning"):
                st.write(message["reasoning"])
        if message["role"] == "tool":
            st.caption(f"Result of {plain(message['name'])}")
        if message.get("content"):
            _draw_text(message["content"], is_json=message.get("is_json", False))
        for call in message.get("tool_calls", ()):
            _draw_call(call["function"]["name"], call["function"]["arguments"])
        if "note" in message:
            st.caption(message["note"])


def _draw_text(text: str, *, is_json: bool) -> None:
    if is_json:
        st.code(text, "json", wrap_lines=True)
    else:
        st.write(text)


def _draw_call(name: str, arguments: str) -> None:
    st.caption(f":material/build: {plain(name)}")
    st.code(arguments, "json", wrap_lines=True)


def _call_label(function: Mapping[str, str], num_calls: int) -> str:
    """A call's name, with its arguments where there are several calls."""
    return plain(function["name"] if num_calls == 1 else f"{function['name']} {function['arguments']}", _LABEL_CHARS)


def _results_given(side: Side) -> bool:
    """Whether the results of the calls that end this conversation were just typed in; they are in the history then."""
    calls = side.history[-1].get("tool_calls", ()) if side.history else ()
    if not calls:
        return False
    place = st.empty()
    with place.container(), st.form(f"results {side.name} {len(side.history)}"):
        results = [
            st.text_input(f"Result of {_call_label(call['function'], len(calls))}", key=f"{call['id']} {side.name}")
            for call in calls
        ]
        if not st.form_submit_button("Send results"):
            return False
    place.empty()
    for call, result in zip(calls, results, strict=True):
        name = call["function"]["name"]
        side.history.append({"role": "tool", "tool_call_id": call["id"], "name": name, "content": result})
        _draw_message(side.history[-1])
    return True


def _ask(api: GatewayApi, model: str, asked: Sequence[tuple[Side, Any]]) -> None:
    """Streams the answers of all sides at once. An answer joins its history only if it is complete."""
    pieces: SimpleQueue[tuple[int, Mapping[str, Any] | str | None]] = SimpleQueue()
    is_over, answers = Event(), [Answer() for _ in asked]
    request_ids = [f"console-{secrets.token_hex(6)}" for _ in asked]
    for number, (side, _) in enumerate(asked):
        body = side.settings.body(model, [_as_sent(message) for message in side.history])
        arguments = (api, body, request_ids[number], side.settings.headers, pieces, number, is_over)
        Thread(target=_read, args=arguments, daemon=True).start()
    try:
        _follow(pieces, answers, asked)
    finally:
        is_over.set()  # the reader hangs up, and the gateway ends the request
    for (side, place), answer, request_id in zip(asked, answers, request_ids, strict=True):
        caption = "" if answer.error else note(_record(api, request_id), answer)
        if answer.finish_reason == "length":
            caption += " · cut off by the limit of tokens"
        _draw_answer(place, side, answer, caption)
        if answer.error:
            while side.history and side.history[-1]["role"] != "assistant":
                side.history.pop()
        else:
            shown = {"note": caption, "is_json": side.settings.is_json}
            side.history.append({**answer.message(), **shown})
    if any(answer.calls for answer in answers):
        st.rerun()  # draws the form for the results


def _read(
    api: GatewayApi,
    body: Mapping[str, Any],
    request_id: str,
    headers: Mapping[str, str],
    pieces: SimpleQueue[tuple[int, Mapping[str, Any] | str | None]],
    number: int,
    is_over: Event,
) -> None:
    """Passes on the choices of one answer, an error as text, and None at the end."""
    choices = api.chat(body, request_id, headers)
    try:
        for choice in choices:
            if is_over.is_set():
                return
            pieces.put((number, choice))
    except GatewayError as error:
        pieces.put((number, str(error)))
    finally:
        choices.close()  # type: ignore[attr-defined]
        pieces.put((number, None))


def _follow(
    pieces: SimpleQueue[tuple[int, Mapping[str, Any] | str | None]],
    answers: Sequence[Answer],
    asked: Sequence[tuple[Side, Any]],
) -> None:
    """Draws the answers as they come, until all have ended."""
    num_open, drawn_s = len(answers), 0.0
    while num_open:
        number, piece = pieces.get()
        if piece is None:
            num_open -= 1
        elif isinstance(piece, str):
            answers[number].error = piece
        else:
            answers[number].take(piece)
            if pieces.empty() or time.monotonic() - drawn_s > _REDRAW_S:
                side, place = asked[number]
                _draw_answer(place, side, answers[number])
                drawn_s = time.monotonic()


def _draw_answer(place: Any, side: Side, answer: Answer, caption: str = "") -> None:
    with place.container(), st.chat_message("assistant"):
        if answer.reasoning:
            with st.expander("Reasoning", expanded=not answer.text):
                st.write(answer.reasoning)
        if answer.text:
            _draw_text(answer.text, is_json=side.settings.is_json)
        for call in answer.calls:
            _draw_call(call.name, call.arguments)
        if answer.error:
            st.error(plain(answer.error))
        elif caption:
            st.caption(caption)


def _as_sent(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message of a history without what is for the page alone."""
    return {name: value for name, value in message.items() if name not in ("note", "is_json")}


def _record(api: GatewayApi, request_id: str) -> Mapping[str, Any] | None:
    """The gateway's record of a request; None if it does not answer."""
    try:
        return api.request(request_id)
    except GatewayError:
        return None
