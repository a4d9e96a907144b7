"""The Try it page: tools, reasoning, structured answers, and two settings beside each other."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("streamlit.testing.v1")

from console.conversation import TOOLS_EXAMPLE, Answer, ChatSettings, read_schema, read_tools
from tests.console.fake_gateway import FakeGateway
from tests.console.test_console import open_page

CALLS = [
    {"delta": {"reasoning": "Which city? "}},
    {"delta": {"reasoning": "Paris."}},
    {"delta": {"tool_calls": [{"index": 0, "id": "c1", "function": {"name": "get_weather", "arguments": '{"ci'}}]}},
    {"delta": {"tool_calls": [{"index": 0, "function": {"arguments": 'ty": "Paris"}'}}]}},
    {"delta": {}, "finish_reason": "tool_calls"},
]


def test_calls_are_shown_and_their_results_go_on(gateway: FakeGateway) -> None:
    told = gateway.answers["/v1/chat/completions"]
    gateway.answers["/v1/chat/completions"] = (200, [{"choices": [choice]} for choice in CALLS])
    shown = open_page("try", gateway.url)
    next(one for one in shown.toggle if one.label == "Tools").set_value(True).run()
    shown.chat_input[0].set_value("Weather?").run()
    (tool,) = gateway.bodies[-1]["tools"]
    assert (tool["function"]["name"], gateway.bodies[-1]["tool_choice"]) == ("get_weather", "auto")
    assert [one.value for one in shown.code] == ['{"city": "Paris"}']
    assert any(one.value == "Which city? Paris." for one in shown.markdown)
    gateway.answers["/v1/chat/completions"] = told
    next(one for one in shown.text_input if one.label.startswith("Result of")).set_value("18 degrees")
    next(one for one in shown.button if one.label == "Send results").click().run()
    sent = gateway.bodies[-1]["messages"]
    assert [message["role"] for message in sent] == ["user", "assistant", "tool"]
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    thought = "Which city? Paris."
    assert sent[1] == {"role": "assistant", "content": None, "reasoning": thought, "tool_calls": [call]}
    assert sent[2] == {"role": "tool", "tool_call_id": "c1", "name": "get_weather", "content": "18 degrees"}
    assert any(one.value == "Hello" for one in shown.markdown)
    assert any(one.value == "18 degrees" for one in shown.markdown)
    assert not any(one.label == "Send results" for one in shown.button)
    shown.chat_input[0].set_value("Thanks").run()
    assert [message["role"] for message in gateway.bodies[-1]["messages"][3:]] == ["assistant", "user"]


def test_required_calls_are_required_until_their_results_are_there() -> None:
    settings = ChatSettings(5, None, None, None, "", read_tools(TOOLS_EXAMPLE), "required", None, "", {})
    asked, answered = {"role": "user", "content": "Weather?"}, {"role": "tool", "content": "18 degrees"}
    assert settings.body("m", [asked])["tool_choice"] == "required"
    assert settings.body("m", [asked, answered])["tool_choice"] == "auto"
    assert settings.body("m", [asked, answered, asked])["tool_choice"] == "required"


def test_two_settings_are_asked_the_same(gateway: FakeGateway) -> None:
    shown = open_page("try", gateway.url)
    shown.chat_input[0].set_value("Hi").run()
    next(one for one in shown.toggle if one.label == "Compare two settings").set_value(True).run()
    shown.slider(key="temperature B").set_value(1.5)
    shown.selectbox(key="class B").set_value("gold").run()
    shown.chat_input[0].set_value("And now?").run()
    asked = sorted(gateway.bodies[-2:], key=lambda body: float(body["temperature"]))
    assert [body["temperature"] for body in asked] == [0.0, 1.5]
    contents = [[message["content"] for message in body["messages"]] for body in asked]
    assert contents == [["Hi", "Hello", "And now?"]] * 2  # the second side begins with what the first one had
    assert any("temperature 1.5" in one.value and "class gold" in one.value for one in shown.caption)


def test_an_answer_of_a_schema(gateway: FakeGateway) -> None:
    events = [{"choices": [{"delta": {"content": '{"capital": "Paris"}'}, "finish_reason": "length"}]}]
    gateway.answers["/v1/chat/completions"] = (200, events)
    shown = open_page("try", gateway.url)
    shown.selectbox(key="format A").set_value("Schema").run()
    schema = json.loads(shown.text_area(key="schema A").value)
    shown.chat_input[0].set_value("France").run()
    assert gateway.bodies[-1]["response_format"]["json_schema"]["schema"] == schema
    assert [one.value for one in shown.code] == ['{"capital": "Paris"}']
    assert any("cut off" in one.value for one in shown.caption)
    num_asked = len(gateway.bodies)
    shown.text_area(key="schema A").set_value("{").run()
    assert "cannot be read as JSON" in shown.error[0].value
    shown.chat_input[0].set_value("Spain").run()
    assert len(gateway.bodies) == num_asked


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"type": "function"}]', '[{"function": {"name": 3}}]', "[" * 9999])
def test_what_is_no_list_of_tools(text: str) -> None:
    with pytest.raises(ValueError, match="tools"):
        read_tools(text)


def test_what_is_no_schema() -> None:
    with pytest.raises(ValueError, match="object"):
        read_schema("[]")


def test_an_answer_without_pieces() -> None:
    answer = Answer()
    answer.take({"delta": {"role": "assistant"}, "finish_reason": "stop"})
    assert (answer.ttft_s, answer.tbt_s, answer.finish_reason) == (None, None, "stop")
    assert answer.message() == {"role": "assistant", "content": None}


def test_reasoning_goes_back_with_its_answer() -> None:
    answer = Answer()
    answer.take({"delta": {"reasoning": "hm", "reasoning_content": "hm"}})
    answer.take({"delta": {"content": "yes"}, "finish_reason": "stop"})
    assert answer.message() == {"role": "assistant", "content": "yes", "reasoning": "hm"}
