"""KV that ranks of several hosts hand over themselves: the tokens of one process, nothing at a first rank."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.config import JoinedRanks
from halfmoon.engine.parallel.sharded_kv import ShardedKV
from halfmoon.errors import HalfmoonError, InvalidRequest, Unavailable
from halfmoon.kv.kv_layout import Shard
from halfmoon.kv.staged_shards import RankShard, StagedShards, Ticket
from halfmoon.pb import prefill_pb2, rank_kv_pb2
from halfmoon.rpc.credentials.credential import credential_from, rank_key
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.transport.rank_fetches import RankFetches, fetch_there
from tests.worker.conftest import RunningWorker
from tests.worker.test_handover import generation, listening, prefilled, reference, tokens_of, until

pytestmark = pytest.mark.timeout(240)

Start = Callable[..., Awaitable[RunningWorker]]
SECRET = "a-secret-of-forty-three-characters-at-least"
CREDENTIAL = credential_from(SECRET, "worker")
PROMPT = [(7 * i + 3) % 125 + 3 for i in range(21)]


class Cut(NamedTuple):
    tensor: int
    pipeline: int
    remote: int


class Hosts:
    """Starts workers whose last ranks are processes of another host."""

    def __init__(self, start_worker: Start, tiny: Checkpoint) -> None:
        self._start_worker = start_worker
        self._tiny = tiny
        self.processes: list[list[subprocess.Popen[bytes]]] = []  # by worker

    async def start(self, role: str, cut: Cut, **options: Any) -> RunningWorker:
        options = {"secret": SECRET, "prefix_cache": False, **options}
        if cut == (1, 1, 0):
            return await self._start_worker(role, **options)
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = f"127.0.0.1:{server.getsockname()[1]}"
        self.processes.append([self._rank(address, f"{role}'s", index) for index in range(cut.remote)])
        joined = JoinedRanks(cut.remote, address, rank_key(CREDENTIAL)) if cut.remote else None
        grid = {"tensor_parallel": cut.tensor, "pipeline_parallel": cut.pipeline, "joined": joined}
        return await self._start_worker(role, **grid, **options)

    def _rank(self, address: str, host: str, index: int) -> subprocess.Popen[bytes]:
        program = (sys.executable, "-m", "halfmoon.worker.joined_rank", "--worker", address, "--host", host)
        environment = {**os.environ, "HALFMOON_CLUSTER_SECRET": SECRET, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([*program, "--model", str(self._tiny.path), "--index", str(index)], env=environment)


@pytest.fixture
def hosts(start_worker: Start, tiny: Checkpoint) -> Iterator[Hosts]:
    started = Hosts(start_worker, tiny)
    yield started
    for process in (process for processes in started.processes for process in processes):
        process.kill()
        process.wait()


def asked(checkpoint: Checkpoint, decode: RunningWorker, **options: Any) -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(
        generation=generation(checkpoint, PROMPT, 6), decode_address=decode.peer.address, **options
    )


async def handed_over(checkpoint: Checkpoint, prefill: RunningWorker, decode: RunningWorker) -> list[int]:
    async with listening(decode) as steps:
        first, _ = await prefilled(prefill, asked(checkpoint, decode))
        return [first.first_token.token.token_id, *await tokens_of(steps)]


def num_fallbacks(worker: RunningWorker) -> int:
    return int(worker.metrics.kv_fallbacks.labels("ranks")._value.get())


def forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    """No KV may be gathered at a first rank, or scattered from there."""

    def refused(*_: object) -> None:
        raise AssertionError("KV came to a first rank")

    monkeypatch.setattr(ShardedKV, "read", refused)
    monkeypatch.setattr(ShardedKV, "write", refused)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (Cut(2, 2, 2), Cut(2, 2, 2)),
        (Cut(1, 2, 1), Cut(2, 1, 1)),
        (Cut(2, 1, 1), Cut(1, 2, 0)),
        (Cut(2, 1, 1), Cut(1, 1, 0)),
        (Cut(1, 2, 0), Cut(2, 1, 1)),
        (Cut(1, 1, 0), Cut(2, 2, 2)),
    ],
    ids=["alike", "differently cut", "to ranks of one host", "to one rank", "from ranks of one host", "from one rank"],
)
async def test_the_reference_tokens_with_no_kv_at_a_first_rank(
    hosts: Hosts, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch, source: Cut, target: Cut
) -> None:
    prefill = await hosts.start("prefill", source, transports=("grpc",))
    decode = await hosts.start("decode", target)
    forbid(monkeypatch)
    assert await handed_over(tiny, prefill, decode) == reference(tiny, PROMPT, 6)
    assert num_fallbacks(prefill) == 0
    assert decode.engine.ranks is not None
    assert decode.engine.ranks.staged.num_bytes == 0  # all was written
    assert decode.metrics.handover_bytes.labels("in")._value.get() == len(PROMPT) * decode.engine.layout.token_bytes


@pytest.mark.parametrize("options", [{"sequence_parallel": 2}, {"kv_dtype": "int8"}], ids=["sequence ranks", "int8"])
async def test_a_worker_that_cannot_take_it_gets_it_from_the_first_rank(
    hosts: Hosts, tiny: Checkpoint, options: dict[str, Any]
) -> None:
    prefill, decode = await hosts.start("prefill", Cut(1, 2, 1)), await hosts.start("decode", Cut(1, 1, 0), **options)
    tokens = await handed_over(tiny, prefill, decode)
    assert num_fallbacks(prefill) == 1
    assert len(tokens) == 6
    if "kv_dtype" not in options:
        assert tokens == reference(tiny, PROMPT, 6)


async def test_two_workers_of_one_host_each_send_in_frames_as_ever(hosts: Hosts, tiny: Checkpoint) -> None:
    prefill = await hosts.start("prefill", Cut(1, 2, 0), transports=("grpc",))
    decode = await hosts.start("decode", Cut(1, 1, 0))
    assert await handed_over(tiny, prefill, decode) == reference(tiny, PROMPT, 6)
    assert num_fallbacks(prefill) == 1


async def test_shared_memory_comes_before_fetches_from_one_host(hosts: Hosts, tiny: Checkpoint) -> None:
    prefill, decode = await hosts.start("prefill", Cut(1, 1, 0)), await hosts.start("decode", Cut(1, 2, 1))
    assert decode.ranks is not None
    decode.ranks.ranks = replace(decode.ranks.ranks, dtype="int8")  # would be declined if it came first
    assert await handed_over(tiny, prefill, decode) == reference(tiny, PROMPT, 6)
    assert num_fallbacks(prefill) == 0


async def test_ranks_that_answer_nothing_leave_it_to_the_first(hosts: Hosts, tiny: Checkpoint) -> None:
    prefill, decode = await hosts.start("prefill", Cut(1, 2, 1)), await hosts.start("decode", Cut(1, 2, 1))
    assert prefill.ranks is not None
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections like a host that drops what comes
        first, second = prefill.ranks.ranks.shards
        second = replace(second, address=f"127.0.0.1:{silent.getsockname()[1]}")
        prefill.ranks.ranks = replace(prefill.ranks.ranks, shards=(first, second))
        assert await handed_over(tiny, prefill, decode) == reference(tiny, PROMPT, 6)
    assert num_fallbacks(prefill) == 1


@pytest.mark.parametrize("head", [0, 1])
async def test_ranks_that_send_too_little_cost_the_receiver_one_transfer(
    hosts: Hosts, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch, head: int
) -> None:
    prefill = await hosts.start("prefill", Cut(1, 1, 0), transports=("grpc",))
    decode = await hosts.start("decode", Cut(2, 2, 2))
    cut = StagedShards.cut

    def half(staged: StagedShards, ticket: Ticket, rank: int, place: Shard) -> bytes:
        payload = cut(staged, ticket, rank, place)
        return payload[: len(payload) // 2] if place.head_start == head else payload

    with monkeypatch.context() as lying:
        lying.setattr(StagedShards, "cut", half)
        async with listening(decode):
            with pytest.raises(HalfmoonError, match="bytes"):
                await prefilled(prefill, asked(tiny, decode))
    await until(lambda: decode.num_used_blocks == prefill.num_used_blocks == 0)
    assert await handed_over(tiny, prefill, decode) == reference(tiny, PROMPT, 6)
    assert num_fallbacks(prefill) == 0


async def test_ranks_that_do_not_reach_each_other_leave_it_to_the_first(
    hosts: Hosts, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nobody(self: RankFetches, addresses: Sequence[str | None]) -> None:
        raise Unavailable("no way there")

    monkeypatch.setattr(RankFetches, "reach", nobody)
    prefill, decode = await hosts.start("prefill", Cut(1, 2, 1)), await hosts.start("decode", Cut(2, 1, 0))
    assert await handed_over(tiny, prefill, decode) == reference(tiny, PROMPT, 6)
    assert num_fallbacks(prefill) == 1


async def test_a_fetch_that_fails_ends_the_transfer_alone_and_the_next_one_looks_anew(
    hosts: Hosts, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = await hosts.start("prefill", Cut(1, 2, 1)), await hosts.start("decode", Cut(2, 1, 0))
    fetch = RankFetches.fetch

    async def broken(*arguments: Any) -> None:
        monkeypatch.setattr(RankFetches, "fetch", fetch)
        raise Unavailable("the link broke")

    monkeypatch.setattr(RankFetches, "fetch", broken)
    async with listening(decode):
        with pytest.raises(Unavailable, match="the link broke"):
            await prefilled(prefill, asked(tiny, decode))
    await until(lambda: decode.num_used_blocks == prefill.num_used_blocks == 0)
    assert await handed_over(tiny, prefill, decode) == reference(tiny, PROMPT, 6)
    assert num_fallbacks(prefill) == 0


@pytest.mark.parametrize("whose", ["prefill", "decode"])
async def test_a_rank_that_is_killed_leaves_no_block_on_the_other_worker(
    hosts: Hosts, tiny: Checkpoint, monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    prefill, decode = await hosts.start("prefill", Cut(1, 2, 1)), await hosts.start("decode", Cut(1, 2, 1))
    brings = asyncio.Event()
    fetch = RankFetches.fetch

    async def slow(*arguments: Any) -> None:
        brings.set()
        await asyncio.to_thread(victim.wait)
        await fetch(*arguments)

    monkeypatch.setattr(RankFetches, "fetch", slow)  # of the decode worker's first rank
    [victim] = hosts.processes[0 if whose == "prefill" else 1]
    async with listening(decode):
        call = asyncio.create_task(prefilled(prefill, asked(tiny, decode)))
        await brings.wait()
        victim.kill()
        with pytest.raises(HalfmoonError):
            await call
    other = decode if whose == "prefill" else prefill
    await until(lambda: other.num_used_blocks == 0)


async def test_only_workers_of_the_cluster_read_what_ranks_keep(hosts: Hosts) -> None:
    worker = await hosts.start("decode", Cut(1, 2, 1))
    assert worker.engine.ranks is not None
    address = worker.engine.ranks.shards[1].address
    assert address is not None
    ticket, source = Ticket(b"nobody's", 1), RankShard(1, Shard(1, 2, 0, 2), address)
    for at in (address, worker.peer.address):
        async with Peer(at, credential_from(SECRET, "gateway"), "worker") as gateway:
            with pytest.raises(HalfmoonError, match="gateway"):
                await fetch_there(gateway, [source], ticket, source, 1, ticket)
        async with Peer(at, CREDENTIAL, "worker") as peer:
            with pytest.raises(Unavailable, match="rank 1 keeps this part of a KV transfer no more"):
                await fetch_there(peer, [source], ticket, source, 1, ticket)
            with pytest.raises(InvalidRequest, match="at an address"):
                await fetch_there(peer, [RankShard(1, source.shard)], ticket, source, 1, ticket)


async def test_bad_offers_are_declined(hosts: Hosts) -> None:
    worker = await hosts.start("decode", Cut(2, 1, 0))
    links = worker.ranks
    assert links is not None
    assert links.ranks.dtype == "float32"
    nowhere = rank_kv_pb2.RankShards(shards=[rank_kv_pb2.RankShard(layer_end=2, head_end=2)], dtype="float32")
    for parameters in (b"\xff", nowhere.SerializeToString()):
        with pytest.raises(InvalidRequest, match="an offer of ranks"):
            await links.join(parameters)
