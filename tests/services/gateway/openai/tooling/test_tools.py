"""Tools: rendered by the template, called by the model or by force, found in its text, streamed."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from halfmoon.engine.request import ONE_LINE_STYLE
from halfmoon.pb.types_pb2 import Constraint
from services.gateway.openai.bodies.messages import Message
from services.gateway.openai.bodies.tools import FunctionDefinition, NamedFunction, NamedTool, Tool
from services.gateway.openai.tooling.described_tools import with_described_tools
from services.gateway.openai.tooling.tool_constraints import constraint_of_choice
from services.gateway.replies.call_parts import CallPart, ToolParser
from services.gateway.replies.stop_strings import StopStrings
from services.gateway.replies.tagged_calls import DEEPSEEK, HERMES, CallList
from services.gateway.replies.tool_parsers import (
    PARSERS,
    FirstCall,
    NamedCall,
    ToolFormat,
    format_of_template,
    parser_of,
)
from tests.services.gateway import fakes
from tests.services.gateway.fakes import MODEL, Script, running_fleet, served_model

HI: list[Any] = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "time"}},
]
ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'
TWO = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'


@pytest.fixture(autouse=True)
def _model_with_tools(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    tool_format: ToolFormat = "llama3_json" if request.node.name.startswith("test_llama3") else "hermes"
    model = dataclasses.replace(served_model(), tool_format=tool_format, context_tokens=2_000)
    monkeypatch.setattr(fakes, "served_model", lambda aliases: model)
    monkeypatch.setattr(fakes, "CONTEXT_TOKENS", 2_000)


CODER = (
    "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n"
    "<parameter=b>\ntwo\nlines\n</parameter>\n</function>\n</tool_call>"
)


def allowed(mode: str, *names: str) -> dict[str, Any]:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


MAKERS: dict[str, Callable[[], ToolParser]] = {
    **{str(name): maker for name, maker in PARSERS.items()},
    "required": CallList,
    "first": lambda: FirstCall(PARSERS["hermes"]()),
    "named": lambda: NamedCall("f"),
}


def calls_of(message: Any) -> list[tuple[str, Any]]:
    return [(one.function.name, json.loads(one.function.arguments)) for one in message.tool_calls or ()]


async def test_the_model_decides(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script(f"Let me see.{ONE}\n{TWO}"))
        answer = await fleet.client.chat.completions.create(model=MODEL, messages=HI, tools=TOOLS)
        stream = await fleet.client.chat.completions.create(model=MODEL, messages=HI, tools=TOOLS, stream=True)
        chunks = [chunk.choices[0] async for chunk in stream]
        prompt = bytes(prefill.calls.prefills[0].generation.prompt_token_ids).decode()
    choice = answer.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("Let me see.", "tool_calls")
    assert calls_of(choice.message) == [("weather", {"city": "Rom"}), ("time", {})]
    assert len({one.id for one in choice.message.tool_calls or ()}) == 2
    deltas = [call for chunk in chunks for call in chunk.delta.tool_calls or ()]
    assert [(call.index, call.function and call.function.name) for call in deltas] == [(0, "weather"), (1, "time")]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "Let me see."
    assert chunks[-1].finish_reason == "tool_calls"
    assert prompt.startswith(f"tools:{json.dumps(TOOLS)}\n")


async def test_none_means_no_tools(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script(ONE))
        answer = await fleet.client.chat.completions.create(model=MODEL, messages=HI, tools=TOOLS, tool_choice="none")
        assert answer.choices[0].message.content == ONE
        assert b"tools" not in bytes(prefill.calls.prefills[0].generation.prompt_token_ids)


async def test_a_named_tool_is_forced_and_its_arguments_stream(tmp_path: Path) -> None:
    named: Any = {"type": "function", "function": {"name": "weather"}}
    asked: dict[str, Any] = {"model": MODEL, "messages": HI, "tools": TOOLS, "tool_choice": named}
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script('{"city": "Rom"}'))
        answer = await fleet.client.chat.completions.create(**asked)
        chunks = [chunk.choices[0] async for chunk in await fleet.client.chat.completions.create(**asked, stream=True)]
        constraint = prefill.calls.prefills[0].generation.sampling.constraint
    assert (constraint.kind, json.loads(constraint.source)) == (
        Constraint.JSON_SCHEMA,
        {**PARAMETERS, "additionalProperties": False, "x-guidance": ONE_LINE_STYLE},
    )
    assert calls_of(answer.choices[0].message) == [("weather", {"city": "Rom"})]
    assert answer.choices[0].finish_reason == "stop"
    deltas = [call.function for chunk in chunks for call in chunk.delta.tool_calls or () if call.function]
    assert [one.name for one in deltas if one.name] == ["weather"]
    assert len(deltas) > 1
    assert "".join(one.arguments or "" for one in deltas) == '{"city": "Rom"}'


async def test_some_tool_is_required(tmp_path: Path) -> None:
    text = '[{"name": "weather", "parameters": {"city": "Rom"}}, {"name": "time", "parameters": {}}]'
    asked: dict[str, Any] = {"model": MODEL, "messages": HI, "tools": TOOLS, "tool_choice": "required"}
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script(text))
        answer = await fleet.client.chat.completions.create(**asked)
        await fleet.client.chat.completions.create(**asked, parallel_tool_calls=False)
        any_tool: Any = asked | {"tool_choice": "any"}
        await fleet.client.chat.completions.create(**any_tool)
        schemas = [json.loads(one.generation.sampling.constraint.source) for one in prefill.calls.prefills]
    assert calls_of(answer.choices[0].message) == [("weather", {"city": "Rom"}), ("time", {})]
    assert answer.choices[0].finish_reason == "tool_calls"
    assert answer.choices[0].message.content is None
    assert [schema.get("maxItems") for schema in schemas] == [None, 1, None]


async def test_some_of_the_tools_are_allowed(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script(TWO))
        for mode in ("auto", "required"):
            choice: Any = allowed(mode, "time")
            await fleet.client.chat.completions.create(model=MODEL, messages=HI, tools=TOOLS, tool_choice=choice)
        function: Any = {"type": "function", "name": "time"}
        chosen: Any = {"type": "allowed_tools", "mode": "auto", "tools": [function]}
        other: Any = {"type": "function", "name": "weather"}
        await fleet.client.responses.create(model=MODEL, input="hi", tools=[function, other], tool_choice=chosen)
        prompts = [bytes(one.generation.prompt_token_ids).decode() for one in prefill.calls.prefills]
        constraint = prefill.calls.prefills[1].generation.sampling.constraint
    assert all('"time"' in prompt and "weather" not in prompt for prompt in prompts)
    assert "weather" not in constraint.source
    assert "time" in constraint.source


async def test_the_model_may_call_one_tool_alone(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script(f"{ONE}{TWO}"))
        answer = await fleet.client.chat.completions.create(
            model=MODEL, messages=HI, tools=TOOLS, parallel_tool_calls=False
        )
    assert calls_of(answer.choices[0].message) == [("weather", {"city": "Rom"})]


async def test_a_mistral_model_gets_ids_as_its_template_wants_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = dataclasses.replace(served_model(), tool_format="mistral", context_tokens=2_000)
    monkeypatch.setattr(fakes, "served_model", lambda aliases: model)
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script('[TOOL_CALLS]weather[ARGS]{"city": "Rom"}'))
        answer = await fleet.client.chat.completions.create(model=MODEL, messages=HI, tools=TOOLS)
        called: Any = answer.choices[0].message.model_dump(exclude_none=True)
        result: Any = {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "sunny"}
        await fleet.client.chat.completions.create(model=MODEL, messages=[*HI, called, result], tools=TOOLS)
        prompt = bytes(prefill.calls.prefills[1].generation.prompt_token_ids).decode()
    assert calls_of(answer.choices[0].message) == [("weather", {"city": "Rom"})]
    (answered,) = re.findall(r"^tool/(\w+):sunny$", prompt, re.MULTILINE)
    assert len(answered) == 9
    assert f'"id": "{answered}"' in prompt


async def test_llama3_calls(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script('{"name": "weather", "parameters": {"city": "Rom"}}'))
        answer = await fleet.client.chat.completions.create(model=MODEL, messages=HI, tools=TOOLS)
    assert calls_of(answer.choices[0].message) == [("weather", {"city": "Rom"})]


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        ({"response_format": {"type": "regex", "pattern": "a"}}, "response_format"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "any", "tools": [TOOLS[1]]}}},
            "tool_choice.allowed_tools.mode",
        ),
        ({"tool_choice": allowed("auto", "other")}, "tool_choice"),
        ({"tool_choice": "required", "min_tokens": 3}, "min_tokens"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "nonsense"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
async def test_what_cannot_be_is_refused_by_name(tmp_path: Path, extra: dict[str, Any], param: str) -> None:
    body = {"model": MODEL, "messages": HI, "tools": TOOLS, **extra}
    async with running_fleet(tmp_path) as fleet, aiohttp.ClientSession(fleet.http) as session:
        await fleet.pair()
        async with session.post("/v1/chat/completions", json=body) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, param), error


async def test_llama3_calls_have_no_other_form_beside(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet, aiohttp.ClientSession(fleet.http) as session:
        await fleet.pair()
        body = {"model": MODEL, "messages": HI, "tools": TOOLS, "response_format": {"type": "json_object"}}
        async with session.post("/v1/chat/completions", json=body) as response:
            error = (await response.json())["error"]
            assert (response.status, error["param"]) == (400, "response_format"), error


def accepts(grammar: str, text: str) -> bool:
    """Whether a text is a whole output by a Lark grammar."""
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar))
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


@pytest.mark.parametrize("parallel", [True, False])
async def test_an_answer_of_some_form_or_calls(tmp_path: Path, parallel: bool) -> None:
    """As agents ask for: tools, and at the end an answer by a schema."""
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script(ONE))
        answer = await fleet.client.chat.completions.create(
            model=MODEL, messages=HI, tools=TOOLS, response_format=form, parallel_tool_calls=parallel
        )
        constraint = prefill.calls.prefills[0].generation.sampling.constraint
    assert calls_of(answer.choices[0].message) == [("weather", {"city": "Rom"})]
    assert constraint.kind == Constraint.GRAMMAR
    for text, is_allowed in (
        ('{"x": 1}', True),
        ('{ "x": 1}', True),
        ('{  "x": 1}', False),
        (ONE.replace(": ", ":"), False),
        (ONE, True),
        (f"{ONE}\n{TWO}", parallel),
        ("so", False),
        ('{"x": 1}' + ONE, False),
        (ONE.replace("Rom", 'Rom", "country": "it'), False),
        (ONE.replace("weather", "other"), False),
    ):
        assert accepts(constraint.source, text) == is_allowed, text


async def test_a_forced_call_leaves_no_answer_to_bind(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script('[{"name": "time", "parameters": {}}]'))
        answer = await fleet.client.chat.completions.create(
            model=MODEL, messages=HI, tools=TOOLS, tool_choice="required", response_format={"type": "json_object"}
        )
        schema = json.loads(prefill.calls.prefills[0].generation.sampling.constraint.source)
    assert calls_of(answer.choices[0].message) == [("time", {})]
    assert schema["type"] == "array"


def test_arguments_are_those_that_a_schema_names() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
    tool = Tool(type="function", function=FunctionDefinition(name="f", parameters=parameters))
    choice = NamedTool(type="function", function=NamedFunction(name="f"))
    constraint = constraint_of_choice(choice, [tool], parallel=True)
    assert constraint is not None
    assert json.loads(constraint.source)["additionalProperties"] is False


HISTORY: list[Any] = [
    {"role": "user", "content": "hi"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c", "type": "function", "function": {"name": "time", "arguments": '{"zone": "é"}'}}],
    },
    {"role": "tool", "tool_call_id": "c", "content": "noon"},
]
BEFORE = (
    'user:hi\nassistant:<tool_call>\n{"name": "time", "arguments": {"zone": "é"}}\n</tool_call>\n'
    "user:<tool_response>\nnoon\n</tool_response>\n"
)


@pytest.mark.parametrize("system", [None, "Be brief."])
async def test_a_model_without_tools_is_told_in_plain_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str | None
) -> None:
    model = dataclasses.replace(served_model(), context_tokens=2_000)
    monkeypatch.setattr(fakes, "served_model", lambda aliases: model)
    messages = HISTORY if system is None else [{"role": "system", "content": system}, *HISTORY]
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script(ONE))
        answer = await fleet.client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS)
        none = await fleet.client.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, tool_choice="none"
        )
        asked, plain = (bytes(one.generation.prompt_token_ids).decode() for one in prefill.calls.prefills)
    assert calls_of(answer.choices[0].message) == [("weather", {"city": "Rom"})]
    assert none.choices[0].message.content == ONE
    head, _, rest = asked.partition("You can call functions.")
    assert head == "system:" + (f"{system}\n\n" if system else "")
    assert [json.loads(line) for line in rest.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()] == [
        tool["function"] for tool in TOOLS
    ]
    assert asked.endswith(f"\n{BEFORE}")
    assert plain == (f"system:{system}\n" if system else "") + BEFORE


@pytest.mark.parametrize(
    ("kind", "text", "content", "num_calls"),
    [
        ("hermes", f'so {ONE}<tool_call>{{"name": "we', "so ", 1),
        ("hermes", "a < b <tool", "a < b <tool", 0),
        ("hermes", "so <tool_cal", "so ", 0),
        ("qwen3_coder", f"so {CODER}<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n", "so ", 1),
        ("llama3_json", '{"name', '{"name', 0),
        ("llama3_json", '{"name"', "", 0),
        ("llama3_json", '{"type": "function", "fun', "", 0),
        ("llama3_json", '{"type": "function", "name": "weather", "pa', "", 0),
        ("llama3_json", '{"name": "weather", "param', "", 0),
        ("llama3_json", '{"city": "Ro', '{"city": "Ro', 0),
        ("required", '[{"name": "f", "parameters": {}}, {"name": "g", "par', "", 1),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"a": ', "", 0),
        ("pythonic", "[f(a=1), g(b=", "", 1),
        ("deepseek", "so<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>g<｜tool▁s", "so", 0),
    ],
)
def test_a_call_that_was_cut_off_is_no_content(kind: str, text: str, content: str, num_calls: int) -> None:
    found, calls = parsed(MAKERS[kind](), [text], is_cut_off=True)
    assert (found, len(calls)) == (content, num_calls)


def test_parameters_without_an_end_are_read_once() -> None:
    """Each of them once had all that follows searched for its sign: minutes for an answer of 100,000 characters."""
    content, calls = parsed(parser_of("qwen3_coder", {})(), [f"<function=f>{'<parameter=' * 10_000}</function>"])
    assert (content, calls) == ("", [("f", "{}")])


def test_results_and_what_is_said_with_them_are_one_turn() -> None:
    messages = [Message.model_validate(one) for one in (*HISTORY, HISTORY[2] | {"content": "late"}, HI[0], HI[0])]
    said = with_described_tools(messages, [])
    assert [one.role for one in said] == ["user", "assistant", "user", "user"]
    assert said[2].text.split("\n") == [
        *("<tool_response>", "noon", "</tool_response>", "<tool_response>", "late", "</tool_response>", "hi")
    ]


def test_values_without_types_have_those_of_their_schemas() -> None:
    deep: dict[str, Any] = {}
    for _ in range(1_000):
        deep = {"anyOf": [deep]}
    written = {
        "text": ("5", {"type": "string"}, "5"),
        "perhaps": ("5", {"anyOf": [{"type": "string"}, {"type": "null"}]}, "5"),
        "none": ("null", {"type": ["string", "null"]}, None),
        "whole": ("5", {"type": "integer"}, 5),
        "wrong": ("five", {"type": "integer"}, "five"),
        "huge": ("1e999", {"type": "number"}, "1e999"),
        "flag": ("True", {"type": "boolean"}, True),
        "list": ('[1, {"a": null}]', {"type": "array"}, [1, {"a": None}]),
        "object": ('{"a": 1}', {"$ref": "#/$defs/A"}, {"a": 1}),
        "choice": ("1", {"enum": ["1", "2"]}, "1"),
        "unknown": ("5", None, "5"),
        "no_schema": ("5", {"type": 5, "enum": None, "anyOf": {}, "oneOf": "string"}, 5),
        "deep": ("5", deep, 5),
    }
    schemas = {name: schema for name, (_, schema, _) in written.items() if schema is not None}
    values = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, (text, _, _) in written.items())
    parser = parser_of("qwen3_coder", {"f": {"type": "object", "properties": schemas}})()
    content, ((name, arguments),) = parsed(parser, [f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"])
    assert (content, name) == ("", "f")
    assert json.loads(arguments) == {name: value for name, (_, _, value) in written.items()}


async def test_types_of_values_come_from_the_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dataclasses.replace(served_model(), tool_format="qwen3_coder", context_tokens=2_000)
    monkeypatch.setattr(fakes, "served_model", lambda aliases: model)
    parameters = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script(CODER))
        answer = await fleet.client.chat.completions.create(model=MODEL, messages=HI, tools=tools)
    assert calls_of(answer.choices[0].message) == [("f", {"a": 1, "b": "two\nlines"})]


def test_formats_of_templates() -> None:
    assert format_of_template(None) is None
    assert format_of_template("{{ messages }}") is None
    assert format_of_template("{% if tools %}<tool_call>{% endif %}") == "hermes"
    assert format_of_template("{% if tools %}<tool_call><function=f><parameter=a>{% endif %}") == "qwen3_coder"
    assert format_of_template('{% if tools %}{"name": "parameters": }"parameters"{% endif %}') == "llama3_json"
    assert format_of_template("{% if tools %}[TOOL]{% endif %}") is None
    assert format_of_template("{% if tools %}[TOOL]{% endif %}", "pythonic") == "pythonic"
    assert format_of_template("{{ messages }}", "pythonic") is None
    assert format_of_template("{% if tools %}[TOOL_CALLS]{% endif %}") == "mistral"
    assert format_of_template("{% if tools %}like [func_name1(a=b)]{% endif %}") == "pythonic"
    assert format_of_template("{% if tools %}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{% endif %}") == "deepseek"


def parsed(parser: ToolParser, pieces: list[str], *, is_cut_off: bool = False) -> tuple[str, list[tuple[str, str]]]:
    found = [one for piece in pieces for one in parser.push(piece)] + parser.flush(is_cut_off=is_cut_off)
    calls: list[tuple[str, str]] = []
    for one in found:
        if isinstance(one, CallPart):
            if one.name is not None:
                assert one.id
                calls.append((one.name, ""))
            calls[one.index] = (calls[one.index][0], calls[one.index][1] + one.arguments)
    return "".join(one for one in found if isinstance(one, str)), calls


ARGS = '{"code": "say \\"%s\\" }"}'
QUOTED = f'{{"name": "f", "arguments": {ARGS}}}'
CASES: list[tuple[str, str, str, list[tuple[str, str]]]] = [
    ("hermes", "just text", "just text", []),
    ("hermes", "a < b <tool", "a < b <tool", []),
    ("hermes", f"a{ONE}b{TWO}", "ab", [("weather", '{"city": "Rom"}'), ("time", "{}")]),
    ("hermes", f"{ONE} \n{TWO}\n\nb\n", "b\n", [("weather", '{"city": "Rom"}'), ("time", "{}")]),
    ("hermes", ONE.removesuffix("</tool_call>"), "", [("weather", '{"city": "Rom"}')]),
    ("hermes", "x<tool_call>no call</tool_call>y", "x<tool_call>no call</tool_call>y", []),
    ("hermes", "<tool_call>{", "<tool_call>{", []),
    (
        "hermes",
        f"<tool_call>{QUOTED % HERMES.close}{HERMES.close}\n{TWO}",
        "",
        [("f", ARGS % HERMES.close), ("time", "{}")],
    ),
    ("hermes", f'<tool_call>{{"a": "</tool_call>\n{TWO}', '<tool_call>{"a": "</tool_call>', [("time", "{}")]),
    (
        "deepseek",
        f"{DEEPSEEK.open}f<｜tool▁sep｜>{ARGS % DEEPSEEK.close}{DEEPSEEK.close}",
        "",
        [("f", ARGS % DEEPSEEK.close)],
    ),
    ("hermes", '<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (
        "hermes",
        '<tool_call>{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}</tool_call>',
        "",
        [("f", '{"a": 1}')],
    ),
    ("qwen3_coder", "a < b <func", "a < b <func", []),
    ("qwen3_coder", f"so {CODER}\n\nthen", "so then", [("f", '{"a": "1", "b": "two\\nlines"}')]),
    ("qwen3_coder", f"{CODER}\n{CODER}", "", [("f", '{"a": "1", "b": "two\\nlines"}')] * 2),
    ("qwen3_coder", "<function=g>\n</function>", "", [("g", "{}")]),
    ("qwen3_coder", "<tool_call>\n<function=g>\n<parameter=a>\nx</function>", "", [("g", '{"a": "x"}')]),
    ("qwen3_coder", "<function=g</function>", "<function=g</function>", []),
    ("llama3_json", " plain", " plain", []),
    ("llama3_json", "{not a call", "{not a call", []),
    ("llama3_json", '{"name": "f", "parameters": {"a": 1}}; {"name": "g"}', "", [("f", '{"a": 1}'), ("g", "{}")]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    ("llama3_json", '{"type": "function", "function": {"name": "f", "parameters": {}}}', "", [("f", "{}")]),
    (
        "required",
        '[{"name": "f", "parameters": {"a": "]"}}, {"name": "g", "parameters": {}}]',
        "",
        [("f", '{"a": "]"}'), ("g", "{}")],
    ),
    ("named", '{"a": 1}', "", [("f", '{"a": 1}')]),
    ("first", f"a{ONE}b{TWO}", "ab", [("weather", '{"city": "Rom"}')]),
    ("mistral", "just [TOOL text", "just [TOOL text", []),
    (
        "mistral",
        'so [TOOL_CALLS] [{"name": "f", "arguments": {"a": "}"}}, {"name": "g", "arguments": {}}]',
        "so ",
        [("f", '{"a": "}"}'), ("g", "{}")],
    ),
    (
        "mistral",
        '[TOOL_CALLS]f[ARGS]{"a": {"b": 1}}[TOOL_CALLS]g.h[CALL_ID]x1[ARGS]{}',
        "",
        [("f", '{"a": {"b": 1}}'), ("g.h", "{}")],
    ),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', "", [("f", '{"a": 1}')]),
    ("pythonic", " [1] is a list", " [1] is a list", []),
    ("pythonic", "plain [f()]", "plain [f()]", []),
    ("pythonic", "[]", "[]", []),
    ("pythonic", "[f(1)]", "[f(1)]", []),
    ("pythonic", "[f(a=open('x'))]", "[f(a=open('x'))]", []),
    (
        "pythonic",
        """ [f(a=1, b=[-2.5, "x, ]\\"'"]), g.h(c={'d': None}, e=true)]\n""",
        "",
        [("f", '{"a": 1, "b": [-2.5, "x, ]\\"\'"]}'), ("g.h", '{"c": {"d": null}, "e": true}')],
    ),
    ("pythonic", "[I don't know] it", "[I don't know] it", []),
    ("pythonic", "[f(**{'a': [1]}, b=2)]", "", [("f", '{"a": [1], "b": 2}')]),
    ("pythonic", "[f(a=1), ] so", "so", [("f", '{"a": 1}')]),
    ("pythonic", "[f(**{1: 2})]", "[f(**{1: 2})]", []),
    ("pythonic", "[f(**g)]", "[f(**g)]", []),
    ("pythonic", "[f().g(a=1)]", "[f().g(a=1)]", []),
    ("pythonic", """[f(a='''it's\\'\n"''', b='')]""", "", [("f", '{"a": "it\'s\'\\n\\"", "b": ""}')]),
    ("pythonic", "[f(a=1), g(b='one\nline')]", " g(b='one\nline')]", [("f", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS]f{"a": 1} and so on', "and so on", [("f", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS]two words {"a": 1} here', 'two words {"a": 1} here', []),
    ("required", '[{"name": "f"}, {"no": "call"}] so', '{"no": "call"}] so', [("f", "{}")]),
    (
        "deepseek",
        "so <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": 1}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}'
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "so ",
        [("f", '{"a": 1}'), ("g", "{}")],
    ),
]


