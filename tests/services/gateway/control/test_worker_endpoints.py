"""Operators' changes of single workers, as the control API takes them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from halfmoon.pb.gateway_pb2 import WorkerLoad
from tests.services.gateway.fakes import FakeWorker, Script, running_fleet
from tests.services.gateway.test_access import ask

OPERATOR = {"Authorization": "Bearer op"}


async def test_it_is_for_operators(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, api_key=("k",), operator_token="op") as fleet:
        _, decode = await fleet.pair()
        await fleet.add("d1", "decode")
        path = "/halfmoon/v1/workers/d0/drain"
        assert (await ask(fleet, "POST", path, json={}, headers={"Authorization": "Bearer k"}))[0] == 401
        assert not decode.drains
        assert (await ask(fleet, "POST", path, json={}, headers=OPERATOR))[0] == 200
        assert decode.drains == [False]


async def test_a_worker_that_drains_is_given_nothing_more(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair()
        other = await fleet.add("d1", "decode")
        status, _, said = await ask(fleet, "POST", "/halfmoon/v1/workers/d1/drain", json={"returns": True})
        assert (status, said) == (200, {"worker_id": "d1", "draining": True, "returns": True})
        assert other.drains == [True]
        assert fleet.placeable() == {"p0", "d0"}


async def test_the_last_one_is_drained_by_force_alone(tmp_path: Path) -> None:
    async with running_fleet(tmp_path) as fleet:
        _, decode = await fleet.pair()
        status, _, said = await ask(fleet, "POST", "/halfmoon/v1/workers/d0/drain", json={})
        assert (status, said["error"]["code"]) == (409, "worker_change_refused")
        assert not decode.drains
        assert (await ask(fleet, "POST", "/halfmoon/v1/workers/d0/drain", json={"force": True}))[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "status"), [("x", None, 404), ("d", None, 400), ("d1", {"retruns": True}, 400)]
)
async def test_what_cannot_be_meant_changes_nothing(
    tmp_path: Path, path: str, body: dict[str, bool] | None, status: int
) -> None:
    async with running_fleet(tmp_path) as fleet:
        _, decode = await fleet.pair()
        other = await fleet.add("d1", "decode")
        assert (await ask(fleet, "POST", f"/halfmoon/v1/workers/{path}/drain", json=body or {}))[0] == status
        assert not decode.drains + other.drains


async def test_a_worker_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.gateway.control.worker_endpoints._ANSWER_S", 0.05)
    async with running_fleet(tmp_path) as fleet:
        _, decode = await fleet.pair()
        decode.answers_orders = False
        assert (await ask(fleet, "POST", "/halfmoon/v1/workers/d0/drain", json={"force": True}))[0] == 504


@pytest.mark.parametrize(("was_heard", "status"), [(True, 200), (False, 504)])
async def test_a_worker_that_registers_again_meanwhile_drains_if_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_heard: bool, status: int
) -> None:
    monkeypatch.setattr("services.gateway.control.worker_endpoints._ANSWER_S", 10.0 if was_heard else 0.5)
    async with running_fleet(tmp_path) as fleet:
        _, decode = await fleet.pair()
        decode.answers_orders = False
        before = fleet.cluster.worker("d0")
        answer = asyncio.create_task(ask(fleet, "POST", "/halfmoon/v1/workers/d0/drain", json={"force": True}))
        await fleet.until_told(lambda: bool(decode.drains))
        again = FakeWorker("d0", "decode", Script(), fleet)
        await fleet.serve(again)
        await fleet.join(again)
        await fleet.until_told(lambda: fleet.cluster.worker("d0") is not before)
        if was_heard:
            again.loads.put_nowait(WorkerLoad(free_blocks=100, draining=True))
        assert (await answer)[0] == status
