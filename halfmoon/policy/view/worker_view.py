"""One worker as a gateway sees it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from halfmoon.policy.models.chunk_length import CONSTANT_CHUNKS, ChunkRule
from halfmoon.policy.models.latency import PrefillModel, StepModel

UNKNOWN_PREFILL, UNKNOWN_STEP = PrefillModel(), StepModel()

Role = Literal["prefill", "decode", "both"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker: its latest report, plus what this gateway has sent it since."""

    worker_id: str
    role: Role
    address: str  # host:port
    context_tokens: int  # longest prompt and output together
    block_tokens: int
    total_blocks: int
    free_blocks: int
    num_running: int = 0
    num_waiting: int = 0
    num_reserved: int = 0  # requests whose KV is on its way
    num_placed: int = 0  # requests placed since the latest report
    waiting_prefill_tokens: int = 0  # accepted but not computed, plus those sent since the latest report
    draining: bool = False
    listening: bool = True  # its token stream to this gateway is open; always True for a prefill worker
    context_in_use_tokens: int = 0  # of the requests it decodes
    prefill_free_s: float = 0.0  # when it will have computed the prompts in its latest report
    others_prefill_s: float = math.inf  # part of that work certainly from other gateways; inf if unreported
    step_tokens: int = 0  # prompt tokens per step; 0 if unknown
    chunk_tokens: int = 0  # prompt tokens per step that also decodes, unless `chunk_rule` is known; 0 if unknown
    chunk_rule: ChunkRule = CONSTANT_CHUNKS
    layer_passes: int = 0  # parts in which layers of a load arrive while its step computes; 0: it cannot wait for them
    nests_steps: bool = False  # short prompts run in the middle of its prefill steps (`policy/nested_step.py`)
    num_layers: int = 0  # of the model; 0 if unknown
    max_running: float = math.inf  # most sequences in its batch; inf if unknown
    prefill_model: PrefillModel = UNKNOWN_PREFILL
    step_model: StepModel = UNKNOWN_STEP  # seconds between two tokens of each sequence in a batch
    tokens_per_step: float = 1.0  # of each sequence, in the mean: above 1 where guessed tokens are right
    holder: int = -1  # its number in the block index; -1 if its blocks are unknown
    kv_bytes_per_token: float = 0.0  # of KV that it computes and hands over; 0 if unknown
    kv_dtype: str = ""  # of its KV in memory; empty if unknown
    fetch_s_per_token: float = math.inf  # for KV from a holder whose link was not measured; inf if it cannot fetch
    contention: float = 0.0  # slowdown of its prefills per busy worker of its host, as a share of the time alone
    step_contention: float = 0.0  # the same for its decode steps
    store_holder: int = -1  # number of the pool of stores that it restores from; -1 if it has none
    device: str = ""  # that it computes on: cpu, cuda
    unit: str = ""  # of a plan's paired workers, which hand KV over among themselves
    host_name: str = ""  # as it reports it: pods and containers of one host have addresses of their own

    @property
    def host(self) -> str:
        """The host it runs on, by its address if it reports no name. Workers of one host are colocated."""
        return self.host_name or self.address.rpartition(":")[0] or self.address

    @property
    def whole_step_model(self) -> StepModel:
        """Seconds of a decode step: as many times those between two tokens as it gives a sequence tokens."""
        return self.step_model if self.tokens_per_step == 1 else self.step_model.scaled(self.tokens_per_step)

    @property
    def nests_prompts(self) -> bool:
        """Whether short prompts run in the middle of its steps: only such as it hands over do."""
        return self.nests_steps and self.role == "prefill"

    @property
    def num_requests(self) -> int:
        """Requests it decodes, is about to decode or has queued."""
        return self.num_running + self.num_waiting + self.num_reserved + self.num_placed

    @property
    def can_prefill(self) -> bool:
        """Whether it accepts prompts now."""
        return self.role == "prefill" and not self.draining

    @property
    def can_decode(self) -> bool:
        """Whether it accepts KV from prefill workers now."""
        return self.role == "decode" and not self.draining and self.listening

    @property
    def can_do_both(self) -> bool:
        """Whether it can serve whole requests now."""
        return self.role == "both" and not self.draining and self.listening

    @property
    def is_ready(self) -> bool:
        """Whether it accepts work of any kind now."""
        return self.can_prefill or self.can_decode or self.can_do_both

    @property
    def capacity_tokens(self) -> int:
        """The longest sequence that fits while the worker is empty."""
        return min(self.context_tokens, self.total_blocks * self.block_tokens)

    def is_another(self, other: WorkerView) -> bool:
        """Whether `other`, a later view of the same worker, differs in more than load."""
        if (self.role, self.draining, self.listening) != (other.role, other.draining, other.listening):
            return True
        models = self.prefill_model != other.prefill_model or self.step_model != other.step_model
        return models or self.capacity_tokens != other.capacity_tokens
