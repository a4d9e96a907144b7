"""The API over the running system: constraints survive the hand-over, choices share a prompt, tokens are counted."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import jsonschema
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASK = [{"role": "user", "content": "Describe a person as JSON. " + "Keep it short. " * 20}]


async def asked(http: aiohttp.ClientSession, path: str, **body: Any) -> Any:
    async with http.post(path, json={"model": "demo", **body}) as response:
        assert response.status == 200, await response.text()
        return await response.json()


async def test_choices_of_one_prompt_keep_a_schema(http: aiohttp.ClientSession) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    answer = await asked(http, "/v1/chat/completions", messages=ASK, n=3, seed=1, response_format=form)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)
    assert len(set(texts)) > 1
    alone = await asked(http, "/v1/chat/completions", messages=ASK, seed=2, response_format=form)
    assert alone["choices"][0]["message"]["content"] == texts[1]
    assert alone["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_a_grammar_and_a_response(http: aiohttp.ClientSession) -> None:
    rules: dict[str, Any] = {"regex": "(red|green|blue)( (red|green|blue)){4}"}
    answer = await asked(http, "/v1/responses", input="Name five colours.", structured_outputs=rules)
    words = answer["output"][0]["content"][0]["text"].split(" ")
    assert (answer["status"], len(words)) == ("completed", 5)
    assert set(words) <= {"red", "green", "blue"}


async def test_what_is_tokenized_is_what_is_counted(http: aiohttp.ClientSession) -> None:
    told = await asked(http, "/tokenize", messages=ASK)
    answer = await asked(http, "/v1/chat/completions", messages=ASK, max_tokens=1)
    assert told["count"] == answer["usage"]["prompt_tokens"]
    text = await asked(http, "/detokenize", tokens=told["tokens"])
    again = await asked(http, "/tokenize", prompt=text["prompt"], add_special_tokens=False)
    assert again["tokens"] == told["tokens"]


async def test_echo_and_the_best(http: aiohttp.ClientSession) -> None:
    prompt = "The capital of France is"
    answer = await asked(http, "/v1/completions", prompt=prompt, echo=True, best_of=3, max_tokens=5)
    (choice,) = answer["choices"]
    assert choice["text"].startswith(prompt)
    assert answer["usage"]["completion_tokens"] > 5


async def test_the_demo_model_can_be_made_to_call_a_tool(http: aiohttp.ClientSession) -> None:
    number = {"n": {"enum": [1, 2]}}
    parameters = {"type": "object", "properties": number, "required": ["n"], "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    answer = await asked(http, "/v1/chat/completions", messages=ASK, tools=tools, tool_choice="required", max_tokens=80)
    (call, *_) = answer["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] == "f"
    assert json.loads(call["function"]["arguments"]) in ({"n": 1}, {"n": 2})
