"""A cluster without models: scripted workers behind the real protocol, and a real gateway on port 0."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import aiohttp
import grpc
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from prometheus_client import CollectorRegistry
from sqlalchemy import create_engine

from halfmoon.errors import HalfmoonError
from halfmoon.ledger.connection.upgrade import upgrade
from halfmoon.pb.decode_pb2 import (
    AdoptedTokens,
    AdoptRequest,
    CancelRequest,
    CancelResponse,
    EmptyCacheRequest,
    EmptyCacheResponse,
    FindRequest,
    FindResponse,
    SettleRequest,
    SettleResponse,
    StepTokens,
    TokensRequest,
)
from halfmoon.pb.decode_pb2_grpc import DecodeServicer, add_DecodeServicer_to_server
from halfmoon.pb.gateway_pb2 import BlockEvents, GatewayMessage, RoleChange, WorkerIdentity, WorkerLoad, WorkerMessage
from halfmoon.pb.gateway_pb2_grpc import ClusterStub
from halfmoon.pb.prefill_pb2 import FirstToken, HandedOver, PrefillEvent, PrefillRequest
from halfmoon.pb.prefill_pb2_grpc import PrefillServicer, add_PrefillServicer_to_server
from halfmoon.pb.types_pb2 import (
    CONSTRAINT_FAILED,
    LENGTH,
    NOT_FINISHED,
    STOP,
    TAKEN_OVER,
    FinishReason,
    Generation,
    KVLayout,
    PromptLogprob,
    Token,
    TopLogprob,
)
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.server import running_server
from halfmoon.rpc.telemetry.rpc_metrics import RpcMetrics
from halfmoon.rpc.telemetry.spans import NO_TRACER, Tracer
from halfmoon.worker.servicers.kept_answers import KeptAnswers
from services.gateway.cluster.member import ROLES
from services.gateway.openai.served_model import ServedModel
from services.gateway.routing.prompt_prefix import KnownTokens
from services.gateway.service import RunningGateway, running_gateway
from services.gateway.settings import GatewaySettings

MODEL = "bytes"
FINGERPRINT = "f" * 32
EOS = 256
VOCAB_SIZE = 257
CONTEXT_TOKENS = 200
LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32", block_tokens=8)
PATIENCE_S = 20  # for what must happen; never slept


_ROLE_NAMES = ROLES
_ROLES = {name: number for number, name in ROLES.items()}


def token(position: int, token_id: int = 0, finish: FinishReason.ValueType = NOT_FINISHED) -> Token:
    return Token(request_id="r", token_id=token_id, position=position, finish_reason=finish)


class ByteTokenizer:
    """One token a byte; 256 is the end of a text."""

    def encode(self, text: str, *, with_special: bool = True, salt: bytes = b"") -> list[int]:
        return list(text.encode())

    def begin(self, text: str, *, with_special: bool = True, salt: bytes = b"") -> KnownTokens:
        return KnownTokens(list(text.encode()), served_model())

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        render: Callable[[Mapping[str, Any]], str] | None = None,
    ) -> str:
        """One line a message. What is not in every message is written only where it is."""
        if render is not None:
            return render({"messages": messages, "tools": tools})
        head = f"tools:{json.dumps(tools)}\n" if tools else ""
        lines = (f"{self._speaker(one)}:{one['content']}{self._calls(one)}\n" for one in messages)
        extra = f"kwargs:{json.dumps(template_kwargs)}\n" if template_kwargs else ""
        return head + "".join(lines) + extra + ("" if add_generation_prompt else "open")

    def _speaker(self, message: Mapping[str, Any]) -> str:
        return "/".join(message[name] for name in ("role", "name", "tool_call_id") if name in message)

    def _calls(self, message: Mapping[str, Any]) -> str:
        return json.dumps(message["tool_calls"]) if "tool_calls" in message else ""

    def token_name(self, token_id: int) -> str:
        return f"<{token_id}>"

    def part_bytes(self, token_id: int) -> bytes | None:
        return bytes([token_id]) if token_id < EOS else None

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(one for one in token_ids if one < EOS).decode(errors="replace")


class ByteDetokenizer:
    """Holds the bytes of an unfinished character."""

    def __init__(self) -> None:
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        text = ByteTokenizer().decode(self._held)
        if text.endswith("\ufffd"):
            return ""
        self._held = []
        return text

    def flush(self) -> str:
        text, self._held = ByteTokenizer().decode(self._held), []
        return text


def served_model(aliases: tuple[str, ...] = ()) -> ServedModel:
    return ServedModel(
        MODEL,
        "byte-model",
        FINGERPRINT,
        VOCAB_SIZE,
        CONTEXT_TOKENS,
        ByteTokenizer(),
        lambda _: ByteDetokenizer(),
        1_700_000_000,
        aliases,
    )


@dataclass
class Script:
    """What the workers answer: `text`, then the end-of-sequence token, cut off by max_tokens."""

    text: str | bytes = "hello"
    decode_gate: asyncio.Event | None = None  # decode tokens wait for it
    tokens_before_gate: int = 0  # decode tokens sent all the same
    cached_tokens: int = 0
    loaded_tokens: int = 0  # of those that were cached
    fails_at: int | None = None  # the token at this position reports that its constraint failed
    stop_after: int | None = None  # the worker says STOP at this many tokens: a stop token

    def token(self, generation: Generation, position: int) -> Token:
        ids = [*(self.text.encode() if isinstance(self.text, str) else self.text), EOS]
        sampling = generation.sampling
        finish: FinishReason.ValueType = NOT_FINISHED
        if position == self.fails_at:
            finish = CONSTRAINT_FAILED
        elif ids[position] == EOS or position + 1 == self.stop_after:
            finish = STOP
        elif position + 1 == sampling.max_tokens:
            finish = LENGTH
        token = Token(request_id=generation.request_id, token_id=ids[position], position=position, finish_reason=finish)
        if sampling.HasField("num_top_logprobs"):
            token.logprob = -0.5
            token.top_logprobs.extend(
                TopLogprob(token_id=65 + i, logprob=-i - 0.5) for i in range(sampling.num_top_logprobs)
            )
        return token


def prompt_logprobs(generation: Generation) -> list[PromptLogprob]:
    """-1 at the prompt's second token, -2 at the next one, ..., and likelier ones: A, B, ..."""
    if not generation.sampling.HasField("num_prompt_logprobs") or generation.output_token_ids:
        return []
    tops = [TopLogprob(token_id=65 + i, logprob=-i / 4) for i in range(generation.sampling.num_prompt_logprobs)]
    num_tokens = len(generation.prompt_token_ids)
    return [PromptLogprob(logprob=-at, rank=at + 5, top_logprobs=tops) for at in range(1, num_tokens)]


