"""Files and batches through the official client."""

from __future__ import annotations

import asyncio
import io
import json
import sqlite3
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from halfmoon.errors import HalfmoonError, NoCapacity, Unavailable
from halfmoon.ledger.kept.stored_files import CHUNK_BYTES, StoredFiles
from tests.services.gateway.fakes import MODEL, Script, running_fleet, soon

CHAT: Any = "/v1/chat/completions"
FINAL = ("completed", "failed", "expired", "cancelled")


def chat(number: int, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"q{number}"}]
    body = {"model": MODEL, "messages": messages, **body}
    return {"custom_id": f"c{number}", "method": "POST", "url": CHAT, "body": body}


def jsonl(lines: Iterable[Any]) -> bytes:
    return b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)


async def uploaded(client: openai.AsyncOpenAI, content: bytes, name: str = "in.jsonl") -> str:
    return (await client.files.create(file=(name, io.BytesIO(content)), purpose="batch")).id


async def begun(client: openai.AsyncOpenAI, content: bytes, endpoint: Any = CHAT) -> Any:
    file_id = await uploaded(client, content)
    return await client.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window="24h")


async def ended(client: openai.AsyncOpenAI, batch_id: str, within_s: float = 50) -> Any:
    """The batch once it has ended: whoever asks has to ask again."""
    async with asyncio.timeout(within_s):
        while (batch := await client.batches.retrieve(batch_id)).status not in FINAL:
            pass
    return batch


def counts_of(batch: Any) -> tuple[int, int, int]:
    counts = batch.request_counts
    return counts.total, counts.completed, counts.failed


async def lines_of(client: openai.AsyncOpenAI, file_id: str | None) -> list[Any]:
    if file_id is None:
        return []
    content = await client.files.content(file_id)
    return [json.loads(line) for line in content.text.splitlines()]


async def test_a_batch_from_upload_to_output(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair(Script("ok"))
        client = fleet.client
        file = await client.files.create(file=("../../etc/in.jsonl", jsonl(map(chat, range(20)))), purpose="batch")
        assert (file.filename, file.purpose, file.status) == ("in.jsonl", "batch", "processed")
        made = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"}
        )
        assert (made.status, made.metadata) == ("validating", {"a": "b"})
        batch = await ended(client, made.id)
        output = await lines_of(client, batch.output_file_id)
        assert [one.id async for one in client.batches.list()] == [batch.id]
        assert {one.id async for one in client.files.list()} == {file.id, batch.output_file_id}
        assert [one.id async for one in client.files.list(purpose="batch")] == [file.id]
        priorities = {one.generation.priority for one in prefill.calls.prefills}
        await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
        assert prefill.calls.prefills[-1].generation.priority < min(priorities)
    assert (batch.status, batch.error_file_id) == ("completed", None)
    assert batch.request_counts.model_dump() == {"total": 20, "completed": 20, "failed": 0}
    assert [line["custom_id"] for line in output] == [f"c{number}" for number in range(20)]
    assert {line["response"]["status_code"] for line in output} == {200}
    assert output[3]["response"]["body"]["choices"][0]["message"]["content"] == "ok"
    assert output[3]["error"] is None
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at < batch.expires_at


async def test_all_endpoints(tmp_path: Path) -> None:
    bodies: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "a"},
        "/v1/responses": {"input": "a"},
        "/v1/embeddings": {"input": "a"},
    }
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair(Script("ok"))
        for url, body in bodies.items():
            line = {"custom_id": "x", "method": "POST", "url": url, "body": {"model": MODEL, **body}}
            batch = await ended(fleet.client, (await begun(fleet.client, jsonl([line]), url)).id)
            (output,) = await lines_of(fleet.client, batch.output_file_id)
            answer = output["response"]["body"]
            if url == "/v1/responses":
                assert (await fleet.client.responses.retrieve(answer["id"])).output_text == "ok"
            if url == "/v1/embeddings":
                assert len(answer["data"][0]["embedding"]) == 3


