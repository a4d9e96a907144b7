"""Workers to be measured that are not there: targets, and probes on a clock of their own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from halfmoon.kv.kv_layout import KVLayout
from halfmoon.policy.view.worker_view import Role
from halfmoon.profiling.probe import Prefilled, Transferred
from halfmoon.profiling.target import Target
from halfmoon.profiling.token_watch import SeenStep

LAYOUT = KVLayout(2, 2, 16, "float16", 16)
TARGET = Target(
    "prefill-0", "prefill", "host:1", "model", "print", "cpu", LAYOUT, kv_tokens=4096, context_tokens=512,
    max_batch_tokens=256, chunk_tokens=64, max_running=8, tensor_parallel=1, pipeline_parallel=1, num_requests=0,
)  # fmt: skip


def target(role: Role = "prefill", number: int = 0, **changes: Any) -> Target:
    return replace(TARGET, role=role, worker_id=f"{role}-{number}", **changes)


class FakeProbe:
    """A worker that takes a fixed time alone, and `slowdown` times as long while another one is busy."""

    def __init__(self, role: Role, busy: set[str], slowdown: float = 1.0, number: int = 0) -> None:
        self.target = target(role, number)
        self.transports = ("shm", "grpc")
        self._busy = busy  # ids of workers that never pause now; shared by all probes
        self._slowdown = slowdown
        self.prompts: list[int] = []
        self.receivers: list[str | None] = []

    def _seconds(self, alone_s: float) -> float:
        return alone_s * (self._slowdown if self._busy - {self.target.worker_id} else 1.0)

    def prompt(self, num_tokens: int) -> list[int]:
        return [7] * num_tokens

    async def prefill(self, prompt: Sequence[int], receiver: FakeProbe | None = None) -> Prefilled:
        self.prompts.append(len(prompt))
        self.receivers.append(receiver.target.worker_id if receiver else None)
        return Prefilled(len(prompt), 0, self._seconds(0.001 * len(prompt)), 0.001)

    async def decode(self, batch: int, prompt_tokens: int, num_steps: int) -> list[SeenStep]:
        return [SeenStep(batch * prompt_tokens, self._seconds(0.01))] * num_steps

    async def transfer(self, num_tokens: int, transport: str) -> Transferred:
        return Transferred(100 * num_tokens, 0.01 * num_tokens, "grpc")

    @asynccontextmanager
    async def handing_over(self, other: FakeProbe) -> AsyncIterator[FakeProbe | None]:
        yield other if self.target.role == "prefill" and other.target.can("decode") else None

    @asynccontextmanager
    async def decoding(self, batch: int, prompt_tokens: int) -> AsyncIterator[Any]:
        self._busy.add(self.target.worker_id)
        try:
            yield _Watch()
        finally:
            self._busy.discard(self.target.worker_id)


class _Watch:
    async def steps(self, num: int) -> list[SeenStep]:
        return [SeenStep(1, 0.01)] * num
