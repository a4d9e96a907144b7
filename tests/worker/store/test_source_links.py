"""Whom a worker may load KV from, and how long it stays connected to them."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from prometheus_client import CollectorRegistry

from halfmoon.errors import Unavailable
from halfmoon.kv.kv_layout import KVLayout
from halfmoon.pb import gateway_pb2, gateway_pb2_grpc
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.server import running_server
from halfmoon.rpc.store.kvstore_client import KVStoreClient
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics
from halfmoon.worker.membership.block_feed import CachedBlocks
from halfmoon.worker.membership.decode_peers import DecodePeers
from halfmoon.worker.membership.registration import Registration
from halfmoon.worker.store.holder import Holders, NamedHolder
from halfmoon.worker.store.source_links import HolderKind, SourceLinks


class Client(KVStoreClient):
    """A client that notes who was called and whether it was closed."""

    def __init__(self, address: str, kind: HolderKind) -> None:
        self.name = (address, kind)
        self.is_closed = False

    async def close(self) -> None:
        self.is_closed = True


def name_of(links: SourceLinks, address: str, kind: HolderKind = "store") -> tuple[str, str]:
    client = links.to(address, kind).client
    assert isinstance(client, Client)
    return client.name


async def test_only_workers_that_a_gateway_has_named_are_read() -> None:
    links = SourceLinks(None, Client, is_open=False)
    with pytest.raises(Unavailable, match="no gateway of this worker names a worker at w:1"):
        links.to("w:1", "worker")
    links.begin_anew("g0")
    links.change_workers("g0", ["w:1", "w:2"], [])
    assert name_of(links, "w:1", "worker") == ("w:1", "worker")
    with pytest.raises(Unavailable, match="store"):
        links.to("w:1")
    links.change_workers("g0", [], ["w:1"])
    with pytest.raises(Unavailable, match="worker at w:1"):
        links.to("w:1", "worker")
    links.begin_anew("g0")
    with pytest.raises(Unavailable, match="worker at w:2"):
        links.to("w:2", "worker")
    assert name_of(SourceLinks(None, Client), "w:9", "worker") == ("w:9", "worker")


async def test_only_stores_that_a_gateway_has_named_are_called() -> None:
    links = SourceLinks("own:1", Client)
    assert name_of(links, "own:1") == ("own:1", "store")
    with pytest.raises(Unavailable, match="no gateway of this worker names a store at a:1"):
        links.to("a:1")
    await links.name_stores("g0", ["b:1", "a:1", "own:1"])
    await links.name_stores("g1", ["c:1"])
    assert links.stores == ("own:1", "a:1", "b:1", "c:1")
    assert name_of(links, "a:1") == ("a:1", "store")
    assert links.to("a:1") is links.to("a:1")
    assert links.own is links.to("own:1")


async def test_a_store_and_a_worker_at_one_address_are_two_holders() -> None:
    links = SourceLinks(None, Client)
    await links.name_stores("g0", ["a:1"])
    assert (name_of(links, "a:1"), name_of(links, "a:1", "worker")) == (("a:1", "store"), ("a:1", "worker"))
    assert links.own is None


async def test_a_link_is_closed_when_no_gateway_names_the_store_any_more() -> None:
    links = SourceLinks("own:1", Client)
    await links.name_stores("g0", ["a:1", "b:1"])
    await links.name_stores("g1", ["b:1"])
    clients = [links.to(address).client for address in ("own:1", "a:1", "b:1")]
    await links.name_stores("g0", [])
    assert [isinstance(client, Client) and client.is_closed for client in clients] == [False, True, False]
    await links.aclose()
    assert all(isinstance(client, Client) and client.is_closed for client in clients)


async def test_two_gateways_may_speak_while_links_are_closed() -> None:
    class Slow(Client):
        async def close(self) -> None:
            await asyncio.sleep(0)
            self.is_closed = True

    links = SourceLinks(None, Slow)
    await links.name_stores("g0", ["a:1", "b:1", "c:1"])
    clients = [links.to(address).client for address in ("a:1", "b:1", "c:1")]
    await asyncio.gather(links.name_stores("g0", []), links.name_stores("g1", []))
    assert all(isinstance(client, Slow) and client.is_closed for client in clients)


async def test_what_a_gateway_says_on_the_registration_stream_counts() -> None:
    class Gateway(gateway_pb2_grpc.ClusterServicer):
        async def Register(self, request_iterator: object, context: grpc.aio.ServicerContext) -> object:  # type: ignore[override]
            welcome = gateway_pb2.Welcome(gateway_id="g", heartbeat_interval_s=1.0)
            yield gateway_pb2.GatewayMessage(welcome=welcome)
            yield gateway_pb2.GatewayMessage(stores=gateway_pb2.Stores(addresses=["a:1"]))
            await asyncio.Event().wait()

    named = asyncio.Event()

    class Links(SourceLinks):
        async def name_stores(self, gateway: str, addresses: object) -> None:
            await super().name_stores(gateway, addresses)  # type: ignore[arg-type]
            named.set()

    links = Links(None, Client)
    add = [lambda server: gateway_pb2_grpc.add_ClusterServicer_to_server(Gateway(), server)]
    async with running_server("127.0.0.1:0", add, RpcMetrics(CollectorRegistry()), grace_s=0) as server:
        registration = Registration(
            Peer(f"127.0.0.1:{server.port}"),
            gateway_pb2.WorkerIdentity(worker_id="w"),
            gateway_pb2.WorkerLoad,
            CachedBlocks().feed(),
            DecodePeers(is_open=True),
            links,
            b"key",
        )
        running = asyncio.ensure_future(registration.run())
        await asyncio.wait_for(named.wait(), 30)
        running.cancel()
        await asyncio.wait({running})
    assert links.stores == ("a:1",)


async def test_prompts_that_forget_holders_at_once_leave_each_other_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfmoon.worker.store.holder._MAX_HOLDERS", 2)
    links = SourceLinks(None, SlowlyClosed)
    holders = Holders(links, KVLayout(1, 1, 8, "float32", 4))
    names = [NamedHolder(f"w:{number}", "worker") for number in range(6)]
    for name in names[:4]:
        holders._get(name)
        links.to(*name[:2])

    async def use(*used: NamedHolder) -> list[bool]:
        async with holders.of(used) as given:
            clients = [links.to(one.address, one.kind).client for one in given]
            for _ in range(20):
                await asyncio.sleep(0)
            assert all(holders._get(name) is one for name, one in zip(used, given, strict=True))
            return [client.is_closed for client in clients if isinstance(client, Client)]

    closed = await asyncio.gather(use(names[4]), use(names[1]), use(names[5], names[2]))
    assert not any(any(one) for one in closed)
    async with holders.of([]):
        assert len(holders._holders) == 2


async def test_workers_that_share_prompts_are_forgotten_once_none_is_loaded_from_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("halfmoon.worker.store.holder._MAX_HOLDERS", 2)
    links = SourceLinks(None, Client)
    holders = Holders(links, KVLayout(1, 1, 8, "float32", 4))
    async with holders.worker("w:0") as first:
        client = links.to(first.address, first.kind).client
        for number in range(1, 5):
            async with holders.worker(f"w:{number}"):
                pass
        assert isinstance(client, Client)
        assert not client.is_closed
    async with holders.worker("w:5"):
        assert client.is_closed
    assert len(holders._holders) == 2


class SlowlyClosed(Client):
    async def close(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        self.is_closed = True
