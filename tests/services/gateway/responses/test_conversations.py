"""Responses that are kept: read, listed, deleted, and gone on from, by their owner alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from services.gateway.responses.conversations import MOST_TURNS
from tests.services.gateway import fakes
from tests.services.gateway.fakes import MODEL, Script, running_fleet


def last_prompt(worker: Any) -> str:
    return bytes(worker.calls.prefills[-1].generation.prompt_token_ids).decode()


def kept(response: Any) -> bool:
    """What a response says of itself; the SDK's type does not have it."""
    says: bool = response.store
    return says


async def test_three_turns_by_the_id_of_the_last(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script("ok"))
        first = await fleet.client.responses.create(model=MODEL, input="a", instructions="be brief")
        second = await fleet.client.responses.create(model=MODEL, input="b", previous_response_id=first.id)
        third = await fleet.client.responses.create(
            model=MODEL, input=[{"role": "user", "content": "c"}], previous_response_id=second.id
        )
        prompt = last_prompt(prefill)
    assert prompt == "user:a\nassistant:ok\nuser:b\nassistant:ok\nuser:c\n"
    assert (kept(first), second.previous_response_id, third.previous_response_id) == (True, first.id, second.id)


async def test_a_response_is_read_listed_and_deleted(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("ok"))
        client = fleet.client.responses
        items: list[Any] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
        made = await client.create(model=MODEL, input=[*items, {"role": "user", "content": "c"}], metadata={"k": "v"})
        assert (await client.retrieve(made.id)).model_dump() == made.model_dump()
        listed: Any = (await client.input_items.list(made.id, order="asc")).data
        assert [(one.role, one.content[0].text) for one in listed] == [("user", "a"), ("assistant", "b"), ("user", "c")]
        page = await client.input_items.list(made.id, limit=1)
        assert [one.id for one in page.data] == [listed[-1].id]
        assert page.has_next_page()
        after: Any = await client.input_items.list(made.id, limit=1, after=page.data[-1].id)
        assert after.data[0].id == listed[1].id
        await client.delete(made.id)
        for missing in (client.retrieve(made.id), client.delete(made.id), client.input_items.list(made.id)):
            with pytest.raises(openai.NotFoundError):
                await missing
        with pytest.raises(openai.NotFoundError) as error:
            await client.create(model=MODEL, input="d", previous_response_id=made.id)
        assert (error.value.code, error.value.param) == ("previous_response_not_found", "previous_response_id")


async def test_a_stream_is_kept_before_its_last_event(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("ok"))
        stream = await fleet.client.responses.create(model=MODEL, input="a", stream=True)
        async for event in stream:
            if event.type == "response.completed":
                stored = await fleet.client.responses.retrieve(event.response.id)
                assert stored.output_text == event.response.output_text == "ok"
                break
        else:
            pytest.fail("no end")


@pytest.mark.parametrize(
    ("mode", "store", "is_kept"),
    [("default", False, False), ("asked", None, False), ("asked", True, True), ("off", True, False)],
)
async def test_what_is_not_to_be_kept_is_not(tmp_path: Path, mode: str, store: bool | None, is_kept: bool) -> None:
    async with running_fleet(tmp_path, store_responses=mode) as fleet:
        await fleet.pair(Script("ok"))
        made = await fleet.client.responses.create(model=MODEL, input="secret", store=store)
        assert kept(made) is is_kept
        if is_kept:
            await fleet.client.responses.retrieve(made.id)
            return
        with pytest.raises(openai.NotFoundError):
            await fleet.client.responses.retrieve(made.id)
    assert b"secret" not in (tmp_path / "ledger.db").read_bytes()


@pytest.mark.parametrize("extra", [{"previous_response_id": "resp_x"}, {"background": True}])
async def test_where_nothing_is_kept_state_is_refused_by_name(tmp_path: Path, extra: dict[str, Any]) -> None:
    async with running_fleet(tmp_path, store_responses="off") as fleet:
        await fleet.pair()
        with pytest.raises(openai.BadRequestError) as error:
            await fleet.client.responses.create(model=MODEL, input="a", **extra)
    assert error.value.param == next(iter(extra))


