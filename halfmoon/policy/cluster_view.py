"""What a decision may look at: the cluster as one gateway sees it at one moment. Values only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Role = Literal["prefill", "decode", "both"]


@dataclass(frozen=True, slots=True)
class LinkView:
    """How fast KV goes from one worker to another, by the transfers that there were."""

    address: str  # the receiver's
    bandwidth_bytes_per_s: float
    latency_s: float


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker: what it said of itself last, plus what this gateway sent it since."""

    worker_id: str
    role: Role
    address: str  # host:port
    context_tokens: int  # longest prompt + output that it can hold
    block_tokens: int
    total_blocks: int
    free_blocks: int
    num_running: int = 0
    num_waiting: int = 0
    num_reserved: int = 0  # KV on its way there
    num_placed: int = 0  # requests placed there since its last report
    waiting_prefill_tokens: int = 0  # accepted and not computed, and sent since the last report
    draining: bool = False
    listening: bool = True  # its token stream to this gateway is open; says nothing for a prefill worker
    links: tuple[LinkView, ...] = ()  # to the workers that it has sent KV to

    @property
    def num_requests(self) -> int:
        """Requests it decodes, is about to decode or has queued."""
        return self.num_running + self.num_waiting + self.num_reserved + self.num_placed

    @property
    def can_prefill(self) -> bool:
        """Whether it takes prompts now."""
        return self.role == "prefill" and not self.draining

    @property
    def can_decode(self) -> bool:
        """Whether it takes KV over now."""
        return self.role == "decode" and not self.draining and self.listening

    @property
    def can_do_both(self) -> bool:
        """Whether it serves a request alone now."""
        return self.role == "both" and not self.draining and self.listening

    @property
    def is_ready(self) -> bool:
        """Whether it takes requests of any kind now."""
        return self.can_prefill or self.can_decode or self.can_do_both

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that fits on it when it is empty."""
        return min(self.context_tokens, self.total_blocks * self.block_tokens)

    def holds(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` fits on it when it is empty."""
        return num_tokens <= self.capacity_tokens

    def transfer_s(self, address: str, num_bytes: int) -> float | None:
        """How long KV of `num_bytes` takes from here to `address` alone on the link; None before the first transfer."""
        for link in self.links:
            if link.address == address:
                return link.latency_s + num_bytes / link.bandwidth_bytes_per_s
        return None

    def has_room_now(self, num_tokens: int) -> bool:
        """Whether its free blocks hold `num_tokens` right now."""
        return num_tokens <= self.free_blocks * self.block_tokens


@dataclass(frozen=True, slots=True)
class ClusterView:
    """Every member, in the order of joining."""

    workers: tuple[WorkerView, ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """What has to join before any request can be placed; empty when one can."""
        if any(worker.can_do_both for worker in self.workers):
            return ()
        halves = {
            "prefill worker": any(worker.can_prefill for worker in self.workers),
            "decode worker": any(worker.can_decode for worker in self.workers),
        }
        return tuple(name for name, present in halves.items() if not present)
