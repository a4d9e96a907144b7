"""Reasoning is parted from the answer, wherever the pieces are cut, in all three APIs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.gateway.replies.call_parts import CallPart, ReasoningPart
from services.gateway.replies.chat_format import ToolTurn
from services.gateway.replies.reasoning import ReasoningSplitter, is_begun_by, is_ended_by, reasons
from services.gateway.replies.tagged_calls import HERMES, TaggedCalls
from services.gateway.replies.text_stream import TextPiece
from services.gateway.replies.tool_parsers import NamedCall
from tests.services.gateway import fakes
from tests.services.gateway.fakes import MODEL, Script, running_fleet, served_model
from tests.services.gateway.test_messages import BODY, post

HI: list[Any] = [{"role": "user", "content": "hi"}]
THOUGHT = "<think>\nhm < a?\n</think>\n\nyes"
CASES = [
    (False, "just text", "", "just text"),
    (False, " <thin", "", " <thin"),
    (False, THOUGHT, "hm < a?\n", "yes"),
    (False, "\n<think></think>yes", "", "yes"),
    (False, "a <think>b</think>", "", "a <think>b</think>"),
    (True, "\n hm</think> \nyes</think>", "hm", "yes</think>"),
    (True, " </think>", "", ""),
    (True, "never ends </thi", "never ends </thi", ""),
    (False, "<think>cut", "cut", ""),
]


@given(st.sampled_from(CASES), st.data())
def test_pieces_do_not_matter(case: tuple[bool, str, str, str], data: st.DataObject) -> None:
    is_begun, text, thought, answer = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for is_shown in (True, False):
        splitter = ReasoningSplitter(None, is_begun=is_begun, is_shown=is_shown)
        found = [part for piece in pieces for part in splitter.push(piece)] + splitter.flush(is_cut_off=False)
        assert "".join(part for part in found if isinstance(part, str)) == answer
        shown = "".join(part.text for part in found if isinstance(part, ReasoningPart))
        assert shown == (thought if is_shown else "")


def test_calls_are_found_behind_the_reasoning_alone() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    splitter = ReasoningSplitter(TaggedCalls(HERMES), is_begun=True, is_shown=True)
    found = [*splitter.push(f"or {call}?</think>so{call}"), *splitter.flush(is_cut_off=False)]
    assert found[0] == ReasoningPart(f"or {call}?")
    assert found[1] == "so"
    assert [part.name for part in found if isinstance(part, CallPart)] == ["f"]


def test_what_templates_tell() -> None:
    assert reasons("{{ '<think>' }}")
    assert not reasons("{{ messages }}")
    assert not reasons(None)
    assert is_begun_by("assistant:<think>\n")
    assert not is_begun_by("assistant:<think>\n\n</think>\n\n")
    assert is_ended_by("assistant:<think>\n\n</think>\n\n")


@pytest.fixture
def _reasoning(monkeypatch: pytest.MonkeyPatch) -> None:
    model = dataclasses.replace(served_model(), reasons=True, tool_format="hermes")
    monkeypatch.setattr(fakes, "served_model", lambda aliases: model)


@pytest.mark.usefixtures("_reasoning")
async def test_a_chat(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script(THOUGHT))
        create = fleet.client.chat.completions.create
        whole = await create(model=MODEL, messages=HI)
        stream = await create(model=MODEL, messages=HI, stream=True)
        deltas = [choice.delta.model_dump() for chunk in [one async for one in stream] for choice in chunk.choices]
        silent = await create(model=MODEL, messages=HI, extra_body={"include_reasoning": False})
        message: Any = whole.choices[0].message.model_dump(exclude_none=True)
        await create(model=MODEL, messages=[*HI, message, *HI])
        forced = await create(model=MODEL, messages=HI, response_format={"type": "json_object"})
    assert (message["content"], message["reasoning_content"], message["reasoning"]) == ("yes", "hm < a?\n", "hm < a?\n")
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == "hm < a?\n"
    assert "".join(delta["content"] or "" for delta in deltas) == "yes"
    assert "reasoning" not in silent.choices[0].message.model_dump()
    assert silent.choices[0].message.content == "yes"
    assert forced.choices[0].message.content == THOUGHT  # a structured output has no room for reasoning
    assert b"assistant:yes" in bytes(prefill.calls.prefills[3].generation.prompt_token_ids)


@pytest.mark.parametrize(("begun", "tags"), [("", (7, 9)), ("<think>\n", (None, 9)), ("<think></think>", None)])
async def test_a_structure_binds_what_follows_the_reasoning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: str, tags: tuple[int | None, int] | None
) -> None:
    model = dataclasses.replace(served_model(), reasons=True, reasoning_tags=(7, 9))
    monkeypatch.setattr(fakes, "served_model", lambda aliases: model)
    answer = 'so</think>{"a": 1}'.removeprefix("" if tags else "so</think>")
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script(answer if begun else f"<think>{answer}"))
        whole = await fleet.client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": begun}], response_format={"type": "json_object"}
        )
        constraint = prefill.calls.prefills[0].generation.sampling.constraint
    said: Any = whole.choices[0].message
    assert said.content == '{"a": 1}'
    assert getattr(said, "reasoning_content", None) == ("so" if tags else None)
    begin = constraint.begins_reasoning if constraint.HasField("begins_reasoning") else None
    end = constraint.ends_reasoning if constraint.HasField("ends_reasoning") else None
    assert (begin, end) == (tags or (None, None))


@pytest.mark.usefixtures("_reasoning")
async def test_a_response_and_a_message(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script(THOUGHT))
        response = await fleet.client.responses.create(model=MODEL, input="hi")
        async with fleet.client.responses.stream(model=MODEL, input="hi") as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_response()
        _, message = await post(fleet, BODY)
        _, events = await post(fleet, BODY | {"stream": True})
    assert (
        [item.type for item in response.output] == [item.type for item in streamed.output] == ["reasoning", "message"]
    )
    assert response.output[0].model_dump()["content"] == [{"type": "reasoning_text", "text": "hm < a?\n"}]
    assert response.output_text == streamed.output_text == "yes"
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    thinking, text = message["content"]
    assert (thinking["thinking"], text["text"]) == ("hm < a?\n", "yes")
    starts = [event["content_block"]["type"] for event in events if event["type"] == "content_block_start"]
    assert starts == ["thinking", "text"]
    assert "".join(event.get("delta", {}).get("thinking", "") for event in events) == "hm < a?\n"


def test_a_named_call_behind_reasoning_ends_like_one_without() -> None:
    def new_parser() -> ReasoningSplitter:
        return ReasoningSplitter(NamedCall("f"), is_begun=True, is_shown=True)

    turn = ToolTurn(new_parser())
    parts = turn.parts(TextPiece("hm</think>{}", (), "stop"))
    assert [type(part) for part in parts] == [ReasoningPart, CallPart]
    assert (turn.has_calls, turn.ends_in_calls) == (True, False)


async def test_usage_counts_the_tokens_of_reasoning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dataclasses.replace(served_model(), reasons=True, reasoning_tags=(ord("<"), ord("/")))
    monkeypatch.setattr(fakes, "served_model", lambda aliases: model)
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script(THOUGHT))
        chat = await fleet.client.chat.completions.create(model=MODEL, messages=HI, n=2)
        response = await fleet.client.responses.create(model=MODEL, input="hi")
        cut = await fleet.client.responses.create(model=MODEL, input="hi", max_output_tokens=5)
    num_tokens = THOUGHT.index("/") + 1
    assert chat.usage is not None
    assert chat.usage.completion_tokens_details is not None
    assert chat.usage.completion_tokens_details.reasoning_tokens == 2 * num_tokens
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens == num_tokens
    assert cut.usage is not None
    assert cut.usage.output_tokens_details.reasoning_tokens == 5
