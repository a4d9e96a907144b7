"""Ranks that join over TCP: the same tokens, nobody without the key, one life and one death."""

from __future__ import annotations

import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pytest

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.config import EngineConfig, JoinedRanks
from halfmoon.engine.engine import Engine
from halfmoon.engine.parallel import joined_ranks
from halfmoon.engine.parallel.joined_ranks import JoinedRank, awaited_ranks, hosts_of, join
from halfmoon.errors import Incompatible, InvalidRequest, ServiceFailed, Unavailable
from halfmoon.rpc.credentials.credential import credential_from, rank_key
from tests.engine.parallel.test_parallel_engine import finish, generate, hand_over, request, requests

PATIENCE_S = 60.0  # for what a machine under load must do at last
SECRET = "a-secret-of-forty-three-characters-at-least"
KEY = rank_key(credential_from(SECRET, "worker"))

StartEngine = Callable[..., Engine]
Host = Callable[..., list[subprocess.Popen[bytes]]]


@pytest.fixture
def address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def host(address: str, tiny_checkpoint: Callable[[str], Checkpoint]) -> Iterator[Host]:
    """`host("b", 2)`: two ranks of one host, as `halfmoon join` starts them."""
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, num_ranks: int, model: str = "llama") -> list[subprocess.Popen[bytes]]:
        program = (sys.executable, "-m", "halfmoon.worker.joined_rank", "--worker", address, "--host", name)
        of_model = ("--model", str(tiny_checkpoint(model).path))
        environment = {**os.environ, "HALFMOON_CLUSTER_SECRET": SECRET}
        started = [
            subprocess.Popen([*program, *of_model, "--index", str(index)], env=environment)
            for index in range(num_ranks)
        ]
        processes.extend(started)
        return started

    yield start
    for process in processes:
        process.kill()
        process.wait()


def spanning(address: str, num_joined: int = 2) -> dict[str, Any]:
    return {"joined": JoinedRanks(num_joined, address, KEY)}


def test_the_tokens_are_those_of_one_process(address: str, host: Host, start_engine: StartEngine) -> None:
    expected = generate(start_engine(), *requests())
    processes = host("b", 2)
    engine = start_engine(2, 2, **spanning(address))
    assert generate(engine, *requests()) == expected
    engine.close()
    assert [process.wait(PATIENCE_S) for process in processes] == [0, 0]


def test_kv_of_several_hosts_is_handed_over_to_one_and_back(
    address: str, host: Host, start_engine: StartEngine
) -> None:
    host("b", 1)
    host("c", 1)
    one, many = (
        start_engine(prefix_cache=False),
        start_engine(2, 2, prefix_cache=False, **spanning(address)),
    )
    wanted = request("r", 40)
    expected = generate(one, wanted)["r"]
    assert hand_over(many, one, wanted) == hand_over(one, many, wanted) == expected


def test_a_rank_that_is_killed_ends_all_with_the_reason(address: str, host: Host, start_engine: StartEngine) -> None:
    first, second = host("b", 2)
    engine = start_engine(2, 2, **spanning(address))
    engine.add(request("long", 20, max_tokens=60))
    engine.step()
    second.kill()
    with pytest.raises(ServiceFailed, match=r"follower rank 3 on 127\.0\.0\.1 was lost"):
        finish(engine)
    assert first.wait(PATIENCE_S) == 0


def test_a_rank_with_another_model_says_so(address: str, host: Host, start_engine: StartEngine) -> None:
    host("b", 1, model="opt")
    with pytest.raises(Incompatible, match=r"follower rank 1: the model in .* is not the one"):
        start_engine(1, 2, **spanning(address, 1))


def test_only_other_hosts_ranks_can_be_awaited(address: str) -> None:
    with pytest.raises(Incompatible, match=r"of 2 ranks .*, 2 cannot be on other hosts"):
        EngineConfig(tensor_parallel=2, joined=JoinedRanks(2, address, b""))
    with pytest.raises(Incompatible, match="HOST:PORT"):
        JoinedRanks(1, "10.0.0.1", b"")
    with pytest.raises(Incompatible, match="HOST:PORT"):
        JoinedRanks(1, "10.0.0.1:0", b"")


def joining(address: str, host: str, index: int, key: bytes = KEY) -> Future[JoinedRank]:
    """A rank that joins as soon as somebody listens."""

    def joined() -> JoinedRank:
        while True:
            try:
                return join(address, key, host, f"{host}-{index}", index, "127.0.0.1:1")
            except ConnectionRefusedError:
                pass

    pool = ThreadPoolExecutor(1)
    found = pool.submit(joined)
    pool.shutdown(wait=False)
    return found


def test_ranks_of_a_host_follow_each_other_and_those_that_are_too_many_are_sent_away(address: str) -> None:
    ranks = [joining(address, *who) for who in (("b", 1), ("c", 0), ("b", 0))]
    found = awaited_ranks(JoinedRanks(3, address, KEY))
    assert [(rank.host, rank.index) for rank in found] == [("b", 0), ("b", 1), ("c", 0)]
    assert hosts_of(found) == [(0, 2), (1, 2), (0, 1)]
    found[0].steps.send("hello")
    assert ranks[2].result(PATIENCE_S).steps.recv() == "hello"
    for rank in found:
        rank.close()
    for one in ranks:
        with closing(one.result(PATIENCE_S)) as rank, pytest.raises(EOFError):
            rank.life.recv()


def test_strangers_neither_join_nor_hold_up_others(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    awaited: queue.SimpleQueue[list[JoinedRank]] = queue.SimpleQueue()
    wanted = JoinedRanks(1, address, KEY)
    thread = threading.Thread(target=lambda: awaited.put(awaited_ranks(wanted)), daemon=True)
    thread.start()
    with pytest.raises(Unavailable, match="another cluster secret"):
        joining(address, "x", 0, b"another's").result(PATIENCE_S)
    host, port = address.split(":")
    with socket.create_connection((host, int(port))), socket.create_connection((host, int(port))) as loud:
        loud.sendall(b"GET / HTTP/1.1\r\n\r\n")
        monkeypatch.setattr(joined_ranks, "_VERSION", "0.0.1")  # of whoever introduces himself
        with pytest.raises(Incompatible, match=r"this host 0\.0\.1: install the same on each"):
            joining(address, "y", 0).result(PATIENCE_S)
        monkeypatch.undo()
        rank = joining(address, "b", 0).result(PATIENCE_S)
        assert [one.host for one in awaited.get(timeout=PATIENCE_S)] == ["b"]
        rank.close()


def test_an_address_that_is_taken_is_named(address: str) -> None:
    with (
        socket.create_server(("127.0.0.1", int(address.split(":")[1]))),
        pytest.raises(Unavailable, match=rf"cannot join at {address}: Address already in use"),
    ):
        awaited_ranks(JoinedRanks(1, address, KEY))


def test_ranks_without_a_secret_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="ranks of other hosts need the cluster secret"):
        rank_key(None)
