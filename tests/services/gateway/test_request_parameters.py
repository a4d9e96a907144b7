"""Parameters of vLLM's clients: what reaches the workers and the chat template, and what the response then says."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from halfmoon.pb.types_pb2 import SamplingParams
from tests.services.gateway.fakes import MODEL, Fleet, Script, running_fleet, served_model

HI: list[Any] = [{"role": "user", "content": "hi"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def answer(fleet: Fleet, path: str, **body: Any) -> tuple[int, Any]:
    own: dict[str, dict[str, Any]] = {CHAT: {"messages": HI}, COMPLETIONS: {"prompt": "hi"}, "/tokenize": {}}
    said = own.get(path, {"input": "hi"})
    async with aiohttp.ClientSession(fleet.http) as session, session.post(path, json={**said, **body}) as response:
        return response.status, await response.json()


async def sampled(tmp_path: Path, path: str, **body: Any) -> SamplingParams:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair()
        status, said = await answer(fleet, path, **body)
        assert status == 200, said
        return prefill.calls.prefills[0].generation.sampling


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/responses"])
async def test_allowed_tokens_and_bad_words_reach_the_workers(tmp_path: Path, path: str) -> None:
    sampling = await sampled(tmp_path, path, allowed_token_ids=[104, 104, 105], bad_words=["no", " x"], temperature=150)
    assert list(sampling.allowed_token_ids) == [104, 105]
    assert [bytes(word.ids) for word in sampling.bad_words] == [b"no", b" no", b"x", b" x"]
    assert sampling.temperature == 150


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"allowed_token_ids": [257]}, "allowed_token_ids"),
        ({"allowed_token_ids": [5], "response_format": {"type": "json_object"}}, "allowed_token_ids"),
        ({"bad_words": ["a"], "structured_outputs": {"regex": "a"}}, "bad_words"),
        ({"bad_words": [""]}, "bad_words[0]"),
        ({"prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"documents": [{"title": "t"}], "prompt": "hi"}, "documents"),
        ({"documents": ["t"]}, "documents[0]"),
        ({"chat_template": "{{ messages }}"}, "chat_template"),
        ({"chat_template_kwargs": {"documents": []}}, "chat_template_kwargs.documents"),
    ],
)
async def test_what_cannot_be_is_refused_by_name(tmp_path: Path, extra: dict[str, Any], param: str) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair()
        status, said = await answer(fleet, COMPLETIONS if "prompt" in extra else CHAT, **extra)
        assert (status, said["error"]["param"]) == (400, param), said


async def test_documents_are_for_templates_that_read_them(tmp_path: Path) -> None:
    documents = [{"title": "t", "text": "x"}]
    model = dataclasses.replace(served_model(), takes_documents=True)
    async with running_fleet(tmp_path, model=model) as fleet:
        prefill, _ = await fleet.pair()
        status, _ = await answer(fleet, CHAT, documents=documents)
        prompt = bytes(prefill.calls.prefills[0].generation.prompt_token_ids).decode()
        assert status == 200
        assert json.dumps({"documents": documents}) in prompt
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair()
        status, said = await answer(fleet, CHAT, documents=documents)
        assert (status, said["error"]["param"]) == (400, "documents")


async def test_a_template_of_the_request_is_used_where_that_is_allowed(tmp_path: Path) -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    async with running_fleet(tmp_path, trust_request_chat_template=True) as fleet:
        prefill, _ = await fleet.pair()
        status, _ = await answer(fleet, CHAT, chat_template=template)
        assert status == 200
        assert bytes(prefill.calls.prefills[0].generation.prompt_token_ids) == b"<user>hi"
        _, said = await answer(fleet, "/tokenize", messages=HI, chat_template=template)
        assert bytes(said["tokens"]) == b"<user>hi"
        for path in (CHAT, "/tokenize"):
            status, said = await answer(fleet, path, messages=HI, chat_template="{{ 'x' * 9999999999 }}")
            assert (status, said["error"]["param"]) == (400, "chat_template"), said


async def test_running_usage_counts_the_tokens_that_were_sent(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("hello"))
        options: Any = {"include_usage": True, "continuous_usage_stats": True}
        stream = await fleet.client.chat.completions.create(
            model=MODEL, messages=HI, stream=True, stream_options=options
        )
        sent, counted = 0, []
        async for chunk in stream:
            assert chunk.usage is not None
            sent += sum(len(choice.delta.content or "") for choice in chunk.choices)
            counted.append((sent, chunk.usage.completion_tokens))
    assert (counted[0], counted[-1]) == ((0, 0), (5, 6))  # a token a character, and the end of the sequence
    assert all(completion == sent or (sent, completion) == (5, 6) for sent, completion in counted)


async def test_the_drawn_token_is_among_the_likeliest_of_a_completion(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("ab"))
        none = await fleet.client.completions.create(model=MODEL, prompt="x", logprobs=0)
        two = await fleet.client.completions.create(model=MODEL, prompt="x", logprobs=2)
    assert none.choices[0].logprobs is not None
    assert none.choices[0].logprobs.top_logprobs == [{"a": -0.5}, {"b": -0.5}, {"": -0.5}]  # the end has no text
    assert two.choices[0].logprobs is not None
    assert two.choices[0].logprobs.top_logprobs == [
        {"A": -0.5, "B": -1.5, "a": -0.5},
        {"A": -0.5, "B": -1.5, "b": -0.5},
        {"A": -0.5, "B": -1.5, "": -0.5},
    ]


async def test_what_a_client_got_can_be_sent_back(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("hello"))
        chat = await fleet.client.chat.completions.create(model=MODEL, messages=HI)
        said: Any = chat.choices[0].message.model_dump()
        status, _ = await answer(fleet, CHAT, messages=[*HI, said, *HI], unknown=None)
        response = await fleet.client.responses.create(model=MODEL, input="hi")
        items: Any = [item.model_dump() for item in response.output]
        again, _ = await answer(fleet, "/v1/responses", input=[*items, {"role": "user", "content": "hi"}])
    assert (status, again) == (200, 200)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_timing_is_in_the_body_where_it_is_asked_for(tmp_path: Path, path: str) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("hello"))
        _, said = await answer(fleet, path, return_timing=True)
        timing = said["timing"]
        assert timing.keys() == {"queue_s", "prefill_s", "ttft_s", "tbt_s", "e2e_s"}
        assert 0 < timing["ttft_s"] <= timing["e2e_s"]
        assert timing["tbt_s"] >= 0
        assert "timing" not in (await answer(fleet, path))[1]
        body = {"messages": HI} if path == CHAT else {"prompt": "hi"}
        async with (
            aiohttp.ClientSession(fleet.http) as session,
            session.post(path, json={**body, "stream": True, "return_timing": True}) as response,
        ):
            chunks = [json.loads(line[6:]) for line in (await response.text()).split("\n\n") if "{" in line]
        assert [chunk for chunk in chunks if "timing" in chunk] == chunks[-1:]
        assert (chunks[-1]["choices"], "usage" in chunks[-1]) == ([], False)


async def test_calls_that_were_joined_from_a_stream_can_be_sent_back(tmp_path: Path) -> None:
    litellm = {"provider_specific_fields": {"refusal": None}}
    call = {"index": 0, "id": "c", "type": "function", "function": {"name": "f", "arguments": "{}", **litellm}}
    messages = [
        *HI,
        {"role": "assistant", "content": "", "tool_calls": [call | litellm], "thinking_blocks": [], **litellm},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
    ]
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair()
        status, said = await answer(fleet, CHAT, messages=messages)
        assert status == 200, said
