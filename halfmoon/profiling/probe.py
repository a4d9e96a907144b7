"""One worker, measured over its own RPCs: prompts as a gateway sends them, KV as another worker does."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, Self
from uuid import uuid4

from halfmoon.background import running
from halfmoon.errors import HalfmoonError, Unavailable
from halfmoon.kv.frame import KVRange, plan_frames
from halfmoon.kv.kv_layout import Shard
from halfmoon.pb import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2
from halfmoon.profiling.target import Target
from halfmoon.profiling.token_watch import SeenStep, TokenWatch
from halfmoon.rpc.credentials.credential import Credential
from halfmoon.rpc.peer import Peer
from halfmoon.rpc.transfer import TransferSender, transfer_to
from halfmoon.rpc.transport.link import KVLink, LinkSettings

_CALL_S = 5.0
_PROMPT_S = 600.0  # for a long prompt on a slow device
_TRANSFER_S = 120.0
_BATCH_S = 600.0
_MOST_STEPS = 4_096  # of a batch
_TOKEN_IDS = range(5, 100)  # tokens that every vocabulary has


class Prefilled(NamedTuple):
    """One prompt alone."""

    new_tokens: int
    cached_tokens: int
    seconds: float  # from its first forward pass to its first token
    answer_s: float  # of the call without queue and computation: until the token is here


class Transferred(NamedTuple):
    """One hand-over."""

    num_bytes: int
    seconds: float  # from the first byte to the receiver's acknowledgement
    transport: str


class WorkerProbe:
    """Owns the connections to one worker and the requests on it. No request is left there when the block ends. Knows
    nothing of gateways.

    Prompts are random tokens under a tenant salt of their own, so no cache can answer them.
    """

    def __init__(
        self, target: Target, transports: Sequence[str] = ("shm",), credential: Credential | None = None
    ) -> None:
        self.target = target
        self._name = f"profile-{uuid4().hex[:8]}"  # as a gateway
        self._salt = uuid4().hex.encode()  # text: other bytes may name a KV policy
        self._numbers = itertools.count()
        self._random = random.Random(self._name)
        self._peer = Peer(target.address, credential, "worker")
        self._prefill = prefill_pb2_grpc.PrefillStub(self._peer.channel)
        self._decode = decode_pb2_grpc.DecodeStub(self._peer.channel)
        # without any offered transport, gRPC inline remains
        self._links = {
            name: KVLink(
                Peer(target.address, credential, "worker"), LinkSettings(transports=() if name == "grpc" else (name,))
            )
            for name in transports
        }

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        for link in self._links.values():
            await link.close()
        await self._peer.close()

    @property
    def transports(self) -> tuple[str, ...]:
        """The given transports, the preferred one first."""
        return tuple(self._links)

    def prompt(self, num_tokens: int) -> list[int]:
        """Tokens that were never seen before."""
        return self._random.choices(_TOKEN_IDS, k=num_tokens)

    async def prefill(self, prompt: Sequence[int], receiver: WorkerProbe | None = None) -> Prefilled:
        """Computes one token after a prompt, and hands its KV to a `receiver` that listens for this probe.

        Raises the worker's refusal, Unavailable, or DeadlineExceeded.
        """
        generation = self._generation(prompt, 1 if receiver is None else 2)
        if receiver is None:  # a gateway without a token reader counts as lost, and its requests are ended
            generation.gateway_id = f"{self._name}-prompts"
        address = (receiver or self).target.address
        request = prefill_pb2.PrefillRequest(generation=generation, decode_address=address)
        first: Prefilled | None = None
        called_s = time.monotonic()
        async with self._peer.stream(self._prefill.Prefill, request, deadline_s=_PROMPT_S) as events:
            async for event in events:
                if event.HasField("first_token"):
                    token = event.first_token
                    cached, worked_s = token.num_cached_tokens, token.queue_s + token.compute_s
                    answer_s = max(time.monotonic() - called_s - worked_s, 0.0)
                    first = Prefilled(len(prompt) - cached, cached, token.compute_s, answer_s)
        if first is None:
            raise Unavailable(f"{self.target.worker_id} ended a prompt without a token")
        return first

    async def transfer(self, num_tokens: int, transport: str) -> Transferred:
        """Hands over KV of `num_tokens` for a request that ends with its first decode step."""
        generation = self._generation(self.prompt(num_tokens), 2)
        async with self._listening(num_tokens), self._cancelled_at_end([generation.request_id]):
            return await self._hand_over(generation, transport)

    @asynccontextmanager
    async def decoding(self, batch: int, prompt_tokens: int) -> AsyncIterator[TokenWatch]:
        """Lets `batch` sequences decode inside the block; the watch sees their steps."""
        most = min(self.target.context_tokens - prompt_tokens, _MOST_STEPS)
        generations = [self._generation(self.prompt(prompt_tokens), most) for _ in range(batch)]
        names = [generation.request_id for generation in generations]
        async with self._listening(prompt_tokens) as watch, self._cancelled_at_end(names):
            for generation in generations:
                await self._hand_over(generation, self.transports[0])
            watch.begin(names)
            yield watch

    @asynccontextmanager
    async def handing_over(self, other: WorkerProbe) -> AsyncIterator[WorkerProbe | None]:
        """Lets the other worker receive this one's prompts inside the block; None if this worker would keep them
        itself.
        """
        if self.target.role != "prefill" or not other.target.can("decode"):
            yield None
            return
        async with other._listening(0, self._name):
            yield other

    async def decode(self, batch: int, prompt_tokens: int, num_steps: int) -> list[SeenStep]:
        """The steps of a batch whose sequences have about `prompt_tokens` each."""
        async with self.decoding(batch, prompt_tokens) as watch, asyncio.timeout(_BATCH_S):
            return list(await watch.steps(num_steps))

    def _generation(self, prompt: Sequence[int], max_tokens: int) -> types_pb2.Generation:
        return types_pb2.Generation(
            request_id=f"{self._name}-{next(self._numbers)}",
            model_fingerprint=self.target.fingerprint,
            prompt_token_ids=prompt,
            sampling=types_pb2.SamplingParams(
                max_tokens=max_tokens, top_p=1.0, repetition_penalty=1.0, ignore_eos=True
            ),
            gateway_id=self._name,
            tenant_salt=self._salt,
        )

    async def _hand_over(self, generation: types_pb2.Generation, transport: str) -> Transferred:
        layout = self.target.layout
        num_tokens = len(generation.prompt_token_ids)
        whole = KVRange(0, layout.num_layers, 0, layout.num_kv_heads, 0, num_tokens)
        opening = decode_pb2.HandoverOpen(generation=generation).SerializeToString()
        commit = decode_pb2.HandoverCommit(first_token_id=_TOKEN_IDS[0]).SerializeToString()
        async with transfer_to(self._links[transport], layout, deadline_s=_TRANSFER_S) as transfer:
            await transfer.open(whole, opening)
            began_s = time.monotonic()
            num_bytes = await _send_zeros(transfer, self.target, num_tokens)
            await transfer.commit(commit)
            return Transferred(num_bytes, time.monotonic() - began_s, transfer.transport)

    @asynccontextmanager
    async def _listening(self, prompt_tokens: int, name: str | None = None) -> AsyncIterator[TokenWatch]:
        """Feeds the worker's tokens for this probe, or for another name, to the watch."""
        watch = TokenWatch(prompt_tokens)
        request = decode_pb2.TokensRequest(gateway_id=name or self._name)
        is_open = asyncio.get_running_loop().create_future()

        async def read() -> None:
            try:
                async with self._peer.stream(self._decode.Tokens, request, deadline_s=_BATCH_S) as messages:
                    async for message in messages:
                        if not is_open.done():
                            is_open.set_result(None)
                        watch.feed(message, time.monotonic())
                raise Unavailable(f"{self.target.worker_id} ended its token stream")
            except HalfmoonError as error:
                watch.fail(error)
                if not is_open.done():
                    is_open.set_exception(error)

        async with running(read()):
            await is_open
            yield watch

    @asynccontextmanager
    async def _cancelled_at_end(self, request_ids: list[str]) -> AsyncIterator[None]:
        try:
            yield
        finally:
            request = decode_pb2.CancelRequest(request_ids=request_ids)
            await asyncio.shield(self._peer.call(self._decode.Cancel, request, deadline_s=_CALL_S))


async def _send_zeros(transfer: TransferSender, target: Target, num_tokens: int) -> int:
    """Sends KV of arbitrary values; returns the number of bytes."""
    layout = target.layout
    num_bytes = 0
    shard = Shard(0, layout.num_layers, 0, layout.num_kv_heads)
    for part in plan_frames(layout, shard, 0, num_tokens):
        size = part.num_bytes(layout)
        await transfer.data(part, bytes(size))
        num_bytes += size
    return num_bytes
