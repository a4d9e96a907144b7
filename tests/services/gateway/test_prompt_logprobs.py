"""Log-probabilities of prompts: `prompt_logprobs` of vLLM's clients, and `echo` with `logprobs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.services.gateway.fakes import MODEL, Fleet, Script, running_fleet

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def answer(fleet: Fleet, path: str = COMPLETIONS, **body: Any) -> tuple[int, Any]:
    async with aiohttp.ClientSession(fleet.http) as session, session.post(path, json=body) as response:
        return response.status, await response.json()


async def test_an_echo_has_those_of_the_prompt_first(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script("de"))
        _, said = await answer(fleet, prompt=["abc", "xy"], echo=True, logprobs=1, max_tokens=1, n=2)
        sampling = [one.generation.sampling for one in prefill.calls.prefills]
    choice, second, third, _ = said["choices"]
    assert choice["text"] == "abcd"
    assert choice["logprobs"] == {
        "tokens": ["a", "b", "c", "d"],
        "token_logprobs": [None, -1.0, -2.0, -0.5],
        "top_logprobs": [None, {"A": 0.0, "b": -1.0}, {"A": 0.0, "c": -2.0}, {"A": -0.5, "d": -0.5}],
        "text_offset": [0, 1, 2, 3],
    }
    assert second["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, -0.5]
    assert third["logprobs"]["tokens"] == ["x", "y", "d"]
    assert sorted(one.HasField("num_prompt_logprobs") for one in sampling) == [False, False, True, True]


@pytest.mark.parametrize("text", ["d", ""])
async def test_what_ends_the_output_is_the_last_entry(tmp_path: Path, text: str) -> None:
    """lm-evaluation-harness takes the last entry for the output's, and all before it for the prompt's."""
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script(text))
        _, said = await answer(fleet, prompt="abc", echo=True, logprobs=0, max_tokens=2)
    (choice,) = said["choices"]
    assert (choice["text"], choice["finish_reason"]) == (f"abc{text}", "stop")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0, *([-0.5] * (len(text) + 1))]
    assert choice["logprobs"]["text_offset"] == list(range(len(text) + 4))


async def test_an_echo_alone_needs_a_worker_and_returns_no_output(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script("de"))
        _, said = await answer(fleet, prompt="abc", echo=True, logprobs=0, max_tokens=0)
        await fleet.until_idle()
    (choice,) = said["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert said["usage"] == {**said["usage"], "prompt_tokens": 3, "completion_tokens": 0}
    assert prefill.calls.prefills[0].generation.sampling.max_tokens == 1


async def test_nothing_but_the_prompt_may_be_asked_for_by_either_name(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("de"))
        status, said = await answer(fleet, prompt="abc", echo=True, prompt_logprobs=0, max_tokens=0)
    assert (status, said["choices"][0]["text"]) == (200, "abc")
    assert [one and list(one) for one in said["choices"][0]["prompt_logprobs"]] == [None, ["98"], ["99"]]


async def test_an_echo_is_streamed_with_them(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("de"))
        stream = await fleet.client.completions.create(
            model=MODEL, prompt="abc", echo=True, logprobs=0, max_tokens=2, stream=True
        )
        chunks = [chunk.choices[0] async for chunk in stream]
    assert "".join(chunk.text for chunk in chunks) == "abcde"
    found = [one for chunk in chunks if chunk.logprobs for one in chunk.logprobs.token_logprobs or ()]
    assert found == [None, -1.0, -2.0, -0.5, -0.5]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_prompt_logprobs_are_by_token_id(tmp_path: Path, path: str) -> None:
    asked: dict[str, Any] = (
        {"prompt": "ab"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "x"}]}
    )
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("de"))
        _, said = await answer(fleet, path, **asked, prompt_logprobs=1, max_tokens=1)
        _, without = await answer(fleet, path, **asked, max_tokens=1)
    shown = said["choices"][0] if path == COMPLETIONS else said
    first, second, *_ = shown["prompt_logprobs"]
    token = "b" if path == COMPLETIONS else "s"
    assert first is None
    assert second == {
        str(ord(token)): {"logprob": -1.0, "rank": 6, "decoded_token": token},
        "65": {"logprob": 0.0, "rank": 1, "decoded_token": "A"},
    }
    assert "prompt_logprobs" not in (without["choices"][0] if path == COMPLETIONS else without)


@pytest.mark.parametrize(
    ("extra", "param"),
    [({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"), ({"prompt_logprobs": 21}, "prompt_logprobs")],
)
async def test_what_cannot_be_is_refused_by_name(tmp_path: Path, extra: dict[str, Any], param: str) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair()
        status, said = await answer(fleet, prompt="a", **extra)
        assert (status, said["error"]["param"]) == (400, param)


async def test_a_long_prompt_has_only_so_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.openai.generation_request._MOST_PROMPT_LOGPROBS", 10)
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair()
        for fields in ({"prompt": "abcdef"}, {"prompt": "abc", "n": 2}, {"prompt": ["abc", "abc"]}):
            status, said = await answer(fleet, **fields, echo=True, logprobs=1)
            assert (status, said["error"]["param"]) == (400, "logprobs")
