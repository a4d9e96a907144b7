"""One request's progress through the simulated cluster."""

from __future__ import annotations

import math
from typing import Literal

from halfmoon.kv.kv_policy import KVPolicy
from halfmoon.policy.admission.qos_classes import QosClass
from halfmoon.policy.preemption import Pauses
from halfmoon.policy.retries import Retries
from halfmoon.policy.view.key_table import Keys
from halfmoon.sim.worker.kept_kv import policy_of
from halfmoon.sim.workloads.workload import Floats

JobState = Literal["placed", "waiting", "prefilling", "held", "arrived", "decoding", "paused", "ended"]
_INDEX_BITS = 40

Outcome = Literal["completed", "refused", "failed"]


class Job:
    """The state and the holdings of one request. Only the worker that has it changes it.

    Tokens are counted, not named. `target` is the number of tokens to compute before the next one is sampled.
    """

    __slots__ = (
        "at",
        "attempt",
        "begun_s",
        "cached_blocks",
        "cached_tokens",
        "computed",
        "decode",
        "end_s",
        "first_s",
        "front_end",
        "generated",
        "held_blocks",
        "index",
        "is_help",
        "is_loading",
        "is_prefilled",
        "join_length",
        "join_step",
        "keys",
        "later_s",
        "load_end",
        "longest_gap_s",
        "num_before",
        "num_blocks",
        "num_failovers",
        "num_known_blocks",
        "num_refusals",
        "outcome",
        "output",
        "pauses",
        "policy",
        "prefill",
        "prefix_blocks",
        "priority",
        "prompt",
        "qos_class",
        "rank",
        "reserved_blocks",
        "retries",
        "rounds",
        "start_s",
        "state",
        "tail_gap_s",
        "target",
        "tbt_target_s",
    )

    def __init__(self, index: int, start_s: float, prompt: int, output: int, prefix_blocks: list[int]) -> None:
        self.index = index
        self.rank_by(0)
        self.qos_class = 0  # position among the cluster's classes
        self.tbt_target_s = math.inf  # of its class
        self.pauses = Pauses()
        self.policy: KVPolicy | None = None  # what is kept of its KV; None: all
        self.start_s = start_s
        self.prompt = prompt
        self.output = output
        self.prefix_blocks = prefix_blocks  # ids of the whole blocks of prompt and answer that prefix caches can know
        self.keys: Keys | None = None  # of these, for the gateway's index; None: not asked for yet
        self.attempt = 0  # events of earlier attempts are stale
        self.retries: Retries | None = None  # None: no attempt has failed yet
        self.num_refusals = 0
        self.num_failovers = 0
        self.generated = 0
        self.begun_s = -1.0  # when its computation began
        self.first_s = -1.0
        self.later_s: list[Floats] = []  # times of the tokens after the first
        self.end_s = -1.0
        self.longest_gap_s = self.tail_gap_s = math.nan  # set when it ends
        self.outcome: Outcome | None = None
        self.cached_tokens = 0  # tokens found in the first worker's own cache
        self.is_help = False  # a part of another worker's prompt: nothing is sampled
        self.at: int | None = None  # number of the worker whose queue or batch it is in
        self.prefill: int | None = None  # number of the worker that computes its prompt
        self.decode: int | None = None  # number of the worker that decodes it
        self.place()

    def place(self) -> None:
        """Starts a new attempt, keeping the tokens that it has."""
        self.attempt += 1
        self.state: JobState = "placed"
        self.num_before = self.generated  # tokens from earlier attempts
        self.target = self.prompt + self.generated
        self.computed = 0
        self.cached_blocks: list[int] = []  # prefix blocks of its current worker's cache that it references
        self.num_known_blocks = 0  # leading prefix blocks that this cache knows
        self.num_blocks = 0  # its own blocks on the worker that computes it, besides the cached ones
        self.reserved_blocks = 0  # reserved on the decode worker
        self.held_blocks: list[int] = []  # prefix blocks of the decode worker's cache that its reservation references
        self.front_end = -1  # tokens from here to `load_end` are being fetched
        self.load_end = -1
        self.is_loading = False
        self.rounds: tuple[range, ...] = ()  # what this worker computes of a shared prompt; (): all of it
        self.is_prefilled = False
        self.join_step = 0
        self.join_length = 0

    def rank_by(self, priority: int) -> None:
        """Ranks it by priority, smaller first, then by arrival."""
        self.priority = priority
        self.rank = (priority << _INDEX_BITS) + self.index

    def classify(self, position: int, qos: QosClass) -> None:
        """Puts it into a class of the cluster."""
        self.qos_class = position
        self.rank_by(qos.priority)
        self.pauses = Pauses(qos.priority, qos.max_pause_s)

    def keep_by(self, kv_policy: str | None) -> None:
        """Keeps KV as its class says."""
        self.policy = policy_of(kv_policy)

    def help_with(self, end: int) -> Job:
        """The part up to token `end` of its shared prompt, for another worker."""
        part = Job(self.index, self.start_s, end, 1, self.prefix_blocks)
        part.is_help = True
        part.pauses = self.pauses
        part.rank_by(self.priority)
        return part

    @property
    def uncomputed(self) -> int:
        """Tokens to compute before the next one is sampled."""
        return self.target - self.computed

    @property
    def num_left(self) -> int:
        """Output tokens still missing."""
        return self.output - self.generated
