"""`halfmoon up --on ray`: a node is lost while answers run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
import yaml

from halfmoon.up.state.written_state import read_services
from tests.e2e.small_model import small_model
from tests.e2e.system import System, running_system
from tests.ray_cluster import RayCluster, ray_cluster

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

START_S = 240


@pytest.fixture
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as made:
        yield made


async def answer(system: System, session: aiohttp.ClientSession, number: int) -> str:
    body = {"prompt": f"{number} moons " * 50, "max_tokens": 150, "temperature": 0, "ignore_eos": True}
    async with session.post(f"{system.url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        return str((await response.json())["choices"][0]["text"])


def planned(model: Path) -> str:
    """A plan as `halfmoon plan --nodes 2` writes it: a pair of prefill and decode on each of two nodes."""
    workers = [
        {"role": role, "count": 1, "gpu": "cpu", "tp": 1, "pp": 1, "max_batch_tokens": 2048, "chunk_tokens": 512,
         "max_running": 256, "batching": "chunked", "workers_per_node": 1, "first_node": node,
         "latency": "roofline:demo"}
        for node in range(2)
        for role in ("prefill", "decode")
    ]  # fmt: skip
    network = {"bytes_per_s": 6e9, "latency_s": 1e-4, "node_bytes_per_s": 2e10, "handover": "push", "codec": "raw"}
    targets = {"ttft_s": 2.0, "tpot_s": 0.15, "tbt_s": None, "tbt_of": "longest-tenth"}
    cluster = {"workers": workers, "network": network, "targets": targets}
    return yaml.safe_dump({"model": str(model), "handover_codec": "raw", "cluster": cluster})


async def test_a_plan_of_two_nodes_survives_one_of_them(cluster: RayCluster, tmp_path: Path) -> None:
    model, state, plan = small_model(tmp_path / "small"), tmp_path / "state", tmp_path / "plan.yaml"
    plan.write_text(planned(model))
    on_ray = ("--on", "ray", "--ray-address", cluster.address, "--plan", str(plan), "--dtype", "float32")
    async with (
        running_system(state, *on_ray, "--set", "workers.all.calibrate=never", start_timeout_s=START_S) as system,
        aiohttp.ClientSession() as session,
    ):
        listed = read_services(state)
        assert listed is not None
        pids = {service.name: service.pid for service in listed.services}
        assert {"kvstore-0", "kvstore-1"} <= pids.keys()
        nodes = {name: cluster.node_of(pid) for name, pid in pids.items() if name.startswith(("prefill", "decode"))}
        assert nodes["prefill-0"] == nodes["decode-0"] != nodes["prefill-1"] == nodes["decode-1"]
        alone = [await answer(system, session, number) for number in range(6)]
        running = [asyncio.create_task(answer(system, session, number)) for number in range(6)]
        await asyncio.sleep(0.3)  # some compute, some wait
        cluster.kill(nodes["decode-0"])
        assert [await task for task in running] == alone
        cluster.add()
        async with asyncio.timeout(START_S):
            while len(await system.cluster(session)) < 4:
                await asyncio.sleep(0.1)
        assert await answer(system, session, 0) == alone[0]


async def test_a_worker_that_no_node_has_room_for_is_divided(cluster: RayCluster, tmp_path: Path) -> None:
    """Two by two ranks over nodes of two processors; the one with the last stage is lost while it computes."""
    model, state = small_model(tmp_path / "small"), tmp_path / "state"
    own = ("--model", str(model), "--dtype", "float32", "--set", "workers.all.calibrate=never")
    async with running_system(tmp_path / "alone", *own) as system, aiohttp.ClientSession() as session:
        alone = [await answer(system, session, number) for number in range(3)]
    cut = ["workers.both={count: 1, tensor_parallel: 2, pipeline_parallel: 2}"]
    on_ray = ("--on", "ray", "--ray-address", cluster.address, "--set", *cut)
    async with (
        running_system(state, *own, *on_ray, start_timeout_s=START_S) as system,
        aiohttp.ClientSession() as session,
    ):
        assert [await answer(system, session, number) for number in range(3)] == alone
        listed = read_services(state)
        assert listed is not None
        pids = {service.name: service.pid for service in listed.services}
        here = cluster.node_of(pids["both-0"])
        cluster.add()
        running = [asyncio.create_task(answer(system, session, number)) for number in range(3)]
        await asyncio.sleep(0.3)
        cluster.kill(next(node for node in list(cluster.nodes)[:2] if node != here))
        assert [await task for task in running] == alone
