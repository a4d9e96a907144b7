"""Services on the nodes of a real Ray cluster, each node a process of this machine."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

pytest.importorskip("ray")

from ray.util import placement_group_table

import halfmoon
import halfmoon.up.on_ray.ray_hosts as ray_hosts_module
from halfmoon.background import cancelled, running
from halfmoon.errors import Incompatible, Unavailable
from halfmoon.rpc.tls.identity_files import TLS_VARIABLES
from halfmoon.up.on_ray.ray_hosts import RayHosts, connected
from halfmoon.up.supervision.child import Child, Room, ServiceSpec
from halfmoon.up.supervision.log_files import LogFiles
from halfmoon.up.supervision.supervisor import Supervisor
from halfmoon.up.this_host.reserved_ports import ReservedPorts
from halfmoon.up.up_options import UpOptions, WorkerStart
from tests.ray_cluster import RayCluster, ray_cluster

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

PROGRAM = """
import json, os, sys
print(json.dumps({"event": "service.ready", "pid": os.getpid(), "arguments": sys.argv[1:]}), flush=True)
for line in sys.stdin:
    print("read", line.strip(), flush=True)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with ray_cluster() as made:
        yield made


class Told:
    """What the operator is told."""

    def __init__(self) -> None:
        self.sentences: asyncio.Queue[str] = asyncio.Queue()
        self.ready: asyncio.Queue[tuple[str, dict[str, Any]]] = asyncio.Queue()
        self.restarts: list[str] = []

    def event(self, name: str, event: dict[str, Any]) -> None:
        if event.get("event") == "service.ready":
            self.ready.put_nowait((name, event))


@asynccontextmanager
async def supervised(cluster: RayCluster, directory: Path, told: Told) -> AsyncIterator[tuple[Supervisor, RayHosts]]:
    options = UpOptions(on="ray", ray_address=cluster.address, state_dir=directory / "state")
    logs = LogFiles(directory / "logs")
    hosts = await asyncio.to_thread(connected, options, logs, told.sentences.put_nowait)
    boss = Supervisor(
        logs,
        told.event,
        lambda reason, wait_s: told.restarts.append(reason),
        restart_s=(0.0,),
        launch=hosts.launch,
    )
    try:
        yield boss, hosts
    finally:
        await boss.stop()
        await hosts.close()


def spec(name: str, *arguments: str, room: Room | None = Room(), restarts: bool = False) -> ServiceSpec:  # noqa: B008
    return ServiceSpec(name, ("-c", PROGRAM, *arguments), {"EXTRA": "1"}, room=room, restarts=restarts)


def node_of(hosts: RayHosts, name: str) -> str:
    return hosts._running[name].place.node


async def test_services_run_on_the_nodes_and_end_with_the_supervisor(cluster: RayCluster, tmp_path: Path) -> None:
    told = Told()
    async with supervised(cluster, tmp_path, told) as (boss, hosts):
        children = await asyncio.gather(*(boss.start(spec(name)) for name in ("a", "b")))
        own = await boss.start(spec("here", room=None))
        pids = {name: event["pid"] for name, event in [await told.ready.get() for _ in range(3)]}
        assert {node_of(hosts, "a"), node_of(hosts, "b")} <= set(cluster.nodes)
        assert own.process.host == ""
        for child in children:
            assert child.process.pid == pids[child.spec.name]
            child.process.write(b"hello\n")
        while b"read hello" not in (tmp_path / "logs" / "a.log").read_bytes():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not any(psutil.pid_exists(pid) for pid in pids.values())


async def test_a_service_whose_node_dies_is_started_on_another(cluster: RayCluster, tmp_path: Path) -> None:
    told = Told()
    async with supervised(cluster, tmp_path, told) as (boss, hosts), running(boss.until_one_ends()):
        await boss.start(spec("a", restarts=True))
        _, first = await told.ready.get()
        lost = node_of(hosts, "a")
        await asyncio.to_thread(cluster.kill, lost)
        _, second = await told.ready.get()
        assert node_of(hosts, "a") in cluster.nodes
        assert second["pid"] != first["pid"]
        assert "is gone" in told.restarts[0]
        os.kill(second["pid"], signal.SIGKILL)  # a killed process alone is started again, too
        await told.ready.get()
        cluster.add()  # which Ray does in the main thread only


async def test_a_unit_shares_a_node_and_one_that_finds_no_room_waits_and_says_so(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_hosts_module, "_TELL_S", 0.5)
    told = Told()
    async with supervised(cluster, tmp_path, told) as (boss, hosts):
        pairs = [spec(f"{role}-{unit}", room=Room(unit=unit)) for unit in "xy" for role in ("prefill", "decode")]
        hosts.share(pairs)
        await asyncio.gather(*map(boss.start, pairs))
        for _ in pairs:
            await told.ready.get()
        for unit in "xy":
            assert node_of(hosts, f"prefill-{unit}") == node_of(hosts, f"decode-{unit}")
        assert node_of(hosts, "prefill-x") != node_of(hosts, "prefill-y")
        while not told.sentences.empty():
            told.sentences.get_nowait()
        waiting = asyncio.create_task(boss.start(spec("late")))
        assert await told.sentences.get() == "late waits for a host of the Ray cluster with 1 CPU free"
        for name in ("prefill-x", "decode-x"):
            await boss.retire(name)
        await waiting
        assert (await told.ready.get())[0] == "late"


