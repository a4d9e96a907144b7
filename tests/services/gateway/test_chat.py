"""Chat completions and completions through the official client, over fake workers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from openai.types.chat import ChatCompletionChunk

from halfmoon.pb.prefill_pb2 import KVCodec
from tests.services.gateway.fakes import EOS, MODEL, Fleet, Script, running_fleet, soon

HI: list[Any] = [{"role": "user", "content": "hi"}]  # 8 tokens: "user:hi\n"


async def stream_chat(fleet: Fleet, **options: Any) -> list[ChatCompletionChunk]:
    stream = await fleet.client.chat.completions.create(model=MODEL, messages=HI, stream=True, **options)
    return [chunk async for chunk in stream]


def text_of(chunks: list[ChatCompletionChunk]) -> str:
    return "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)


async def post(fleet: Fleet, path: str, body: dict[str, Any]) -> str:
    async with aiohttp.ClientSession() as session, session.post(fleet.http + path, json=body) as response:
        assert response.status == 200
        return await response.text()


@pytest.mark.parametrize("colocated", [False, True])
async def test_chat_whole(tmp_path: Path, colocated: bool) -> None:
    async with running_fleet(tmp_path) as fleet:
        if colocated:
            await fleet.add("b0", "both", Script("hello", cached_tokens=3))
        else:
            await fleet.pair(Script("hello", cached_tokens=3))
        answer = await fleet.client.chat.completions.create(model=MODEL, messages=HI)
    assert answer.choices[0].message.content == "hello"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (8, 6, 14)
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


@pytest.mark.parametrize("colocated", [False, True])
async def test_chat_stream(tmp_path: Path, colocated: bool) -> None:
    async with running_fleet(tmp_path) as fleet:
        if colocated:
            await fleet.add("b0", "both")
        else:
            await fleet.pair()
        chunks = await stream_chat(fleet, max_tokens=4)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert text_of(chunks) == "hell"
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.object == "chat.completion.chunk" and chunk.usage is None for chunk in chunks)


async def test_the_stream_on_the_wire(tmp_path: Path) -> None:
    body = {"model": MODEL, "messages": HI, "stream": True, "stream_options": {"include_usage": True}}
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("ab"))
        text = await post(fleet, "/v1/chat/completions", body)
    events = text.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") for event in events)
    assert events.pop() == "data: [DONE]"
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-2]["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert all(chunk["choices"][0]["delta"]["content"] for chunk in chunks[1:-2])


async def test_completion(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("0123456789abcdefghij"))
        answer = await fleet.client.completions.create(model=MODEL, prompt="abc")
        stream = await fleet.client.completions.create(model=MODEL, prompt=[97, 98], stream=True, max_tokens=3)
        chunks = [chunk async for chunk in stream]
        listed = await fleet.client.completions.create(model=MODEL, prompt=["abcd"], max_tokens=1)
    assert answer.choices[0].text == "0123456789abcdef"
    assert answer.choices[0].finish_reason == "length"
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 16)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "012"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert listed.usage is not None
    assert listed.usage.prompt_tokens == 4


async def test_sampling_parameters_arrive_as_they_are(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair()
        await fleet.client.chat.completions.create(
            model=MODEL,
            messages=HI,
            max_completion_tokens=7,
            temperature=0.5,
            top_p=0.25,
            seed=-1,
            presence_penalty=1.5,
            frequency_penalty=-1.25,
            logit_bias={"5": -100, "6": 2},
            logprobs=True,
            top_logprobs=2,
            extra_body={
                "top_k": 11,
                "min_p": 0.125,
                "repetition_penalty": 1.25,
                "min_tokens": 3,
                "stop_token_ids": [9, 10, 9],
                "ignore_eos": True,
            },
        )
        request = prefill.calls.prefills[0]
    sampling = request.generation.sampling
    assert sampling.max_tokens == 7
    assert sampling.temperature == 0.5
    assert sampling.top_p == 0.25
    assert sampling.top_k == 11
    assert sampling.min_p == 0.125
    assert sampling.seed == 2**64 - 1
    assert sampling.presence_penalty == 1.5
    assert sampling.frequency_penalty == -1.25
    assert sampling.repetition_penalty == 1.25
    assert dict(sampling.logit_bias) == {5: -100, 6: 2}
    assert sampling.num_top_logprobs == 2
    assert sampling.min_tokens == 3
    assert list(sampling.stop_token_ids) == [9, 10]
    assert sampling.ignore_eos
    assert bytes(request.generation.prompt_token_ids) == b"user:hi\n"
    assert request.decode_address


async def test_defaults(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair()
        for _ in range(2):
            await fleet.client.chat.completions.create(model=MODEL, messages=HI)
        first, second = (request.generation.sampling for request in prefill.calls.prefills)
    assert first.max_tokens == 200 - 8
    assert (first.temperature, first.top_p, first.top_k, first.min_p) == (1, 1, 0, 0)
    assert first.repetition_penalty == 1
    assert not first.HasField("num_top_logprobs")
    assert first.seed != second.seed


async def test_messages_become_one_prompt(tmp_path: Path) -> None:
    messages: list[Any] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None},
        {"role": "user", "content": "x" * 50},
    ]
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair()
        await fleet.client.chat.completions.create(model=MODEL, messages=messages)
        prompt = bytes(prefill.calls.prefills[0].generation.prompt_token_ids).decode()
    assert prompt == f"system:be brief\nuser:ab\nassistant:\nuser:{'x' * 50}\n"


async def test_a_character_split_over_tokens_is_whole(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("aé🌓z"))
        chunks = await stream_chat(fleet)
        cut = await stream_chat(fleet, max_tokens=5)
    assert text_of(chunks) == "aé🌓z"
    assert not any("\ufffd" in (chunk.choices[0].delta.content or "") for chunk in chunks)
    assert text_of(cut) == "aé\ufffd"


@pytest.mark.parametrize(
    ("stop", "expected", "num_tokens"),
    [("h", "", 1), ("lo", "hel", 5), (["xx", "llo "], "he", 6), ("o w", "hell", 7), (["nothing"], "hello world", 12)],
)
async def test_stop_strings(tmp_path: Path, stop: str | list[str], expected: str, num_tokens: int) -> None:
    async with running_fleet(tmp_path) as fleet:
        _, decode = await fleet.pair(Script("hello world"))
        whole = await fleet.client.chat.completions.create(model=MODEL, messages=HI, stop=stop)
        chunks = await stream_chat(fleet, stop=stop, stream_options={"include_usage": True})
        if expected != "hello world":
            await soon(decode.calls.cancel_came.wait())
    assert whole.choices[0].message.content == expected
    assert whole.choices[0].finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.completion_tokens == num_tokens
    assert text_of(chunks) == expected
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == num_tokens


async def test_a_stop_token_has_no_text(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        worker = await fleet.add("b0", "both", Script("hi"))
        worker.script.stop_after = 2
        answer = await fleet.client.chat.completions.create(
            model=MODEL, messages=HI, extra_body={"stop_token_ids": [ord("i")]}
        )
    assert answer.choices[0].message.content == "h"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


async def test_chat_logprobs(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("é"))
        answer = await fleet.client.chat.completions.create(
            model=MODEL, messages=HI, logprobs=True, top_logprobs=2, max_tokens=2
        )
        chunks = await stream_chat(fleet, logprobs=True)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.logprob for entry in logprobs.content] == [-0.5, -0.5]
    assert [(top.token, top.logprob) for top in logprobs.content[0].top_logprobs] == [("A", -0.5), ("B", -1.5)]
    assert [entry.bytes for entry in logprobs.content] == [[0xC3], [0xA9]]  # halves of a character
    entries = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs
        for entry in choice.logprobs.content or ()
    ]
    assert len(entries) == 2  # the token that ends the sequence is not content
    assert all(entry.top_logprobs == [] for entry in entries)


async def test_completion_logprobs(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("abc"))
        answer = await fleet.client.completions.create(model=MODEL, prompt="x", logprobs=1, max_tokens=3)
        stream = await fleet.client.completions.create(model=MODEL, prompt="x", logprobs=0, max_tokens=3, stream=True)
        chunks = [chunk async for chunk in stream]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b", "c"]
    assert logprobs.token_logprobs == [-0.5, -0.5, -0.5]
    assert logprobs.text_offset == [0, 1, 2]
    assert logprobs.top_logprobs == [{"A": -0.5, drawn: -0.5} for drawn in "abc"]
    streamed = [chunk.choices[0].logprobs for chunk in chunks]
    assert [offset for one in streamed if one for offset in one.text_offset or ()] == [0, 1, 2]


async def test_token_ids_on_request(tmp_path: Path) -> None:
    body = {"model": MODEL, "prompt": "x", "return_token_ids": True}
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("é"))
        whole = json.loads(await post(fleet, "/v1/completions", body))
        events = (await post(fleet, "/v1/completions", {**body, "stream": True})).split("\n\n")[:-2]
        chat = json.loads(
            await post(fleet, "/v1/chat/completions", {"model": MODEL, "messages": HI, "return_token_ids": True})
        )
        plain = json.loads(await post(fleet, "/v1/completions", {**body, "return_token_ids": False}))
    expected = [*"é".encode(), EOS]
    assert whole["choices"][0]["token_ids"] == expected
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
    assert [token_id for choice in choices for token_id in choice["token_ids"]] == expected
    assert chat["choices"][0]["token_ids"] == expected
    assert "token_ids" not in plain["choices"][0]


async def test_twenty_streams_at_once(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        for number in range(2):
            await fleet.add(f"p{number}", "prefill", Script("the same text for all of them"))
            await fleet.add(f"d{number}", "decode", Script("the same text for all of them"))
        found = await asyncio.gather(*(stream_chat(fleet, max_tokens=n) for n in range(1, 21)))
        await fleet.until_idle()
        used = [len(worker.calls.prefills) for worker in fleet.by_address.values() if worker.role == "prefill"]
    assert [text_of(chunks) for chunks in found] == ["the same text for all of them"[:n] for n in range(1, 21)]
    assert sum(used) == 20
    assert all(used)


async def test_request_ids(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet, aiohttp.ClientSession() as session:
        prefill, _ = await fleet.pair()
        body = {"model": MODEL, "messages": HI}
        headers = {"X-Request-Id": "turn 7/a;b_c"}
        async with session.post(f"{fleet.http}/v1/chat/completions", json=body, headers=headers) as response:
            answer = await response.json()
            assert response.headers["X-Request-Id"] == "turn7ab_c"
        assert answer["id"] == "chatcmpl-turn7ab_c"
        assert prefill.calls.prefills[0].generation.request_id.startswith("turn7ab_c.")
        async with session.get(f"{fleet.http}/v1/models") as response:
            assert response.headers["X-Request-Id"]


@pytest.mark.parametrize("codec", ["raw", "lz4", "zstd", "int8", "int4", "fp8", "auto"])
async def test_the_prefill_worker_hears_how_kv_is_to_travel(tmp_path: Path, codec: str) -> None:
    async with running_fleet(tmp_path, handover_codec=codec) as fleet:
        prefill, _ = await fleet.pair()
        await fleet.client.chat.completions.create(model=MODEL, messages=HI)
        request = prefill.calls.prefills[0]
        assert KVCodec.Name(request.kv_codec).lower() == codec.replace("auto", "raw")
        assert request.chooses_codec == (codec == "auto")
