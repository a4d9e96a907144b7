"""Admission and placement as clients and workers see them."""

from __future__ import annotations

import json
import math
import sqlite3
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from halfmoon.config.qos_classes import ClassConfig
from halfmoon.kv.keys import block_keys, root_key
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.kv.kv_policy import KVPolicy, policy_salt
from halfmoon.pb.gateway_pb2 import BlockEvents, LatencyProfile, StepTiming, WorkerLoad
from halfmoon.policy.admission.qos_classes import ClassTable, MatchRule, QosClass
from halfmoon.policy.models.chunk_length import CONSTANT_CHUNKS, ChunkRule
from halfmoon.policy.models.latency import PrefillModel, PrefillSample, StepModel
from halfmoon.policy.view.worker_view import Role
from halfmoon.worker.servicers.wire import request_from
from tests.services.gateway.fakes import FINGERPRINT, LAYOUT, MODEL, FakeWorker, Fleet, Script, running_fleet, soon

PROMPT = "a prompt of several blocks, each of them of eight tokens"
STRICT = QosClass("strict", ttft_s=5.0, rules=(MatchRule("header", "strict", "X-Customer-Tier"),))


async def complete(
    fleet: Fleet, tier: str = "", request_id: str = "", **more: Any
) -> tuple[int, dict[str, str], dict[str, Any]]:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 8, **more}
    headers = {"x-customer-tier": tier} if tier else {}
    if request_id:
        headers["X-Request-Id"] = request_id
    async with aiohttp.ClientSession() as session:
        url = f"{fleet.http}/v1/completions"
        async with session.post(url, json=body, headers=headers) as response:
            return response.status, dict(response.headers), json.loads(await response.text())


def measured(fleet: Fleet, worker: FakeWorker, seconds_per_token: float) -> None:
    """As if prefills had been measured on it."""
    member = fleet.cluster.worker(worker.worker_id).member
    membership = fleet.cluster.membership
    for number in range(20):
        sample = PrefillSample(10.0 + number, 0, (10 + number) * seconds_per_token)
        membership.note_prefilled("", member, sample, 0.0)


async def hopeless_pair(fleet: Fleet) -> FakeWorker:
    """Adds two workers that meet the strict class's target with no prompt; returns that of prefills."""
    prefill, _ = await fleet.pair()
    measured(fleet, prefill, 1.0)
    fleet.gateway.routing.admission.classes = ClassTable((QosClass("strict", ttft_s=0.5, rules=STRICT.rules),))
    return prefill


