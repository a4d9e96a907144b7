"""Several outputs of one request: n, best_of, batches of prompts, echo, and what each chunk says of the usage."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from halfmoon.errors import HalfmoonError
from halfmoon.ledger.ledger import open_ledger
from halfmoon.pb.gateway_pb2 import LatencyProfile
from halfmoon.pb.prefill_pb2 import PrefillEvent, PrefillRequest
from halfmoon.policy.admission.qos_classes import ClassTable, QosClass
from tests.services.gateway import fakes
from tests.services.gateway.fakes import (
    MODEL,
    PATIENCE_S,
    FakeWorker,
    Fleet,
    Script,
    running_fleet,
    served_model,
    soon,
)

HI: list[Any] = [{"role": "user", "content": "hi"}]  # 8 tokens


async def post(fleet: Fleet, path: str, **body: Any) -> Any:
    async with aiohttp.ClientSession() as session, session.post(fleet.http + path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json() if response.content_type == "application/json" else await response.text()


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def prefilling_behind(gate: asyncio.Event) -> Callable[[FakeWorker, PrefillRequest], AsyncIterator[PrefillEvent]]:
    async def gated(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        await gate.wait()
        async for event in worker.usual_prefill(request):
            yield event

    return gated


async def test_n_choices_of_one_prompt(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script("hello", cached_tokens=3))
        answer = await fleet.client.chat.completions.create(model=MODEL, messages=HI, n=3, seed=7)
        asked = [request.generation for request in prefill.calls.prefills]
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {"hello"}
    assert asked[0].sampling.seed == 7
    assert {one.sampling.seed for one in asked[1:]} == {8, 9}  # they may come in any order
    assert len({one.request_id for one in asked}) == 3
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (8, 18)  # the prompt counts once
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 3


async def test_other_choices_wait_until_the_prompt_of_the_first_is_computed(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script("a"))
        prefill.on_prefill = prefilling_behind(gate)
        asking = asyncio.ensure_future(fleet.client.completions.create(model=MODEL, prompt=["x", "y"], n=3))
        await soon(prefill.calls.prefill_came.wait())
        for _ in range(100):
            await asyncio.sleep(0)
        prompts = [bytes(one.generation.prompt_token_ids) for one in prefill.calls.prefills]
        gate.set()
        answer = await soon(asking)
    assert sorted(prompts) in ([b"x"], [b"y"], [b"x", b"y"])
    assert [choice.index for choice in answer.choices] == list(range(6))


async def test_streamed_choices_are_told_apart(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("hello"))
        stream = await fleet.client.chat.completions.create(model=MODEL, messages=HI, n=2, stream=True)
        choices = [choice async for chunk in stream for choice in chunk.choices]
    for index in (0, 1):
        own = [choice for choice in choices if choice.index == index]
        assert own[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in own) == "hello"
        assert [choice.finish_reason for choice in own][-1] == "stop"


async def test_batches_of_prompts(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script("ok"))
        answer = await fleet.client.completions.create(model=MODEL, prompt=[[97], [98, 99]], n=2, seed=5)
        asked = {
            (bytes(one.generation.prompt_token_ids), one.generation.sampling.seed) for one in prefill.calls.prefills
        }
    assert [choice.text for choice in answer.choices] == ["ok"] * 4
    assert asked == {(b"a", 5), (b"a", 6), (b"bc", 5), (b"bc", 6)}
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3


async def test_best_of_gives_the_likeliest(tmp_path: Path) -> None:
    async def by_seed(worker: FakeWorker, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        async for event in worker.usual_prefill(request):
            if event.HasField("first_token"):
                event.first_token.token.logprob = -abs(request.generation.sampling.seed - 12)
            yield event

    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script("a"))
        prefill.on_prefill = by_seed
        options: dict[str, Any] = {"seed": 10, "best_of": 4, "n": 2, "max_tokens": 1}
        plain = await fleet.client.completions.create(model=MODEL, prompt="x", **options)
        told = await fleet.client.completions.create(model=MODEL, prompt="x", logprobs=0, **options)
    assert [choice.index for choice in plain.choices] == [0, 1]
    assert plain.choices[0].logprobs is None
    assert [choice.logprobs and choice.logprobs.token_logprobs for choice in told.choices] == [[0.0], [-1.0]]
    assert plain.usage is not None
    assert plain.usage.completion_tokens == 4


async def test_echo(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script("!"))
        whole = await post(fleet, "/v1/completions", model=MODEL, prompt=["ab", "c"], echo=True, n=2)
        streamed = events(await post(fleet, "/v1/completions", model=MODEL, prompt=[97, 98], echo=True, stream=True))
        num_asked = len(prefill.calls.prefills)
        nothing = await post(fleet, "/v1/completions", model=MODEL, prompt="ab", echo=True, max_tokens=0)
        assert len(prefill.calls.prefills) == num_asked
    assert [choice["text"] for choice in whole["choices"]] == ["ab!", "ab!", "c!", "c!"]
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == "ab!"
    assert (nothing["choices"][0]["text"], nothing["choices"][0]["finish_reason"]) == ("ab", "length")
    assert nothing["usage"]["completion_tokens"] == 0


async def test_the_usage_so_far_in_every_chunk(tmp_path: Path) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("abc"))
        text = await post(fleet, "/v1/completions", model=MODEL, prompt="xy", stream=True, stream_options=options)
    usages = [chunk["usage"] for chunk in events(text)]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts)
    assert (counts[-1], usages[0]["prompt_tokens"]) == (4, 2)
    assert all(usage["total_tokens"] == 2 + usage["completion_tokens"] for usage in usages)


async def test_one_failure_ends_all_choices(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        worker = await fleet.add("b0", "both", Script("x" * 100))
        worker.script.decode_gate = asyncio.Event()  # those that decode wait for ever
        num_asked = 0

        async def third_fails(_: FakeWorker, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
            nonlocal num_asked
            num_asked += 1
            if num_asked == 3:
                raise HalfmoonError("the third one")
            async for event in worker.usual_prefill(request):
                yield event

        worker.on_prefill = third_fails
        with pytest.raises(openai.InternalServerError, match="the third one"):
            await soon(fleet.client.chat.completions.create(model=MODEL, messages=HI, n=4))
        await fleet.until_idle()
    async with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        (row,) = await ledger.recent(10)
    assert (row.status, row.prompt_tokens) == ("error", 8)


def at_most_two(fleet: Fleet) -> None:
    """A step takes 10 ms and 10 for each sequence: three are too many."""
    fleet.gateway.routing.admission.classes = ClassTable((QosClass("default", tbt_s=0.035),))


STEPS = LatencyProfile(kind="k", prefill=(0.001, 0.0, 0.0), step=(0.01, 0.01, 0.0))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("asked", [{"prompt": "x", "n": 3}, {"prompt": ["x", "y", "z"]}, {"prompt": "x", "best_of": 3}])
async def test_outputs_that_would_miss_the_target_together_are_refused_before_any_begins(
    tmp_path: Path, asked: dict[str, Any], *, stream: bool
) -> None:
    async with running_fleet(tmp_path) as fleet, aiohttp.ClientSession(fleet.http) as session:
        worker = await fleet.add("b0", "both", Script("hello"), profile=STEPS)
        at_most_two(fleet)
        body = {"model": MODEL, "max_tokens": 8, **asked, "stream": stream and "best_of" not in asked}
        async with session.post("/v1/completions", json=body) as response:
            answer = await response.json()
            assert (response.status, answer["error"]["reason"]) == (429, "tbt")
            assert response.headers["Retry-After"] == "60"  # nobody is there who would leave
        assert worker.calls.prefills == []
        for _ in range(2):  # nothing of them is left
            fits = await fleet.client.completions.create(model=MODEL, prompt="x", n=2, max_tokens=8)
            assert [one.text for one in fits.choices] == ["hello"] * 2


async def test_outputs_that_wait_for_the_first_one_have_their_place(tmp_path: Path) -> None:
    gate = asyncio.Event()

    async with running_fleet(tmp_path) as fleet:
        worker = await fleet.add("b0", "both", Script("hello"), profile=STEPS)
        at_most_two(fleet)
        worker.on_prefill = prefilling_behind(gate)
        asking = asyncio.ensure_future(fleet.client.completions.create(model=MODEL, prompt="x", n=2, max_tokens=8))
        await soon(worker.calls.prefill_came.wait())
        with pytest.raises(openai.RateLimitError, match="between tokens"):
            await fleet.client.completions.create(model=MODEL, prompt="y", max_tokens=8)
        gate.set()
        assert [one.text for one in (await soon(asking)).choices] == ["hello"] * 2
        assert len(worker.calls.prefills) == 2


async def test_a_client_that_goes_away_takes_all_its_choices_along(tmp_path: Path) -> None:
    body = {"model": MODEL, "messages": HI, "n": 3, "stream": True}
    async with running_fleet(tmp_path) as fleet, aiohttp.ClientSession(fleet.http) as session:
        worker = await fleet.add("b0", "both", Script("x" * 100))
        worker.script.decode_gate = asyncio.Event()
        async with session.post("/v1/chat/completions", json=body) as response:
            while len(fleet.cluster.router) < 3:
                await soon(response.content.readline())
        await fleet.until_idle()
        async with asyncio.timeout(PATIENCE_S):
            while len(worker.calls.cancelled) < 3:
                worker.calls.cancel_came.clear()
                await worker.calls.cancel_came.wait()
    assert len(set(worker.calls.cancelled)) == 3


async def test_how_an_output_ended(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        worker = await fleet.add("b0", "both", Script("hello world"))
        kept = await post(
            fleet, "/v1/completions", model=MODEL, prompt="x", stop=["o w"], include_stop_str_in_output=True
        )
        late = await post(fleet, "/v1/completions", model=MODEL, prompt="x", stop=["l"], min_tokens=4)
        plain = await post(fleet, "/v1/completions", model=MODEL, prompt="x")
        worker.script.stop_after = 2
        token = await post(fleet, "/v1/completions", model=MODEL, prompt="x", stop_token_ids=[ord("e")])
    choices = [answer["choices"][0] for answer in (kept, late, plain, token)]
    assert [choice["text"] for choice in choices] == ["hello w", "hello wor", "hello world", "h"]
    assert [choice["stop_reason"] for choice in choices] == ["o w", "l", None, ord("e")]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}


async def test_names_tools_and_variables_reach_the_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dataclasses.replace(served_model(), tool_format="hermes")
    monkeypatch.setattr(fakes, "served_model", lambda aliases: model)
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "name": "Ann", "content": "1+1?"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
    ]
    body = {"messages": messages, "chat_template_kwargs": {"think": False}, "add_generation_prompt": False}
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair()
        await post(fleet, "/v1/chat/completions", model=MODEL, **body, priority=-3)
        generation = prefill.calls.prefills[0].generation
    seen = json.dumps([{**call, "function": {"name": "add", "arguments": {"a": 1}}}])
    text = bytes(generation.prompt_token_ids).decode()
    assert text == f'user/Ann:1+1?\nassistant:{seen}\ntool/c1:2\nkwargs:{{"think": false}}\nopen'
    assert generation.priority == -3


async def test_token_ids_of_prompts_and_outputs(tmp_path: Path) -> None:
    options: dict[str, Any] = {"model": MODEL, "return_token_ids": True, "max_tokens": 2}
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script("ab"))
        chat = await post(fleet, "/v1/chat/completions", messages=HI, **options)
        completion = await post(fleet, "/v1/completions", prompt=["x", "yz"], n=2, **options)
        options["stream"] = True
        chat_events = events(await post(fleet, "/v1/chat/completions", messages=HI, **options))
        completion_events = events(await post(fleet, "/v1/completions", prompt=["x", "yz"], **options))
        prompt = list(prefill.calls.prefills[0].generation.prompt_token_ids)
    assert chat["prompt_token_ids"] == prompt
    assert chat["choices"][0]["token_ids"] == [97, 98]
    assert [one["prompt_token_ids"] for one in completion["choices"]] == [[120], [120], [121, 122], [121, 122]]
    assert [one.get("prompt_token_ids") for one in chat_events] == [prompt, *[None] * (len(chat_events) - 1)]
    choices = [choice for event in completion_events for choice in event["choices"]]
    told = [(one["index"], one["prompt_token_ids"]) for one in choices if "prompt_token_ids" in one]
    assert sorted(told) == [(0, [120]), (1, [121, 122])]
    for index in (0, 1):
        assert [token for one in choices if one["index"] == index for token in one["token_ids"]] == [97, 98]


async def test_tokens_named_by_id(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("a"))
        options = {"model": MODEL, "return_tokens_as_token_ids": True, "max_tokens": 1}
        chat = await post(fleet, "/v1/chat/completions", messages=HI, logprobs=True, top_logprobs=1, **options)
        completion = await post(fleet, "/v1/completions", prompt="x", logprobs=1, **options)
    (entry,) = chat["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["top_logprobs"][0]["token"]) == ("token_id:97", "token_id:65")
    assert completion["choices"][0]["logprobs"]["tokens"] == ["token_id:97"]
    assert completion["choices"][0]["logprobs"]["top_logprobs"] == [{"token_id:65": -0.5, "token_id:97": -0.5}]