async def test_a_unit_larger_than_a_node_has_the_same_stages_on_each(cluster: RayCluster, tmp_path: Path) -> None:
    async with supervised(cluster, tmp_path, Told()) as (boss, hosts):
        room = hosts.worker_room(WorkerStart(("--pipeline-parallel", "2"), 2, unit="x"), "cpu")
        pair = [spec(role, "--model", "m", room=room) for role in ("prefill", "decode")]
        hosts.share(pair)
        await asyncio.gather(*map(boss.start, pair))
        assert node_of(hosts, "prefill") == node_of(hosts, "decode")
        assert hosts._units["prefill"] is hosts._units["decode"]
        (group,) = (group for group in placement_group_table().values() if group["state"] == "CREATED")
        assert {bundle["CPU"] for bundle in group["bundles"].values()} == {2.0}
        assert set(group["bundles_to_node_id"].values()) == set(cluster.nodes)


async def test_a_unit_that_ends_while_it_waits_gives_its_room_back(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_hosts_module, "_TELL_S", 0.5)
    told = Told()
    async with supervised(cluster, tmp_path, told) as (boss, hosts):
        large = spec("large", room=Room(num_gpus=1, unit="x"))  # which no node has yet
        hosts.share([large])
        waiting = asyncio.create_task(boss.start(large))
        assert "large waits for a host" in await told.sentences.get()
        await cancelled(waiting)
        states = [group["state"] for group in placement_group_table().values()]
        assert set(states) <= {"REMOVED"}


async def test_each_host_has_a_store_which_its_workers_use(cluster: RayCluster, tmp_path: Path) -> None:
    told = Told()
    async with supervised(cluster, tmp_path, told) as (boss, hosts):
        assert await hosts.default_stores() == len(cluster.nodes) + 1
        names = [f"kvstore-{index}" for index in range(await hosts.default_stores())]
        with ReservedPorts() as ports:
            reserved = await hosts.stores(names, ports)
        addresses = [address for address, _ in reserved.values()]
        assert len(set(addresses)) == len(names)
        for name, (address, room) in reserved.items():
            await boss.start(spec(name, "--listen", address, room=room))
            assert (await told.ready.get())[1]["arguments"] == ["--listen", address]
        arguments = ("--listen", "127.0.0.1:0", "--kv-store", addresses[0], "--metrics-port", "1")
        placed = spec("worker", *arguments, room=hosts.worker_room(WorkerStart(), "auto"))
        await boss.start(placed)
        listen, store = (await told.ready.get())[1]["arguments"][1::2][:2]
        assert listen == f"{hosts.address}:0"  # all nodes of the test have one address
        by_node = {room.node: address for address, room in reserved.values() if room is not None}
        assert store == by_node[node_of(hosts, "worker")]
        metrics = hosts.metrics_address(placed)
        assert metrics is not None
        assert metrics.startswith(f"{hosts.address}:")


async def test_certificates_are_copied_and_renewed(cluster: RayCluster, tmp_path: Path) -> None:
    files = [tmp_path / f"tls-{index}" for index in range(len(TLS_VARIABLES))]
    for path in files:
        path.write_text("first")
    told = Told()
    async with supervised(cluster, tmp_path, told) as (boss, hosts):
        environment = dict(zip(TLS_VARIABLES, map(str, files), strict=True))
        child: Child = await boss.start(replace(spec("a"), environment=environment))
        await told.ready.get()
        assert child.process.host
        for path in files:
            assert path.read_text() == "first"
            assert path.stat().st_mode & 0o077 == 0  # written again, by the actor: all nodes share this file system
            path.write_text("second")
        await hosts.write_certificates()
        assert [path.read_text() for path in files] == ["second"] * len(files)


async def test_another_version_of_halfmoon_is_refused(
    cluster: RayCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with supervised(cluster, tmp_path, Told()) as (boss, _):
        monkeypatch.setattr(halfmoon, "__version__", "0.0.1")
        with pytest.raises(Incompatible, match=r"this host 0\.0\.1: install the same on each"):
            await boss.start(spec("a"))


async def test_a_worker_of_a_plan_gets_the_kind_of_gpu_that_it_names(cluster: RayCluster, tmp_path: Path) -> None:
    nodes = {gpu: cluster.add(gpu) for gpu in ("A100", "H200")}
    async with supervised(cluster, tmp_path, Told()) as (boss, hosts):
        for planned in ("h200", "a100-80g"):
            await boss.start(spec(planned, room=hosts.worker_room(WorkerStart(gpu=planned), "auto")))
        assert node_of(hosts, "h200") == nodes["H200"]
        assert node_of(hosts, "a100-80g") == nodes["A100"]
    for node in nodes.values():
        cluster.kill(node)


def test_without_a_cluster_the_error_says_how_to_begin_one(tmp_path: Path) -> None:
    options = UpOptions(on="ray", ray_address="127.0.0.1:1", state_dir=tmp_path)
    with pytest.raises(Unavailable, match="ray start --head"):
        connected(options, LogFiles(tmp_path), print)