async def test_a_conversation_object_is_refused_by_name(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair()
        with pytest.raises(openai.BadRequestError) as error:
            await fleet.client.responses.create(model=MODEL, input="a", conversation="conv_1")
        assert error.value.param == "conversation"
        with pytest.raises(openai.BadRequestError):
            await fleet.client.conversations.create()


async def test_another_tenants_response_is_not_there(tmp_path: Path) -> None:
    tenants = {"acme": {"keys": ["key-of-acme"]}, "other": {"keys": ["key-of-other"]}}
    async with running_fleet(tmp_path, tenants=tenants) as fleet:
        await fleet.pair(Script("ok"))
        mine, theirs = (fleet.client.with_options(api_key=f"key-of-{name}").responses for name in tenants)
        made = await mine.create(model=MODEL, input="a")
        assert (await mine.retrieve(made.id)).id == made.id
        for attempt in (
            theirs.retrieve(made.id),
            theirs.delete(made.id),
            theirs.cancel(made.id),
            theirs.input_items.list(made.id),
            theirs.create(model=MODEL, input="b", previous_response_id=made.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await attempt
        assert (await mine.retrieve(made.id)).id == made.id


async def test_a_client_does_not_choose_an_id(tmp_path: Path) -> None:
    """Else it could overwrite one, or make a circle of turns."""
    headers = {"X-Request-Id": "mine"}
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("ok"))
        made = await fleet.client.responses.create(model=MODEL, input="a", extra_headers=headers)
        assert "mine" not in made.id
        again = await fleet.client.responses.create(model=MODEL, input="a", extra_headers=headers)
        assert again.id == made.id  # a repeat of the same request
        other = await fleet.client.responses.create(
            model=MODEL, input="a", previous_response_id=made.id, extra_headers=headers
        )
        assert other.id != made.id


async def test_a_deleted_turn_in_the_middle_breaks_its_conversation_by_name(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("ok"))
        ids: list[str] = []
        for text in "abc":
            previous = ids[-1] if ids else None
            made = await fleet.client.responses.create(model=MODEL, input=text, previous_response_id=previous)
            ids.append(made.id)
        await fleet.client.responses.delete(ids[1])
        with pytest.raises(openai.NotFoundError, match=ids[1]):
            await fleet.client.responses.create(model=MODEL, input="d", previous_response_id=ids[2])
        await fleet.client.responses.create(model=MODEL, input="d", previous_response_id=ids[0])


async def test_a_hundred_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "CONTEXT_TOKENS", 100_000)
    async with running_fleet(tmp_path) as fleet:
        worker = await fleet.add("b0", "both", Script(""), total_blocks=10_000)
        previous = None
        for _ in range(100):
            made = await fleet.client.responses.create(model=MODEL, input="x", previous_response_id=previous)
            previous = made.id
        prompt = last_prompt(worker)
    assert prompt == "user:x\nassistant:\n" * 99 + "user:x\n"
    assert MOST_TURNS > 100


async def test_calls_and_their_results_are_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fakes, "CONTEXT_TOKENS", 100_000)
    tool: Any = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
    async with running_fleet(tmp_path) as fleet:
        worker = await fleet.add("b0", "both", Script('{"name": "look", "parameters": {}}'))
        first = await fleet.client.responses.create(model=MODEL, input="a", tools=[tool], tool_choice="required")
        call: Any = first.output[0]
        assert call.type == "function_call"
        worker.script = Script("done")
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
        await fleet.client.responses.create(model=MODEL, input=[result], previous_response_id=first.id, tools=[tool])
        prompt = last_prompt(worker)
    assert "42" in prompt
    assert '"name": "look"' in prompt


async def test_two_gateways_on_one_ledger_see_each_others(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as one, running_fleet(tmp_path) as other:
        workers = await one.pair(Script("ok"))
        await other.join(*workers)
        made = await one.client.responses.create(model=MODEL, input="a")
        assert (await other.client.responses.retrieve(made.id)).output_text == "ok"
        await other.client.responses.create(model=MODEL, input="b", previous_response_id=made.id)
        await other.client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError):
            await one.client.responses.retrieve(made.id)


async def test_an_answer_comes_though_the_ledger_is_away_and_says_that_it_is_not_kept(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("ok"))
        (tmp_path / "ledger.db").unlink()
        made = await fleet.client.responses.create(model=MODEL, input="a")
        assert (made.output_text, kept(made)) == ("ok", False)


@pytest.mark.parametrize(
    "response_id", ["resp_x", "..%2F..%2Fetc%2Fpasswd", "%00", "x" * 5000, "'; DROP TABLE files; --"]
)
async def test_odd_ids_are_not_there(tmp_path: Path, response_id: str) -> None:
    async with running_fleet(tmp_path) as fleet, aiohttp.ClientSession(fleet.http) as session:
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")):
            async with session.request(method, f"/v1/responses/{response_id}{path}") as response:
                assert response.status == 404, await response.text()
        body = {"model": MODEL, "input": "a", "previous_response_id": response_id}
        async with session.post("/v1/responses", json=body) as response:
            assert response.status in (400, 404), await response.text()


async def test_a_foreground_response_is_not_cancelled(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair()
        made = await fleet.client.responses.create(model=MODEL, input="a")
        with pytest.raises(openai.BadRequestError, match="synchronous"):
            await fleet.client.responses.cancel(made.id)
        with pytest.raises(openai.BadRequestError, match="background"):
            await fleet.client.responses.retrieve(made.id, stream=True)


@pytest.mark.parametrize("store", [True, False])
async def test_the_kv_of_a_kept_turn_is_brought_to_where_the_next_one_is_read(tmp_path: Path, store: bool) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill = await fleet.add("p0", "prefill", Script("twenty tokens of it."), can_fetch=True)
        decode = await fleet.add("d0", "decode", Script("twenty tokens of it."), can_fetch=True)
        await fleet.client.responses.create(model=MODEL, input="What is it?", store=store)
        copies = fleet.gateway.routing.copies
        await fleet.until_told(lambda: copies.is_idle)
        brought = [one for one in prefill.calls.prefills if one.is_copy]
        assert not any(one.is_copy for one in decode.calls.prefills)
    if not store:
        assert brought == []
        return
    [copy] = brought
    prompt = prefill.calls.prefills[0].generation.prompt_token_ids
    whole = [*prompt, *b"twenty tokens of it."]
    num_blocks = len(whole) // fakes.LAYOUT.block_tokens
    assert list(copy.generation.prompt_token_ids) == [*whole, fakes.EOS][: num_blocks * fakes.LAYOUT.block_tokens + 1]
    assert [(one.address, one.num_blocks) for one in copy.sources] == [(decode.address, num_blocks)]
