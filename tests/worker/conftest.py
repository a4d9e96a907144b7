"""Two workers with a tiny random model, served over loopback in this process."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from halfmoon.background import running
from halfmoon.engine.async_engine import AsyncEngine
from halfmoon.engine.checkpoint.checkpoint import Checkpoint, prepare_checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.engine import Engine
from halfmoon.pb import decode_pb2_grpc, gateway_pb2, prefill_pb2_grpc, types_pb2
from halfmoon.rpc.credentials.access import CallAccess
from halfmoon.rpc.credentials.credential import credential_from
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.server import running_server
from halfmoon.rpc.store.kvstore_client import KVStoreClient
from halfmoon.rpc.transport.cuda_ipc import DeviceMemory
from halfmoon.rpc.transport.link import LinkSettings
from halfmoon.rpc.transport.rank_fetches import RankKVServicer
from halfmoon.rpc.transport.ranks import RankLinks
from halfmoon.worker.handover.kv_channels import KVChannels
from halfmoon.worker.handover.link_codecs import LinkCodecs
from halfmoon.worker.main import store_writer
from halfmoon.worker.metrics import WorkerMetrics
from halfmoon.worker.servicers.cache_servicer import CacheServicer
from halfmoon.worker.servicers.decode_servicer import DecodeServicer
from halfmoon.worker.servicers.prefill_servicer import PrefillServicer
from halfmoon.worker.serving import worker_services
from halfmoon.worker.state import WorkerState
from halfmoon.worker.store.awake_clock import AwakeClock
from halfmoon.worker.store.chain_queue import MAX_WAITING, ChainQueue
from halfmoon.worker.store.restorer import Restorer
from halfmoon.worker.store.source_links import HolderKind, SourceLinks


class Patience:
    """A clock a hundred times slower than the machine's, so that a busy machine makes nobody late, until `hurry`."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._before_s = 0.0
        self._pace = 0.01

    def __call__(self) -> float:
        return self._before_s + self._pace * (time.monotonic() - self._since_s)

    def hurry(self) -> None:
        """Goes at the machine's pace from now on."""
        self._before_s, self._since_s, self._pace = self(), time.monotonic(), 1.0


class RunningWorker:
    """A worker as its peers see it, and its inside for the test to look at."""

    def __init__(
        self,
        async_engine: AsyncEngine,
        state: WorkerState,
        metrics: WorkerMetrics,
        peer: Peer,
        servicer: PrefillServicer,
        restorer: Restorer,
        patience: Patience,
        ranks: RankLinks | None = None,
    ) -> None:
        self.ranks = ranks
        self.async_engine = async_engine
        self.engine = async_engine.engine
        self.state = state
        self.metrics = metrics
        self.peer = peer
        self.servicer = servicer
        self.restorer = restorer
        self.patience = patience  # with whom it loads from
        self.prefill = prefill_pb2_grpc.PrefillStub(peer.channel)
        self.decode = decode_pb2_grpc.DecodeStub(peer.channel)

    @property
    def num_used_blocks(self) -> int:
        """Blocks that requests hold."""
        stats = self.engine.stats()
        return stats.num_blocks - stats.num_free_blocks


StartWorker = Callable[..., "AsyncIterator[RunningWorker]"]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """A Llama with 2 layers and random weights."""
    path = tmp_path_factory.mktemp("tiny")
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=2,
    )
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(path)
    return prepare_checkpoint(str(path))


@pytest.fixture
async def start_worker(tiny: Checkpoint) -> AsyncIterator[Callable[..., object]]:
    """`await start_worker(role, lease_s=…, num_blocks=…)` gives a running worker; all stop with the test.

    What is not named here is the engine's.
    """
    async with AsyncExitStack() as stack:

        async def start(
            role: str,
            lease_s: float = 10.0,
            stall_s: float = 10.0,
            transports: tuple[str, ...] = ("shm",),
            device: DeviceMemory | None = None,
            store: str | None = None,
            link_mbps: float | None = None,
            link_bytes_per_s: float | None = None,
            secret: str | None = None,
            **options: Any,
        ) -> RunningWorker:
            settings: dict[str, Any] = {"dtype": "float32", "block_tokens": 8, "num_blocks": 32, **options}
            engine = Engine(tiny, EngineConfig(**settings))
            links = LinkSettings(transports=transports, stall_s=stall_s, bytes_per_s=link_bytes_per_s)
            own = _worker(engine, role, lease_s, links, device, store, link_mbps, secret)
            return await stack.enter_async_context(own)

        yield start


_numbers = itertools.count()


def limited_client(address: str, kind: HolderKind, mbps: float | None) -> KVStoreClient:
    """Client of a holder, limited to `mbps` megabytes per second if given."""
    return KVStoreClient(address, b"", LinkSettings(bytes_per_s=mbps and mbps * 1e6), server_role=kind)


@asynccontextmanager
async def _worker(
    engine: Engine,
    role: str,
    lease_s: float,
    link_settings: LinkSettings,
    device: DeviceMemory | None,
    store: str | None,
    link_mbps: float | None,
    secret: str | None = None,
) -> AsyncIterator[RunningWorker]:
    metrics = WorkerMetrics()
    identity = gateway_pb2.WorkerIdentity(
        worker_id=f"{role}-{next(_numbers)}",
        role=types_pb2.Role.Value(role.upper()),
        model="tiny",
        model_fingerprint=engine.checkpoint.fingerprint,
    )
    sources = SourceLinks(store, lambda address, kind: limited_client(address, kind, link_mbps))
    state = WorkerState(identity, engine.layout, metrics, ChainQueue(MAX_WAITING if store else 0), sources=sources)
    async with AsyncEngine(engine, state.on_step) as async_engine, AsyncExitStack() as stack:
        await stack.enter_async_context(aclosing(sources))
        patience = Patience()
        restorer = Restorer(
            async_engine, state, sources, metrics.store, ask_s=(60, 60), clock=AwakeClock(patience),
            codecs=LinkCodecs(engine.layout),
        )  # fmt: skip
        if sources.own is not None:
            await stack.enter_async_context(running(store_writer(async_engine, state, sources, metrics).run()))
        credential = None if secret is None else credential_from(secret, "worker")
        ranks = None if engine.ranks is None else RankLinks(engine.ranks, credential)
        channels = KVChannels(
            link_settings,
            lambda transport: metrics.kv_fallbacks.labels(transport).inc(),
            device,
            credential=credential,
            ranks=ranks,
        )
        prefill = PrefillServicer(async_engine, state, metrics, channels, restorer)
        decode = DecodeServicer(async_engine, state, metrics, lease_s, device, ranks)
        cache = CacheServicer(async_engine, engine.num_blocks, state, metrics)
        services = worker_services(prefill, decode, cache)
        if ranks is not None:
            stack.push_async_callback(ranks.aclose)
            services += RankKVServicer(ranks.ranks.staged, ranks.fetches).registrations()
        gateway = None if secret is None else credential_from(secret, "gateway")
        access = CallAccess(credential)
        async with (
            running_server("127.0.0.1:0", services, metrics.rpc, grace_s=0, access=access) as server,
            Peer(f"127.0.0.1:{server.port}", gateway, "worker") as peer,
        ):
            if ranks is not None:
                ranks.announce(peer.address)
            yield RunningWorker(async_engine, state, metrics, peer, prefill, restorer, patience, ranks)
        await prefill.close()
        decode.close()
    engine.check_integrity()