@given(st.sampled_from(CASES), st.data())
def test_pieces_do_not_matter(case: tuple[str, str, str, list[tuple[str, str]]], data: st.DataObject) -> None:
    kind, text, content, calls = case
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(MAKERS[kind](), pieces) == (content, calls)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("pythonic", "[I don't"), ("pythonic", f"[f({65 * '['}"), ("pythonic", f"[{300 * 'x'}")],
)
def test_what_can_be_no_call_is_not_held(kind: ToolFormat, text: str) -> None:
    assert "".join(map(str, PARSERS[kind]().push(text))) == text


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("hermes", f"<tool_call>{'}' * 3_000}"),
        ("hermes", "<tool_call></tool_call>" * 3_000),
        ("deepseek", "<｜tool▁call▁begin｜>" * 3_000),
        ("qwen3_coder", "<function=f>" + "<parameter=a>" * 1_000),
        ("mistral", f'[TOOL_CALLS]f[ARGS]{{"a": "{"}" * 3_000}'),
        ("mistral", "[TOOL_CALLS]" + "f{}" * 3_000),
        ("required", "{" + '"": {}, ' * 3_000),
        ("llama3_json", '{"name": "f"}' * 3_000),
    ],
)
def test_the_work_is_in_proportion_to_the_text(kind: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However it is cut: as many characters are given to searches and to the JSON decoder."""
    work = 0
    decode, push = json.JSONDecoder.raw_decode, StopStrings.push

    def counted_decode(self: json.JSONDecoder, text: str, idx: int = 0) -> Any:
        nonlocal work
        try:
            value, end = decode(self, text, idx)
        except ValueError:
            work += len(text) - idx
            raise
        work += end - idx
        return value, end

    def counted_push(self: StopStrings, text: str) -> str:
        nonlocal work
        work += len(text)
        return push(self, text)

    monkeypatch.setattr(json.JSONDecoder, "raw_decode", counted_decode)
    monkeypatch.setattr(StopStrings, "push", counted_push)
    parsed(MAKERS[kind](), [text])
    parsed(MAKERS[kind](), list(text))
    assert work <= 150 * len(text)


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        ("hermes", '<tool_call>{"name": "f", "arguments": {"x": %s}}</tool_call>'),
        ("mistral", '[TOOL_CALLS]f[ARGS]{"x": %s}'),
        ("llama3_json", '{"name": "f", "parameters": {"x": %s}}'),
        ("pythonic", "[f(x=%s)]"),
    ],
)
def test_arguments_can_be_sent_as_json(kind: ToolFormat, written: str) -> None:
    """Half of a character is replaced; with a number that JSON does not have there is no call."""
    content, calls = parsed(PARSERS[kind](), [written % '"a\\ud800"'])
    ((name, arguments),) = calls
    assert (content, name, json.loads(arguments.encode())["x"][0]) == ("", "f", "a")
    for number in ("1e999", "-1e999"):
        text = written % number
        assert parsed(PARSERS[kind](), [text])[1] == []