async def test_bad_lines_are_in_the_error_file(tmp_path: Path) -> None:
    bad: dict[str, Any] = {
        "invalid_json_line": b'{"custom_id": ',
        "missing_required_parameter": {**chat(1), "custom_id": None},
        "invalid_method": {**chat(2), "method": "GET"},
        "invalid_url": {**chat(3), "url": "/v1/completions"},
        "invalid_request": {**chat(4), "body": []},
        "duplicate_custom_id": {**chat(5), "custom_id": "c0"},
        "line_too_long": b'"' + b"x" * 3000,
    }
    refused = [chat(10, temperature="hot"), chat(11, messages=[{"role": "user", "content": "x" * 300}])]
    more = [b"", b"[1]", b"\xff\xfe", chat(12, stream=True), {**chat(13), "body": {"model": "other", "messages": []}}]
    async with running_fleet(tmp_path, max_body_bytes=2_000) as fleet:
        await fleet.pair(Script("ok"))
        content = jsonl([chat(0), *bad.values(), *refused, *more]) + b"\r\n  "
        batch = await ended(fleet.client, (await begun(fleet.client, content)).id)
        assert (batch.status, batch.request_counts.completed) == ("completed", 1)
        errors = await lines_of(fleet.client, batch.error_file_id)
    assert len(errors) == len(bad) + len(refused) + len(more) - 1 == batch.request_counts.failed
    assert [line["error"]["code"] for line in errors[: len(bad)]] == list(bad)
    hot, long = errors[len(bad) : len(bad) + 2]
    assert (hot["custom_id"], hot["error"], hot["response"]["status_code"]) == ("c10", None, 400)
    assert hot["response"]["body"]["error"]["param"] == "temperature"
    assert long["response"]["body"]["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize(("content", "code"), [(b"\n  \n", "empty_file"), (b"1\n" * 50_001, "too_many_lines")])
async def test_a_file_that_is_no_batch_fails_as_a_whole(tmp_path: Path, content: bytes, code: str) -> None:
    async with running_fleet(tmp_path) as fleet:
        batch = await ended(fleet.client, (await begun(fleet.client, content)).id)
    assert (batch.status, batch.errors.data[0].code) == ("failed", code)


async def test_lines_wait_for_what_others_need_and_are_tried_again_after_a_fault(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        worker = await fleet.add("b0", "both", Script("ok"))
        worker.refuse = [NoCapacity("full", retry_after_ms=1) for _ in range(10)] + [HalfmoonError("broken")]
        batch = await ended(fleet.client, (await begun(fleet.client, jsonl(map(chat, range(3))))).id)
        assert batch.request_counts.completed == 3
        async with aiohttp.ClientSession() as session, session.get(f"{fleet.http}/halfmoon/v1/requests") as response:
            assert {row["status"] for row in await response.json()} <= {"ok", "error"}  # waiting is no refusal


async def test_cancelling_ends_the_lines_that_run_and_keeps_the_results(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, batch_concurrency=1) as fleet:
        prefill, decode = await fleet.pair(Script("ok"))
        made = await begun(fleet.client, jsonl(map(chat, range(5))))
        await soon(prefill.calls.prefill_came.wait())
        prefill.script.decode_gate = decode.script.decode_gate = asyncio.Event()
        said = await fleet.client.batches.cancel(made.id)
        assert said.status in ("cancelling", "cancelled")
        batch = await ended(fleet.client, made.id)
        assert batch.status == "cancelled"
        assert len(await lines_of(fleet.client, batch.output_file_id)) == batch.request_counts.completed < 5
        assert (await fleet.client.batches.cancel(made.id)).status == "cancelled"
        await fleet.until_idle()


async def test_a_file_that_is_read_is_not_deleted(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        made = await begun(fleet.client, jsonl([chat(1)]))  # there is no worker
        with pytest.raises(openai.BadRequestError, match=made.id):
            await fleet.client.files.delete(made.input_file_id)
        await fleet.client.batches.cancel(made.id)
        await ended(fleet.client, made.id)
        await fleet.client.files.delete(made.input_file_id)
        for missing in (
            fleet.client.files.retrieve(made.input_file_id),
            fleet.client.files.content(made.input_file_id),
        ):
            with pytest.raises(openai.NotFoundError):
                await missing
        with pytest.raises(openai.NotFoundError):
            await fleet.client.batches.create(input_file_id=made.input_file_id, endpoint=CHAT, completion_window="24h")


async def test_another_tenants_are_not_there(tmp_path: Path) -> None:
    tenants = {"acme": {"keys": ["key-of-acme"]}, "other": {"keys": ["key-of-other"]}}
    async with running_fleet(tmp_path, tenants=tenants) as fleet:
        await fleet.pair(Script("ok"))
        mine, theirs = (fleet.client.with_options(api_key=f"key-of-{name}") for name in tenants)
        made = await begun(mine, jsonl([chat(1)]))
        batch = await ended(mine, made.id)
        for attempt in (
            theirs.batches.retrieve(made.id),
            theirs.batches.cancel(made.id),
            theirs.files.retrieve(made.input_file_id),
            theirs.files.content(batch.output_file_id),
            theirs.files.delete(made.input_file_id),
            theirs.batches.create(input_file_id=made.input_file_id, endpoint=CHAT, completion_window="24h"),
        ):
            with pytest.raises(openai.NotFoundError):
                await attempt
        assert [one.id async for one in theirs.files.list()] == [one.id async for one in theirs.batches.list()] == []


async def test_limits_of_files(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, file_max_bytes=2_000_000, files_max_bytes=3_000_000) as fleet:
        with pytest.raises(openai.APIStatusError) as large:
            await uploaded(fleet.client, b"x" * 2_000_001)
        assert (large.value.status_code, large.value.code) == (413, "body_too_large")
        first = await uploaded(fleet.client, b"x" * 1_900_000)
        with pytest.raises(openai.BadRequestError, match="files_max_bytes"):
            await uploaded(fleet.client, b"x" * 1_900_000)
        assert [one.id async for one in fleet.client.files.list()] == [first]
        await fleet.client.files.delete(first)
        second = await uploaded(fleet.client, b"x" * 1_900_000)
        assert (await fleet.client.files.content(second)).content == b"x" * 1_900_000


async def test_an_upload_without_a_length_is_bounded_too(tmp_path: Path) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(40):
            yield b"y" * 100_000

    headers = {"Content-Type": "multipart/form-data; boundary=x"}
    async with (
        running_fleet(tmp_path, file_max_bytes=1_000_000) as fleet,
        aiohttp.ClientSession(fleet.http) as session,
    ):
        async with session.post("/v1/files", data=body(), headers=headers) as response:
            assert response.status == 413
        async with session.post("/v1/files", data=b"--x\r\n", headers=headers) as response:
            assert response.status == 400
        compressed = {**headers, "Content-Encoding": "gzip"}
        async with session.post("/v1/files", data=b"--x\r\n", headers=compressed) as response:
            assert response.status == 415
            assert "uploads may not be compressed" in (await response.json())["error"]["message"]
    with sqlite3.connect(tmp_path / "ledger.db") as ledger:
        for table in ("files", "file_chunks"):
            assert ledger.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
    ledger.close()


@pytest.mark.parametrize(
    ("form", "status"),
    [
        ([("purpose", "batch")], 400),
        ([("file", b"x")], 400),
        ([("purpose", "assistants"), ("file", b"x")], 400),
        ([("purpose", "x" * 5_000), ("file", b"x")], 400),
        ([("purpose", "batch"), ("file", b"x"), ("file", b"y")], 400),
        ([(f"f{number}", "x") for number in range(40)], 400),
        ([("file", b"x"), ("purpose", "batch"), ("expires_after[seconds]", "9")], 400),
        ([("file", b""), ("purpose", "batch"), ("expires_after[seconds]", "3600")], 200),
    ],
)
async def test_odd_forms(tmp_path: Path, form: list[tuple[str, Any]], status: int) -> None:
    async with running_fleet(tmp_path) as fleet, aiohttp.ClientSession(fleet.http) as session:
        data = aiohttp.FormData(default_to_multipart=True)
        for name, value in form:
            data.add_field(name, value, filename="..\\..\\a.jsonl" if isinstance(value, bytes) else None)
        async with session.post("/v1/files", data=data) as response:
            assert response.status == status, await response.text()
        for content_type in ("multipart/form-data", "multipart/form-data; boundary=x", "application/json"):
            headers = {"Content-Type": content_type}
            async with session.post("/v1/files", data=b"--x\r\nnonsense", headers=headers) as response:
                assert response.status == 400, await response.text()
        async with session.get("/v1/files") as response:
            assert len((await response.json())["data"]) == (status == 200)


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"endpoint": "/v1/messages"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {str(number): "x" for number in range(17)}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3600}}, "output_expires_after"),
    ],
)
async def test_odd_batches(tmp_path: Path, changes: dict[str, Any], param: str) -> None:
    body = {"input_file_id": "file-x", "endpoint": CHAT, "completion_window": "24h", **changes}
    async with running_fleet(tmp_path) as fleet, aiohttp.ClientSession(fleet.http) as session:
        async with session.post("/v1/batches", json=body) as response:
            assert ((await response.json())["error"]["param"], response.status) == (param, 400)
        for path in ("/v1/batches/..%2Fx", "/v1/batches/x", "/v1/files/..%2F..%2Fx/content", "/v1/files/%00"):
            async with session.get(path) as response:
                assert response.status == 404, await response.text()