async def test_a_class_over_its_target_is_refused_and_no_worker_hears_of_it(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, decode = await fleet.pair()
        measured(fleet, prefill, 1.0)
        fleet.gateway.routing.admission.classes = ClassTable((STRICT,))
        status, headers, body = await complete(fleet, "strict")
        assert (prefill.calls.prefills, prefill.calls.cancelled, decode.calls.cancelled) == ([], [], [])
        assert (await complete(fleet))[0] == 200  # nobody promised it anything
        metrics = await fleet.metrics()
    error = body["error"]
    assert status == 429
    assert int(headers["Retry-After"]) >= 1
    assert (error["type"], error["code"], error["reason"]) == ("rate_limit_error", "slo_would_be_missed", "ttft")
    assert error["qos_class"] == "strict"
    assert error["predicted_ttft_s"] == pytest.approx(len(PROMPT), rel=0.05)
    assert (error["target_ttft_s"], error["applied_ttft_s"], error["target_tbt_s"]) == (5.0, 5.0, None)
    assert 'halfmoon_gateway_refusals_total{qos_class="strict",reason="ttft"} 1.0' in metrics
    assert 'halfmoon_prediction_error_ratio{kind="prefill",worker_id="p0"}' in metrics
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        rows = connection.execute("select status, qos_class, predicted_ttft_s from requests order by id").fetchall()
    connection.close()
    assert [row[:2] for row in rows] == [("rejected", "strict"), ("ok", "default")]
    assert all(row[2] == pytest.approx(len(PROMPT), rel=0.2) for row in rows)


async def test_who_would_be_refused_with_any_prompt_is_refused_before_it_is_tokenized(tmp_path: Path) -> None:
    """What is wrong in itself hears so all the same, and an echo asks no worker."""
    async with running_fleet(tmp_path) as fleet:
        prefill = await hopeless_pair(fleet)
        status, headers, body = await complete(fleet, "strict")
        assert (status, body["error"]["reason"], headers["Retry-After"]) == (429, "ttft", "60")
        assert "would be at least 1 s" in body["error"]["message"]
        assert (await complete(fleet, "strict", temperature=-9))[0] == 400
        assert (await complete(fleet, "strict", model="other"))[0] == 404
        assert (await complete(fleet, "strict", max_tokens=0, echo=True))[0] == 200
        assert prefill.calls.prefills == []
        assert (await complete(fleet))[0] == 200
        url = f"{fleet.http}/halfmoon/v1/placements"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            refused = (await response.json())[-1]
    assert (refused["refusal"], refused["prompt_tokens"], refused["targets"]["ttft_s"]) == ("ttft", None, 0.5)
    assert [one["worker_id"] for one in refused["candidates"]] == ["p0"]
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        columns = "status, qos_class, prompt_tokens, refused_unread"
        rows = connection.execute(f"select {columns} from requests order by id").fetchall()
    connection.close()
    assert rows[0] == ("rejected", "strict", 0, 1)
    assert [row[3] for row in rows[1:]] == [0] * 4
    assert len(rows) == 5


async def test_what_is_refused_before_it_is_tokenized_is_recorded_if_the_client_named_it_too(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await hopeless_pair(fleet)
        assert (await complete(fleet, "strict", request_id="named"))[0] == 429
        assert (await complete(fleet, request_id="wrong", temperature=-9))[0] == 400
        assert 'http_status="429",status="rejected"} 1.0' in await fleet.metrics()
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        rows = connection.execute("select request_id, status, refused_unread from requests order by id").fetchall()
    connection.close()
    assert rows == [("named", "rejected", 1), ("wrong", "rejected", 0)]


async def test_the_row_of_a_batch_has_the_predictions_of_the_prompt_that_was_refused(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        prefill, _ = await fleet.pair()
        measured(fleet, prefill, 0.1)
        fleet.gateway.routing.admission.classes = ClassTable((STRICT,))
        status, _, body = await complete(fleet, "strict", prompt=["short", 2 * PROMPT])
    assert (status, body["error"]["reason"]) == (429, "ttft")
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        rows = connection.execute("select status, qos_class, num_outputs, predicted_ttft_s from requests").fetchall()
    connection.close()
    assert rows == [("rejected", "strict", 2, body["error"]["predicted_ttft_s"])]


async def test_a_class_goes_by_a_name_of_the_model(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, model_alias=(MODEL, "bytes-strict")) as fleet:
        prefill, _ = await fleet.pair()
        measured(fleet, prefill, 1.0)
        strict = QosClass("strict", ttft_s=5.0, rules=(MatchRule("model", "bytes-strict"),))
        fleet.gateway.routing.admission.classes = ClassTable((strict,))
        assert (await complete(fleet, model="bytes-strict"))[0] == 429
        assert (await complete(fleet))[0] == 200
        assert [one.id async for one in fleet.client.models.list()] == [MODEL, "bytes-strict"]


async def test_off_refuses_nobody(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, admission="off") as fleet:
        prefill, _ = await fleet.pair()
        measured(fleet, prefill, 1.0)
        fleet.gateway.routing.admission.classes = ClassTable((STRICT,))
        assert (await complete(fleet, "strict"))[0] == 200


async def test_a_prompt_goes_to_the_worker_that_has_its_blocks(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        workers = [await fleet.add(f"p{number}", "prefill") for number in range(3)]
        await fleet.add("d0", "decode")
        for worker in workers:
            measured(fleet, worker, 0.01)
        layout = KVLayout(LAYOUT.num_layers, LAYOUT.num_kv_heads, LAYOUT.head_dim, "float32", LAYOUT.block_tokens)
        keys = block_keys(root_key(FINGERPRINT, layout), list(PROMPT.encode()), layout.block_tokens)
        stored = b"".join(key[:8] for key in keys)
        for number, holder in enumerate(workers[1:]):
            holder.loads.put_nowait(BlockEvents(sequence=1, is_snapshot=True, stored=stored[: 8 * (6 - 5 * number)]))
        index = fleet.cluster.membership.index
        await fleet.until_told(lambda: index.num_pairs == 7)
        for _ in range(5):
            assert (await complete(fleet))[0] == 200
    assert [len(worker.calls.prefills) for worker in workers] == [0, 5, 0]


async def test_a_gap_in_the_block_events_is_answered_with_a_request_for_a_snapshot(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        worker = await fleet.add("b0", "both")
        worker.loads.put_nowait(BlockEvents(sequence=1, is_snapshot=True, stored=bytes(8)))
        worker.loads.put_nowait(BlockEvents(sequence=3, stored=bytes(range(8))))
        await soon(worker.asked_for_blocks.wait())
        assert fleet.cluster.membership.index.num_pairs == 1


async def test_what_is_capped_ends_by_length(tmp_path: Path) -> None:
    capped = QosClass("capped", 1, degradation=("cap_max_tokens",), capped_tokens=2, rules=(MatchRule("model", MODEL),))
    owner = QosClass("owner", 0, reserved=1.0, rules=(MatchRule("header", "owner", "x-customer-tier"),))
    async with running_fleet(tmp_path) as fleet:
        await fleet.add("b0", "both", Script("hello"), total_blocks=16)  # 128 tokens
        fleet.gateway.routing.admission.classes = ClassTable((owner, capped))
        await complete(fleet, "owner", max_tokens=6)  # 62 tokens are kept for its next one
        status, _, body = await complete(fleet, max_tokens=12)
    assert status == 200
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("he", "length")


async def test_step_timings_make_a_model(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        worker = await fleet.add("b0", "both")
        steps = [StepTiming(batch=batch, context_tokens=10, seconds=0.01 * batch) for batch in (1, 2, 4)]
        worker.loads.put_nowait(WorkerLoad(sequence=1, free_blocks=9, steps=steps))
        member = fleet.cluster.worker("b0").member
        await fleet.until_told(lambda: member.load.sequence == 1)
        assert member.latency.step.seconds(3, 10) == pytest.approx(0.03, rel=0.05)


async def test_a_salt_keeps_the_prefixes_of_tenants_apart(tmp_path: Path) -> None:
    layout = KVLayout(LAYOUT.num_layers, LAYOUT.num_kv_heads, LAYOUT.head_dim, "float32", LAYOUT.block_tokens)
    async with running_fleet(tmp_path) as fleet:
        profile = LatencyProfile(prefill=[0.0, 1.0, 0.0])
        add = partial(fleet.add, role="prefill", step_tokens=64, profile=profile)
        workers = {name: await add(name) for name in ("plain", "mine")}
        await fleet.add("d0", "decode")
        for name, salt in (("plain", b""), ("mine", b"m\xc3\xado")):
            keys = block_keys(root_key(FINGERPRINT, layout, salt), list(PROMPT.encode()), layout.block_tokens)
            stored = b"".join(key[:8] for key in keys)
            workers[name].loads.put_nowait(BlockEvents(sequence=1, is_snapshot=True, stored=stored))
        await fleet.until_told(lambda: fleet.cluster.membership.index.num_pairs == 14)
        for _ in range(3):
            assert (await complete(fleet))[0] == 200
            assert (await complete(fleet, cache_salt="m\u00edo"))[0] == 200
        for wrong in ("", "x" * 257, 7):
            status, _, body = await complete(fleet, cache_salt=wrong)
            assert (status, body["error"]["param"]) == (400, "cache_salt")
    assert {one.generation.tenant_salt for one in workers["plain"].calls.prefills} == {b""}
    assert {one.generation.tenant_salt for one in workers["mine"].calls.prefills} == {"m\u00edo".encode()}


async def test_a_kv_policy_is_in_the_salt(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        worker = await fleet.add("w", "both")
        for more in ({}, {"kv_policy": "sinks:4+100"}, {"kv_policy": "sinks:4+100", "cache_salt": "x"}):
            assert (await complete(fleet, **more))[0] == 200
        for wrong in ("", "sinks", "sinks:4", "sinks:4+0", "sinks:4+9999999", "heavy:4+4", 7, {"sinks": 4}):
            status, _, body = await complete(fleet, kv_policy=wrong)
            assert (status, body["error"]["param"]) == (400, "kv_policy"), wrong
        salts = [call.generation.tenant_salt for call in worker.calls.prefills]
    assert salts == [b"", policy_salt(KVPolicy(4, 100), b""), policy_salt(KVPolicy(4, 100), b"x")]


async def test_an_answer_ends_where_what_is_chosen_leaves_no_room(tmp_path: Path) -> None:
    """80 tokens of KV memory for a prompt of 56 tokens, an answer, and 16 tokens that are chosen."""
    async with running_fleet(tmp_path) as fleet:
        worker = await fleet.add("w", "both", total_blocks=10)
        for more in ({}, {"kv_policy": "snapkv:16+8"}):
            assert (await complete(fleet, max_tokens=40, **more))[0] == 200
        limits = [call.generation.sampling.max_tokens for call in worker.calls.prefills]
    assert limits == [24, 8]


async def test_predictions_count_what_is_kept(tmp_path: Path) -> None:
    """A step takes 1 ms a token that it sees: all 56, or a block of 8 and in the mean 4 tokens of the next one."""
    async with running_fleet(tmp_path) as fleet:
        profile = LatencyProfile(prefill=[0.0, 1e-3, 0.0], step=[0.0, 0.0, 1e-3])
        await fleet.add("w", "both", profile=profile)
        fleet.gateway.routing.admission.classes = ClassTable((replace(STRICT, tbt_s=0.03),))
        status, _, body = await complete(fleet, "strict")
        assert (status, body["error"]["reason"]) == (429, "tbt")
        assert (await complete(fleet, "strict", kv_policy="sinks:0+8"))[0] == 200
        (kept,) = fleet.gateway.routing.telemetry.decisions.newest(1, 0.0)
    assert kept["predicted"]["tbt_s"] == pytest.approx(0.012)


async def test_a_class_has_a_kv_policy_for_requests_that_name_none(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        worker = await fleet.add("w", "both")
        short = ClassConfig(kv_policy="sinks:4+100").as_class("default")
        fleet.gateway.routing.admission.classes = ClassTable((short,))
        for more in ({}, {"kv_policy": "sinks:4+300"}, {"kv_policy": "whole"}):
            assert (await complete(fleet, **more))[0] == 200
        salts = [call.generation.tenant_salt for call in worker.calls.prefills]
    assert salts == [policy_salt(KVPolicy(4, 100), b""), policy_salt(KVPolicy(4, 300), b""), b""]


async def test_a_prompt_is_read_as_far_as_somebody_has_it_before_it_is_refused(tmp_path: Path) -> None:
    layout = KVLayout(LAYOUT.num_layers, LAYOUT.num_kv_heads, LAYOUT.head_dim, "float32", LAYOUT.block_tokens)
    async with running_fleet(tmp_path) as fleet:
        profile = LatencyProfile(prefill=[0.0, 1.0, 0.0])
        worker = await fleet.add("p0", role="prefill", step_tokens=64, profile=profile)
        await fleet.add("d0", "decode")
        fleet.gateway.routing.admission.classes = ClassTable((replace(STRICT, ttft_s=20.0),))
        ids = list(PROMPT.encode())
        keys = block_keys(root_key(FINGERPRINT, layout), ids, layout.block_tokens)
        stored = b"".join(key[:8] for key in keys[:6])
        worker.loads.put_nowait(BlockEvents(sequence=1, is_snapshot=True, stored=stored))
        await fleet.until_told(lambda: fleet.cluster.membership.index.num_pairs == 6)
        answers = [
            await complete(fleet, "strict", user="u" * 1_024, **more)  # the prompt of a short body is read anyway
            for more in (
                {},
                {"prompt": ids},
                {"prompt": PROMPT[:40] + 25 * "?"},
                {"prompt": [*ids[:40], *[63] * 25]},
                {"prompt": "another" + PROMPT},
                {"cache_salt": "x"},
                {"prompt": ["another" + PROMPT, PROMPT]},
                {"prompt": [*ids[:8], 999, *ids]},
            )
        ]
    assert [status for status, _, _ in answers] == [200, 200, 429, 429, 429, 429, 429, 400]
    predicted = [body["error"]["predicted_ttft_s"] for status, _, body in answers if status == 429]
    assert predicted == pytest.approx([25, 25, 63, 56, 63], abs=1)
    assert "would be at least" in answers[2][2]["error"]["message"]
    with sqlite3.connect(tmp_path / "ledger.db") as connection:
        rows = connection.execute("select refused_unread from requests order by id").fetchall()
    connection.close()
    assert [row[0] for row in rows] == [0, 0, 1, 1, 1, 1, 1, 0]


async def test_workers_are_told_the_target_for_which_chunks_are_short(tmp_path: Path) -> None:
    """None where a decode worker decodes: there the constant holds for who has no target."""
    patient = QosClass("patient", tbt_s=60.0, rules=STRICT.rules)
    cases: tuple[tuple[tuple[Role, ...], list[float | None]], ...] = (
        (("prefill", "decode"), [None, 60.0, None]),
        (("both",), [math.inf, 60.0, math.inf]),
    )
    for roles, expected in cases:
        async with running_fleet(tmp_path / roles[0]) as fleet:
            fleet.gateway.routing.admission.classes = ClassTable((patient,))
            workers = [await fleet.add(role, role) for role in roles]
            for tier in ("", "strict"):
                assert (await complete(fleet, tier))[0] == 200
            fleet.gateway.routing.admission.classes = ClassTable((replace(patient, has_promises=False),))
            assert (await complete(fleet, "strict"))[0] == 200
        found = [call.generation for call in workers[0].calls.prefills]
        assert [one.tbt_target_s if one.HasField("tbt_target_s") else None for one in found] == expected
        assert [request_from(one, prefill_only=True, arrival_s=0.0).tbt_target_s for one in found] == expected


async def test_chunks_follow_targets_where_the_worker_says_so(tmp_path: Path) -> None:
    profile = LatencyProfile(kind="fake", prefill=[0.1, 0.2, 0.3], step=[0.4, 0.5, 0.6])
    async with running_fleet(tmp_path) as fleet:
        await fleet.add("old", "both", profile=profile)
        await fleet.add("new", "both", profile=profile, follows_targets=True)
        rules = {one.worker_id: one.chunk_rule for one in fleet.cluster.membership.view().workers}
    assert rules == {
        "old": CONSTANT_CHUNKS,
        "new": ChunkRule(PrefillModel(0.1, 0.2, 0.3), StepModel(0.4, 0.5, 0.6)),
    }
