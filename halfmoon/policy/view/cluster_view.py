"""What a decision may look at: the cluster as one gateway sees it at one moment."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.models.latency import NUM_COEFFICIENTS, Floats, PrefillModel, StepModel
from halfmoon.policy.view.busy_times import BusyTimes
from halfmoon.policy.view.capabilities import Bools, Capabilities, RoleMasks, roster
from halfmoon.policy.view.columns import FIGURES, LOAD

UNKNOWN_PREFILL, UNKNOWN_STEP = PrefillModel(), StepModel()

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
    context_in_use_tokens: int = 0  # of the requests that it decodes
    prefill_free_s: float = 0.0  # when it will have computed the prompts that it said it has
    others_prefill_s: float = math.inf  # of them those that are surely not of this gateway; infinite: not told
    step_tokens: int = 0  # prompt tokens that it computes together; 0: not known
    chunk_tokens: int = 0  # the same where it also decodes; 0: not known
    prefill_model: PrefillModel = UNKNOWN_PREFILL
    step_model: StepModel = UNKNOWN_STEP
    holder: int = -1  # its number in the block index; -1: its blocks are not known
    fetch_s_per_token: float = math.inf  # for KV from another holder; infinite where it cannot fetch
    contention: float = 0.0  # what each busy neighbour adds to its prefills, as a share of their time alone
    step_contention: float = 0.0  # the same for its decode steps
    store_holder: int = -1  # the number of the store that it restores from, and from nowhere else; -1: it has none

    @property
    def host(self) -> str:
        """Where it runs: workers of one host are neighbours."""
        return self.address.rpartition(":")[0] or self.address

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

    def is_another(self, other: WorkerView) -> bool:
        """Whether the same worker's next view differs in what it can do, not only in its load."""
        if (self.role, self.draining, self.listening) != (other.role, other.draining, other.listening):
            return True
        models = self.prefill_model != other.prefill_model or self.step_model != other.step_model
        return models or self.capacity_tokens != other.capacity_tokens