async def test_the_next_gateway_runs_only_what_has_no_result(tmp_path: Path) -> None:
    gate = asyncio.Event()
    gate.set()
    async with running_fleet(tmp_path, batch_concurrency=2) as one, running_fleet(tmp_path) as other:
        prefill, decode = await one.pair(Script("ok", decode_gate=gate))
        made = await begun(one.client, jsonl(map(chat, range(30))))
        async with asyncio.timeout(30):
            while counts_of(await one.client.batches.retrieve(made.id))[1] < 5:
                pass
        gate.clear()
        await one.stop()
        gate.set()
        await other.join(prefill, decode)
        batch = await ended(other.client, made.id)
        output = await lines_of(other.client, batch.output_file_id)
        prompts = [bytes(call.generation.prompt_token_ids) for call in prefill.calls.prefills]
    assert [line["custom_id"] for line in output] == [f"c{number}" for number in range(30)]
    assert len(set(prompts)) == 30
    assert len(prompts) <= 32  # at most those that ran when the first one stopped


async def test_two_gateways_do_not_run_the_same_batch(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as one, running_fleet(tmp_path) as other:
        prefill, decode = await one.pair(Script("ok"))
        await other.join(prefill, decode)
        made = [await begun(fleet.client, jsonl(map(chat, range(20)))) for fleet in (one, other, one)]
        for batch in made:
            assert (await ended(other.client, batch.id)).request_counts.completed == 20
        assert len(prefill.calls.prefills) == 60


async def test_a_gateway_without_batches_says_so(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, batch_concurrency=0) as fleet:
        with pytest.raises(openai.BadRequestError, match="batch_concurrency"):
            await begun(fleet.client, b"{}")


async def test_a_batch_is_cancelled_where_none_is_run(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as one, running_fleet(tmp_path, batch_concurrency=0) as other:
        made = await begun(one.client, jsonl(map(chat, range(3))))  # there is no worker
        await one.stop()
        await other.client.batches.cancel(made.id)
        assert (await ended(other.client, made.id)).status == "cancelled"


@pytest.mark.parametrize("what", ["deleted", "away"])
async def test_a_download_that_cannot_go_on_is_cut_off(
    tmp_path: Path, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client neither waits for the rest nor takes something else for it."""
    read = StoredFiles._chunk

    async def chunk(files: StoredFiles, file_id: str, number: int) -> bytes | None:
        if number == 1 and what == "away":
            raise Unavailable("the ledger is away")
        if number == 1:
            await files.discard(file_id)
        return await read(files, file_id, number)

    async with running_fleet(tmp_path) as fleet, aiohttp.ClientSession(fleet.http) as session:
        file_id = await uploaded(fleet.client, b"x" * (2 * CHUNK_BYTES))
        monkeypatch.setattr(StoredFiles, "_chunk", chunk)
        async with session.get(f"/v1/files/{file_id}/content") as response:
            with pytest.raises(aiohttp.ClientPayloadError):
                await soon(response.read())
