"""gpt-oss' channels become reasoning, answer and calls, wherever the pieces are cut."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.replies.call_parts import CallPart, ReasoningPart
from services.gateway.replies.harmony import HarmonyMessages
from services.gateway.replies.tool_parsers import format_of_template
from tests.services.gateway import fakes
from tests.services.gateway.fakes import MODEL, Script, running_fleet, served_model

NEXT = "<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>hm < a?"
CALL = '<|channel|>commentary to=functions.get.it <|constrain|>json<|message|>{"a": 1}'
CASES = [
    (f"{THOUGHT}{NEXT}<|channel|>final<|message|>yes", "hm < a?", "yes", []),
    (f"{THOUGHT}{NEXT}{CALL}", "hm < a?", "", [("get.it", '{"a": 1}')]),
    (f"{CALL}<|call|><|start|>assistant{CALL}<|call|>", "", "", [("get.it", '{"a": 1}')] * 2),
    ('to=functions.f<|channel|>commentary json<|message|>{"a": 1}', "", "", [("f", '{"a": 1}')]),
    (f"<|channel|>commentary<|message|>Let me see.{NEXT}<|channel|>final<|message|>so", "", "Let me see.\nso", []),
    (f"{THOUGHT}{NEXT}<|channel|>analysis to=python <|message|>1+1", "hm < a?\n1+1", "", []),
    (f"{THOUGHT} <|en", "hm < a? <|en", "", []),
    (f"{THOUGHT}{NEXT}<|channel|>fin", "hm < a?", "", []),
    ("no channel at all", "", "no channel at all", []),
    ("<|channel|>commentary to=functions.f<|message|>not json", "", "not json", []),
]


@given(st.sampled_from(CASES), st.data())
def test_pieces_do_not_matter(case: tuple[str, str, str, list[tuple[str, str]]], data: st.DataObject) -> None:
    text, thought, answer, calls = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for is_shown in (True, False):
        messages = HarmonyMessages(is_shown=is_shown)
        found = [part for piece in pieces for part in messages.push(piece)] + messages.flush(is_cut_off=False)
        assert "".join(part for part in found if isinstance(part, str)) == answer
        assert "".join(part.text for part in found if isinstance(part, ReasoningPart)) == (thought if is_shown else "")
        assert [(part.name, part.arguments) for part in found if isinstance(part, CallPart)] == calls


def test_a_call_that_was_cut_off_is_left_out() -> None:
    messages = HarmonyMessages()
    assert messages.push(CALL.removesuffix("}")) == []
    assert messages.flush(is_cut_off=True) == []


def test_the_template_tells() -> None:
    assert format_of_template("{{ tools }}<|channel|>analysis, final") == "harmony"


@pytest.fixture
def _channels(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dataclasses.replace(served_model(), tool_format="harmony")
    monkeypatch.setattr(fakes, "served_model", lambda aliases: model)


@pytest.mark.usefixtures("_channels")
async def test_a_chat_and_a_form(tmp_path: Path) -> None:
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script(CASES[0][0]))
        create = fleet.client.chat.completions.create
        whole = await create(model=MODEL, messages=messages)
        stream = await create(model=MODEL, messages=messages, stream=True)
        deltas = [choice.delta.model_dump() for chunk in [one async for one in stream] for choice in chunk.choices]
        await create(model=MODEL, messages=messages, response_format={"type": "json_object"})
        prompt = bytes(prefill.calls.prefills[-1].generation.prompt_token_ids)
    said: Any = whole.choices[0].message
    assert (said.content, said.reasoning_content) == ("yes", "hm < a?")
    assert "".join(delta["content"] or "" for delta in deltas) == "yes"
    assert "".join(delta.get("reasoning") or "" for delta in deltas) == "hm < a?"
    assert prompt.endswith(b"<|channel|>final<|message|>")