@dataclass
class Calls:
    """What a fake worker was asked."""

    prefills: list[PrefillRequest] = field(default_factory=list)
    cancelled: list[str] = field(default_factory=list)
    settled: list[str] = field(default_factory=list)
    finds: list[bytes] = field(default_factory=list)
    cancel_came: asyncio.Event = field(default_factory=asyncio.Event)
    prefill_came: asyncio.Event = field(default_factory=asyncio.Event)
    prefill_ended: asyncio.Event = field(default_factory=asyncio.Event)


OnPrefill = Callable[["FakeWorker", PrefillRequest], AsyncIterator[PrefillEvent]]


class FakeWorker(PrefillServicer, DecodeServicer):
    """A worker of any role. Which decode worker a prefill worker hands over to is looked up in `fleet` by address."""

    def __init__(
        self, worker_id: str, role: Literal["prefill", "decode", "both"], script: Script, fleet: Fleet
    ) -> None:
        self.worker_id = worker_id
        self.role = role
        self.script = script
        self.fleet = fleet
        self.calls = Calls()
        self.refuse: list[HalfmoonError] = []  # raised by the next Prefill calls
        self.refuse_cancels: list[HalfmoonError] = []
        self.refuse_emptying: HalfmoonError | None = None
        self.on_prefill: OnPrefill | None = None
        self.address = ""
        self.changes: Mapping[str, Any] = {}  # of its identity
        self.kept = KeptAnswers()
        self.finds_answered = asyncio.Event()
        self.finds_answered.set()
        self.settles_taken = asyncio.Event()
        self.settles_taken.set()
        self.steps: dict[str, asyncio.Queue[StepTokens | HalfmoonError | None]] = {}  # None: it has drained
        self.decoding: list[asyncio.Task[None]] = []
        self.end_registration = asyncio.Event()
        self.registered = asyncio.Event()
        self.loads: asyncio.Queue[WorkerLoad | BlockEvents | WorkerMessage] = asyncio.Queue()
        self.asked_for_blocks = asyncio.Event()
        self.decode_members: set[str] = set()
        self.cache_members: set[str] = set()
        self.stores: list[str] | None = None  # None: not told yet
        self.members_changed = asyncio.Event()
        self.drains: list[bool] = []  # whether it was to return
        self.role_changes: list[RoleChange] = []
        self.answers_orders = True

    async def Prefill(self, request: PrefillRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[PrefillEvent]:
        self.calls.prefills.append(request)
        self.calls.prefill_came.set()
        try:
            if self.refuse:
                raise self.refuse.pop(0)
            events = self.on_prefill(self, request) if self.on_prefill else self.usual_prefill(request)
            async for event in events:
                yield event
        finally:
            self.calls.prefill_ended.set()

    async def usual_prefill(self, request: PrefillRequest) -> AsyncIterator[PrefillEvent]:
        generation = request.generation
        first = self.script.token(generation, len(generation.output_token_ids))
        event = FirstToken(
            token=first,
            num_cached_tokens=self.script.cached_tokens,
            num_loaded_tokens=self.script.loaded_tokens,
            queue_s=0.25,
            compute_s=0.5,
            prompt_logprobs=prompt_logprobs(generation),
            embedding=[3.0, 4.0, float(len(generation.prompt_token_ids))] if generation.sampling.pooling else (),
        )
        yield PrefillEvent(first_token=event)
        if first.finish_reason == NOT_FINISHED:
            self.hand_over(request, event)
            yield PrefillEvent(handed_over=HandedOver(kv_bytes=1))
        else:
            self.keep(generation, event)

    def keep(self, generation: Generation, first: FirstToken) -> None:
        if generation.HasField("repeatable"):
            self.kept.begin(generation.request_id, generation.gateway_id, generation.repeatable, first)
            self.kept.add(first.token, 0.0)

    def hand_over(self, request: PrefillRequest, first: FirstToken | None = None) -> None:
        decode = self.fleet.by_address[request.decode_address] if request.decode_address else self
        if first is not None:
            decode.keep(request.generation, first)
        task = asyncio.ensure_future(decode.decode(request.generation))
        decode.decoding.append(task)

    async def decode(self, generation: Generation) -> None:
        position, num_sent = len(generation.output_token_ids) + 1, 0
        while True:
            if self.script.decode_gate is not None and num_sent >= self.script.tokens_before_gate:
                await self.script.decode_gate.wait()
            token = self.script.token(generation, position)
            self.send(generation.gateway_id, token)
            if token.finish_reason != NOT_FINISHED:
                return
            position, num_sent = position + 1, num_sent + 1
            await asyncio.sleep(0)

    def send(self, gateway_id: str, *tokens: Token) -> None:
        for token in tokens:
            self.kept.add(token, 0.0)
        owner = self.kept.owner(tokens[0].request_id) if tokens else None
        self.steps[owner or gateway_id].put_nowait(StepTokens(tokens=tokens))

    async def Tokens(self, request: TokensRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[StepTokens]:
        queue = self.steps[request.gateway_id] = asyncio.Queue()
        yield StepTokens()
        while True:
            step = await queue.get()
            queue.task_done()
            if isinstance(step, HalfmoonError):
                raise step
            if step is None:
                return
            yield step

    async def Cancel(self, request: CancelRequest, context: grpc.aio.ServicerContext) -> CancelResponse:
        if self.refuse_cancels:
            raise self.refuse_cancels.pop(0)
        for request_id in request.request_ids:
            self.kept.drop(request_id)
        self.calls.cancelled += request.request_ids
        self.calls.cancel_came.set()
        return CancelResponse(num_cancelled=len(request.request_ids))

    async def Settle(self, request: SettleRequest, context: grpc.aio.ServicerContext) -> SettleResponse:
        await self.settles_taken.wait()
        for request_id in request.request_ids:
            self.kept.settle(request_id, 0.0)
        self.calls.settled += request.request_ids
        return SettleResponse()

    async def Find(self, request: FindRequest, context: grpc.aio.ServicerContext) -> FindResponse:
        self.calls.finds.append(request.key)
        await self.finds_answered.wait()
        return FindResponse(answers=self.kept.find(request.key))

    async def EmptyCache(self, request: EmptyCacheRequest, context: grpc.aio.ServicerContext) -> EmptyCacheResponse:
        if self.refuse_emptying is not None:
            raise self.refuse_emptying
        return EmptyCacheResponse(num_left=0)

    async def Adopt(self, request: AdoptRequest, context: grpc.aio.ServicerContext) -> AsyncIterator[AdoptedTokens]:
        before, kept = self.kept.owner(request.request_id), self.kept.adopt(request.request_id, request.gateway_id)
        if before != request.gateway_id and before in self.steps and kept.ended_s is None:
            over = Token(request_id=request.request_id, finish_reason=TAKEN_OVER)
            self.steps[before].put_nowait(StepTokens(tokens=[over]))
        yield AdoptedTokens(first=kept.first, has_ended=kept.ended_s is not None)
        yield AdoptedTokens(tokens=kept.tokens)

    def identity(self) -> WorkerIdentity:
        fields: dict[str, Any] = {
            "worker_id": self.worker_id,
            "role": _ROLES[self.role],
            "address": self.address,
            "model": MODEL,
            "model_fingerprint": FINGERPRINT,
            "layout": LAYOUT,
            "context_tokens": CONTEXT_TOKENS,
            "total_blocks": 100,
            "version": "1",
            "device": "fake",
            "pid": 7,
            "can_change_role": True,
        }
        return WorkerIdentity(**{**fields, **self.changes})

    async def register(self, gateway_address: str) -> None:
        """Stays registered until `end_registration`. Raises what the gateway refuses with."""

        async def messages() -> AsyncIterator[WorkerMessage]:
            yield WorkerMessage(identity=self.identity())
            ended = asyncio.ensure_future(self.end_registration.wait())
            try:
                while True:
                    load = asyncio.ensure_future(self.loads.get())
                    await asyncio.wait({ended, load}, return_when=asyncio.FIRST_COMPLETED)
                    if ended.done():
                        load.cancel()
                        return
                    report = load.result()
                    if isinstance(report, WorkerMessage):
                        yield report
                    elif isinstance(report, BlockEvents):
                        yield WorkerMessage(blocks=report)
                    else:
                        yield WorkerMessage(load=report)
            finally:
                ended.cancel()

        async with (
            Peer(gateway_address) as peer,
            peer.stream(ClusterStub(peer.channel).Register, messages(), deadline_s=600) as answers,
        ):
            async for answer in answers:
                assert isinstance(answer, GatewayMessage)
                self.registered.set()
                if answer.HasField("resend_blocks"):
                    self.asked_for_blocks.set()
                if answer.HasField("change_role"):
                    self.role_changes.append(answer.change_role)
                    if self.answers_orders:
                        self.take_role(_ROLE_NAMES[answer.change_role.role], answer.change_role.epoch)
                if answer.HasField("drain"):
                    self.drains.append(answer.drain.returns)
                    if self.answers_orders:
                        self.loads.put_nowait(WorkerLoad(free_blocks=100, draining=True))
                if answer.HasField("stores"):
                    self.stores = list(answer.stores.addresses)
                    self.members_changed.set()
                if answer.HasField("cache_members"):
                    self.cache_members |= set(answer.cache_members.joined)
                    self.cache_members -= set(answer.cache_members.left)
                    self.members_changed.set()
                if answer.HasField("decode_members"):
                    self.decode_members |= set(answer.decode_members.joined)
                    self.decode_members -= set(answer.decode_members.left)
                    self.members_changed.set()

    def take_role(self, role: Literal["prefill", "decode", "both"], epoch: int) -> None:
        """Serves another role from now on, and reports it."""
        self.role = role
        self.loads.put_nowait(WorkerLoad(free_blocks=100, role=_ROLES[role], role_epoch=epoch + 1))

    async def until_told(self, addresses: set[str]) -> None:
        """Returns once these are the addresses that prompts may be handed over to."""
        while self.decode_members != addresses:
            self.members_changed.clear()
            await self.members_changed.wait()

    async def until_caches(self, addresses: set[str]) -> None:
        """Returns once these are the addresses of the workers whose prefix caches it may read."""
        while self.cache_members != addresses:
            self.members_changed.clear()
            await self.members_changed.wait()

    async def until_stores(self, addresses: list[str]) -> None:
        """Returns once the gateway has named these as the pool's stores."""
        while self.stores != addresses:
            self.members_changed.clear()
            await self.members_changed.wait()


class Life:
    """Owns the gateway's life in a task of its own, so that a test may end it while it looks on."""

    def __init__(self, settings: GatewaySettings, tracer: Tracer = NO_TRACER, model: ServedModel | None = None) -> None:
        self._settings = settings
        self._model = model or served_model(settings.model_alias)
        self._tracer = tracer
        self._end = asyncio.Event()
        self._started: asyncio.Future[RunningGateway] = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._live())

    async def start(self) -> RunningGateway:
        either: set[asyncio.Future[Any]] = {self._task, self._started}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            self._task.result()
        return self._started.result()

    async def stop(self) -> None:
        self._end.set()
        await self._task

    async def _live(self) -> None:
        async with running_gateway(self._settings, self._model, self._tracer) as gateway:
            self._started.set_result(gateway)
            await self._end.wait()


class Fleet:
    """Owns the fake workers of a test, one gateway, and an OpenAI client."""

    def __init__(self, stack: AsyncExitStack, gateway: RunningGateway, life: Life) -> None:
        self._stack = stack
        self.stop = life.stop
        self.gateway = gateway
        self.cluster = gateway.cluster
        self.http = gateway.http
        self.by_address: dict[str, FakeWorker] = {}
        plain = DefaultAsyncHttpxClient(verify=False)  # reading the authorities' certificates takes longer than a test
        self.client = AsyncOpenAI(
            base_url=f"{gateway.http}/v1", api_key="none", max_retries=0, timeout=60, http_client=plain
        )

    async def add(
        self,
        worker_id: str,
        role: Literal["prefill", "decode", "both"],
        script: Script | None = None,
        **identity: Any,
    ) -> FakeWorker:
        """A registered worker, placeable when this returns; `identity` is what it says differently of itself."""
        worker = FakeWorker(worker_id, role, script or Script(), self)
        worker.changes = identity
        await self.serve(worker)
        registration = asyncio.ensure_future(worker.register(self.gateway.address))
        self._stack.push_async_callback(_cancelled, registration)
        await self.until(lambda: worker_id in self.placeable())
        return worker

    async def serve(self, worker: FakeWorker) -> None:
        """Has a worker listen that is not registered."""
        await self._stack.enter_async_context(_served(worker))
        self.by_address[worker.address] = worker

    async def join(self, *workers: FakeWorker) -> None:
        """Registers workers of another gateway's fleet here, too."""
        for worker in workers:
            self.by_address[worker.address] = worker
            registration = asyncio.ensure_future(worker.register(self.gateway.address))
            self._stack.push_async_callback(_cancelled, registration)
            await self.until(partial(self._is_placeable, worker.worker_id))

    def _is_placeable(self, worker_id: str) -> bool:
        return worker_id in self.placeable()

    async def pair(self, script: Script | None = None) -> tuple[FakeWorker, FakeWorker]:
        """One prefill and one decode worker."""
        script = script or Script()
        return await self.add("p0", "prefill", script), await self.add("d0", "decode", script)

    async def metrics(self) -> str:
        """What GET /metrics says."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.http}/metrics") as response:
            return await response.text()

    def placeable(self) -> set[str]:
        view = self.cluster.membership.view()
        return {one.worker_id for one in view.workers if one.can_prefill or one.can_decode or one.can_do_both}

    async def until(self, holds: Callable[[], bool]) -> None:
        """Waits until `holds`, asking again whenever the cluster changed."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds():
                await self.cluster.until_changed()

    async def until_told(self, holds: Callable[[], bool]) -> None:
        """Waits until `holds`: a worker's report is no event."""
        async with asyncio.timeout(PATIENCE_S):
            while not holds():  # noqa: ASYNC110
                await asyncio.sleep(0)

    async def until_idle(self) -> None:
        """Waits until no attempt is listened for."""
        async with asyncio.timeout(PATIENCE_S):
            while len(self.cluster.router):  # noqa: ASYNC110 (what is awaited has no event of its own)
                await asyncio.sleep(0)


@cache
def _empty_ledger() -> bytes:
    """The file of a ledger without rows, for whose migrations a gateway needs longer than for most tests."""
    with TemporaryDirectory() as directory:
        file = Path(directory, "ledger.db")
        engine = create_engine(f"sqlite:///{file}")
        with engine.begin() as connection:
            upgrade(connection)
        engine.dispose()
        return file.read_bytes()


def _begin_ledger(directory: Path) -> None:
    ledger = directory / "ledger.db"
    if directory.exists() and not ledger.exists():
        ledger.touch(mode=0o600)
        ledger.write_bytes(_empty_ledger())


@asynccontextmanager
async def running_fleet(
    tmp_path: Path, tracer: Tracer = NO_TRACER, model: ServedModel | None = None, **settings: Any
) -> AsyncIterator[Fleet]:
    calm = {
        "port": 0,
        "heartbeat_interval_s": 1000.0,
        "drain_s": 0.0,
        "join_wait_s": 0.0,
        "slo": "off",
    }
    chosen = GatewaySettings(state_dir=tmp_path, **{**calm, **settings})
    _begin_ledger(tmp_path)
    async with AsyncExitStack() as stack:
        life = Life(chosen, tracer, model)
        gateway = await life.start()
        stack.push_async_callback(life.stop)
        fleet = Fleet(stack, gateway, life)
        stack.push_async_callback(fleet.client.close)
        yield fleet


@asynccontextmanager
async def _served(worker: FakeWorker) -> AsyncIterator[None]:
    def add(server: grpc.aio.Server) -> None:
        add_PrefillServicer_to_server(worker, server)
        add_DecodeServicer_to_server(worker, server)

    async with running_server("127.0.0.1:0", [add], RpcMetrics(CollectorRegistry()), grace_s=0) as server:
        worker.address = f"127.0.0.1:{server.port}"
        try:
            yield
        finally:
            for task in worker.decoding:
                await _cancelled(task)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled() and task.exception() is not None and not isinstance(task.exception(), HalfmoonError):
        task.result()


async def soon(waiting: Awaitable[Any]) -> Any:
    """The result, or a failed test when it does not come."""
    return await asyncio.wait_for(waiting, PATIENCE_S)