class ClusterView:
    """Owns one row for each member: its view, and the figures of all of them as columns. Rows never move.

    A decision among hundreds of workers reads columns; a change of one worker writes one row.
    """

    def __init__(self, workers: Iterable[WorkerView] = ()) -> None:
        self._views: dict[str, WorkerView] = {}  # in the order of joining
        self._rows: dict[str, int] = {}
        self._ids: list[str] = []  # of each row; the last one there where nobody is now
        self._free_rows: list[int] = []
        self._hosts: dict[str, int] = {}  # numbers
        self._roster: Capabilities | None = None  # None: to be called again
        self.busy = BusyTimes()  # of the members
        self._resize(16)
        for worker in workers:
            self.put(worker)

    @property
    def workers(self) -> tuple[WorkerView, ...]:
        """Every member, in the order of joining."""
        return tuple(self._views.values())

    @property
    def num_rows(self) -> int:
        """Rows with or without a member; the columns are longer."""
        return len(self._ids)

    @property
    def roster(self) -> Capabilities:
        """Who can do what, as of the last `put` or `remove`."""
        if self._roster is None:
            rows = slice(self.num_rows)
            present = RoleMasks(self.can_prefill[rows], self.can_decode[rows], self.can_do_both[rows])
            models = self.prefill_coefficients[rows], self.step_coefficients[rows]
            self._roster = roster(present, self.column("capacity_tokens"), *models)
        return self._roster

    @property
    def missing(self) -> tuple[str, ...]:
        """What has to join before any request can be placed; empty when one can."""
        if self.can_do_both.any():
            return ()
        halves = {"prefill worker": self.can_prefill.any(), "decode worker": self.can_decode.any()}
        return tuple(name for name, present in halves.items() if not present)

    @property
    def least_capacity_tokens(self) -> int:
        """The longest sequence that every member holds; there must be one."""
        rows = list(self._rows.values())
        return int(self.column("capacity_tokens")[rows].min())

    @property
    def num_decoding(self) -> int:
        """Members that decode."""
        return int((self.can_decode[: self.num_rows] | self.can_do_both[: self.num_rows]).sum())

    @property
    def decode_tokens(self) -> float:
        """Tokens that the KV memory of all decoding members holds."""
        return self._decoding_sum("total_tokens")

    @property
    def decoding_tokens(self) -> float:
        """Tokens of all requests that decode, whichever gateway sent them, as reported."""
        return self._decoding_sum("context_in_use_tokens")

    def worker(self, row: int) -> WorkerView:
        """The member in a row."""
        return self._views[self._ids[row]]

    def row(self, worker_id: str) -> int | None:
        """The row of a member; None when it is none."""
        return self._rows.get(worker_id)

    def rows_of(self, worker_ids: Collection[str]) -> list[int]:
        """The rows of those that are members."""
        return [self._rows[one] for one in worker_ids if one in self._rows]

    def beside(self, worker_id: str) -> Bools:
        """The rows, with an empty last one, of the other members on the host of a member."""
        row = self._rows[worker_id]
        found: Bools = self.hosts[: self.num_rows + 1] == self.hosts[row]
        found[[row, -1]] = False
        return found

    def put(self, worker: WorkerView) -> None:
        """Adds a member, or says what is new of one."""
        row = self._rows.get(worker.worker_id)
        if row is None:
            row = self._new_row(worker.worker_id)
            self.busy.join(worker.worker_id, worker.host)
        before = self._views.get(worker.worker_id)
        if before is None or before.is_another(worker):
            self._roster = None
        self._views[worker.worker_id] = worker
        self.can_prefill[row] = worker.can_prefill
        self.can_decode[row] = worker.can_decode
        self.can_do_both[row] = worker.can_do_both
        self.figures[row] = (
            worker.capacity_tokens,
            worker.block_tokens,
            worker.free_blocks,
            worker.num_requests,
            worker.waiting_prefill_tokens,
            worker.context_in_use_tokens,
            worker.prefill_free_s,
            worker.others_prefill_s,
            worker.fetch_s_per_token,
            worker.total_blocks * worker.block_tokens,
        )
        self.prefill_coefficients[row] = worker.prefill_model
        self.step_coefficients[row] = worker.step_model
        self.hosts[row] = self._hosts.setdefault(worker.host, len(self._hosts))
        self.holders[row] = worker.holder
        self.store_holders[row] = worker.store_holder

    def note_load(
        self,
        row: int,
        *,
        free_blocks: float,
        num_requests: float,
        waiting_prefill_tokens: float,
        context_in_use_tokens: float,
        prefill_free_s: float,
        others_prefill_s: float = math.inf,
    ) -> None:
        """A member's load in the columns, which decisions read, without a new `WorkerView`: its view stays older.

        For who has many members report often; `put` says the same, and more.
        """
        self.figures[row, LOAD] = (
            free_blocks,
            num_requests,
            waiting_prefill_tokens,
            context_in_use_tokens,
            prefill_free_s,
            others_prefill_s,
        )

    def remove(self, worker_id: str) -> None:
        """Takes a member out, if it is one."""
        row = self._rows.pop(worker_id, None)
        if row is not None:
            self._roster = None
            del self._views[worker_id]
            self.busy.forget(worker_id)
            self.can_prefill[row] = self.can_decode[row] = self.can_do_both[row] = False
            self.hosts[row] = -1
            self._free_rows.append(row)

    def column(self, name: str) -> Floats:
        """One of `FIGURES` for every row."""
        found: Floats = self.figures[: self.num_rows, FIGURES[name]]
        return found

    def _decoding_sum(self, name: str) -> float:
        decodes = self.can_decode[: self.num_rows] | self.can_do_both[: self.num_rows]
        return float(self.column(name)[decodes].sum())

    def _new_row(self, worker_id: str) -> int:
        if self._free_rows:
            row = self._free_rows.pop()
            self._ids[row] = worker_id
        else:
            row = len(self._ids)
            self._ids.append(worker_id)
            if row == len(self.holders):
                self._resize(2 * row)
        self._rows[worker_id] = row
        return row

    def _resize(self, num_rows: int) -> None:
        """New columns, filled again: it happens with every doubling of the cluster."""
        self._roster = None
        self.can_prefill: Bools = np.zeros(num_rows, dtype=np.bool_)
        self.can_decode: Bools = np.zeros(num_rows, dtype=np.bool_)
        self.can_do_both: Bools = np.zeros(num_rows, dtype=np.bool_)
        self.figures: Floats = np.zeros((num_rows, len(FIGURES)), order="F")
        self.prefill_coefficients: Floats = np.zeros((num_rows, NUM_COEFFICIENTS), order="F")
        self.step_coefficients: Floats = np.zeros((num_rows, NUM_COEFFICIENTS), order="F")
        self.hosts: NDArray[np.int64] = np.full(num_rows + 1, -1)  # the last one is nobody's
        self.holders: NDArray[np.int64] = np.full(num_rows, -1)
        self.store_holders: NDArray[np.int64] = np.full(num_rows, -1)
        for worker in tuple(self._views.values()):
            self.put(worker)
