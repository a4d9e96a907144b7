"""`halfmoon chat`: what is asked, what is shown, and what is said where there is no answer."""

from __future__ import annotations

import asyncio
import dataclasses
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from halfmoon.cli.chat import ChatOptions, chat
from tests.services.gateway import fakes
from tests.services.gateway.fakes import Fleet, Script, running_fleet, served_model


async def said(fleet: Fleet | None, *questions: str, **options: Any) -> str:
    shown = StringIO()
    url = "http://127.0.0.1:9" if fleet is None else fleet.http
    terminal = Console(file=shown, width=140)
    assert await asyncio.to_thread(chat, ChatOptions(url, **options), terminal, iter(questions)) == 0
    return shown.getvalue()


def prompts(worker: Any) -> list[str]:
    return [bytes(one.generation.prompt_token_ids).decode() for one in worker.calls.prefills]


async def test_a_conversation(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script("hello [/b]", cached_tokens=3))
        shown = await said(fleet, "hi", "", "more", "/new", "/system be brief", "again", "/exit", "never", system="so")
        asked = prompts(prefill)
    assert shown.count("hello [/b]\n") == 3
    assert "first token" in shown
    assert "11 tokens, prompt 18 (3 cached) · p0 → d0" in shown
    assert asked == [
        "system:so\nuser:hi\n",
        "system:so\nuser:hi\nassistant:hello [/b]\nuser:more\n",
        "system:be brief\nuser:again\n",
    ]


async def test_parameters_keys_and_limits(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, api_key=("secret",)) as fleet:
        prefill, _ = await fleet.pair(Script("hello"))
        shown = await said(fleet, "hi", api_key="secret", parameters={"temperature": 0.0, "max_tokens": 2})
        sampling = prefill.calls.prefills[0].generation.sampling
        assert "401: an API key is needed" in await said(fleet, "hi")
    assert "he\n" in shown
    assert "cut off" in shown
    assert "p0" not in shown  # the control API needs the operator token
    assert (sampling.temperature, sampling.max_tokens) == (0.0, 2)


async def test_what_goes_wrong_is_said_and_the_conversation_goes_on(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("hello"))
        shown = await said(fleet, "/what", "x" * 500, "hi")
    assert "there is no /what" in shown
    assert "400: the context length is" in shown
    assert "hello" in shown
    assert "no answer from http://127.0.0.1:9" in await said(None, "hi")


async def test_reasoning_is_shown_and_not_sent_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = dataclasses.replace(served_model(), reasons=True)
    monkeypatch.setattr(fakes, "served_model", lambda aliases: model)
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script("<think>hm</think>yes"))
        shown = await said(fleet, "hi", "more")
        asked = prompts(prefill)
    assert shown.count("hm\n\nyes\n") == 2
    assert asked[1] == "user:hi\nassistant:yes\nuser:more\n"
