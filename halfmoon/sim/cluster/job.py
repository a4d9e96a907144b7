"""One request's progress through the simulated cluster."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from halfmoon.policy.retries import Retries

if TYPE_CHECKING:
    from halfmoon.sim.cluster.worker import SimWorker
    from halfmoon.sim.workloads.workload import Floats

JobState = Literal["placed", "waiting", "prefilling", "held", "arrived", "decoding", "ended"]
Outcome = Literal["completed", "refused", "failed"]


class Job:
    """What one request has got and what it holds. Workers change it while it is with them; nobody else does.

    Tokens are counted, never named. `target` are the tokens to compute before the next one is drawn.
    """

    __slots__ = (
        "at",
        "attempt",
        "begun_s",
        "cached_tokens",
        "cached_units",
        "computed",
        "decode",
        "end_s",
        "first_s",
        "front_end",
        "generated",
        "index",
        "is_loading",
        "is_prefilled",
        "join_length",
        "join_step",
        "known_units",
        "later_s",
        "load_end",
        "longest_gap_s",
        "num_before",
        "num_failovers",
        "num_refusals",
        "outcome",
        "output",
        "pages",
        "prefill",
        "prompt",
        "reserved",
        "retries",
        "start_s",
        "state",
        "tail_gap_s",
        "target",
        "units",
    )

    def __init__(self, index: int, start_s: float, prompt: int, output: int, units: list[int]) -> None:
        self.index = index  # also its rank: who came first goes first
        self.start_s = start_s
        self.prompt = prompt
        self.output = output
        self.units = units  # ids of the full blocks of the prompt that the prefix cache can know
        self.attempt = 0  # events of an earlier one are stale
        self.retries: Retries | None = None  # None: every attempt goes well so far
        self.num_refusals = 0
        self.num_failovers = 0
        self.generated = 0
        self.begun_s = -1.0  # when computing began
        self.first_s = -1.0
        self.later_s: list[Floats] = []  # when the tokens behind the first came
        self.end_s = -1.0
        self.longest_gap_s = self.tail_gap_s = math.nan  # known at its end
        self.outcome: Outcome | None = None
        self.cached_tokens = 0  # neither computed nor fetched, at first
        self.at: SimWorker | None = None  # whose queues or batch it is in
        self.prefill: SimWorker | None = None
        self.decode: SimWorker | None = None
        self.place()

    def place(self) -> None:
        """It begins anew, with the tokens that it has."""
        self.attempt += 1
        self.state: JobState = "placed"
        self.num_before = self.generated  # tokens that earlier attempts gave
        self.target = self.prompt + self.generated
        self.computed = 0
        self.cached_units: list[int] = []  # of the prefix cache of the worker where it is, that it refers to
        self.known_units = 0  # leading ones that this worker's prefix cache has seen
        self.pages = 0  # beside those, on the worker that computes it
        self.reserved = 0  # pages, on the decode worker
        self.front_end = -1  # tokens from here to `load_end` are being fetched
        self.load_end = -1
        self.is_loading = False
        self.is_prefilled = False
        self.join_step = 0
        self.join_length = 0

    @property
    def uncomputed(self) -> int:
        """Tokens to compute before the next one is drawn."""
        return self.target - self.computed

    @property
    def num_left(self) -> int:
        """Tokens that it has not got."""
        return self.output - self.generated
