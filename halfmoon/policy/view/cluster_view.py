"""The cluster as one gateway sees it at one moment: all that a decision may look at."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from halfmoon.policy.models.latency import NUM_COEFFICIENTS, Floats
from halfmoon.policy.view.busy_times import BusyTimes
from halfmoon.policy.view.capabilities import Bools, Capabilities, RoleMasks, capabilities_of
from halfmoon.policy.view.fetch_costs import FetchLinks
from halfmoon.policy.view.link_speeds import LinkSpeeds
from halfmoon.policy.view.worker_view import WorkerView

COLUMNS = {
    name: index
    for index, name in enumerate(
        (
            "capacity_tokens",
            "block_tokens",
            "free_blocks",
            "num_requests",
            "waiting_prefill_tokens",
            "context_in_use_tokens",
            "prefill_free_s",
            "others_prefill_s",
            "fetch_s_per_token",
            "total_tokens",
            "chunk_tokens",
            "step_tokens",
            "layer_passes",
            "max_running",
            "tokens_per_step",
        )
    )
}
"""Columns of `ClusterView.column`: fields of `WorkerView`, and the tokens of all its blocks."""

_LOAD = slice(COLUMNS["free_blocks"], COLUMNS["others_prefill_s"] + 1)  # the columns that load reports update


class ClusterView:
    """Owns one row per member: its view, and its numbers as entries of columns. Rows never move.

    A decision among hundreds of workers reads columns; an update of one worker writes one row.
    """

    def __init__(self, workers: Iterable[WorkerView] = ()) -> None:
        self._views: dict[str, WorkerView] = {}  # in the order of joining
        self._rows: dict[str, int] = {}
        self._ids: list[str] = []  # by row; a free row keeps its last member
        self._free_rows: list[int] = []
        self._hosts: dict[str, int] = {}  # host -> number
        self._capabilities: Capabilities | None = None  # None: to be computed again
        self.busy = BusyTimes()
        self.links = LinkSpeeds()
        self.fetch_links = FetchLinks()
        self._resize(16)
        for worker in workers:
            self.put(worker)

    @property
    def workers(self) -> tuple[WorkerView, ...]:
        """All members, in the order of joining."""
        return tuple(self._views.values())

    @property
    def num_rows(self) -> int:
        """Rows in use or free; the arrays are longer."""
        return len(self._ids)

    @property
    def capabilities(self) -> Capabilities:
        """What the members can do, as of the last `put` or `remove`."""
        if self._capabilities is None:
            rows = slice(self.num_rows)
            present = RoleMasks(self.can_prefill[rows], self.can_decode[rows], self.can_do_both[rows])
            models = self.prefill_coefficients[rows], self.step_coefficients[rows]
            columns = self.column("capacity_tokens"), self.column("chunk_tokens")
            self._capabilities = capabilities_of(present, *columns, *models)
        return self._capabilities

    @property
    def missing(self) -> tuple[str, ...]:
        """What has to join before any request can be placed; empty if nothing is missing."""
        if self.can_do_both.any():
            return ()
        phases = {"prefill worker": self.can_prefill.any(), "decode worker": self.can_decode.any()}
        return tuple(name for name, present in phases.items() if not present)

    @property
    def num_decoding(self) -> int:
        """Number of members that decode."""
        return int((self.can_decode[: self.num_rows] | self.can_do_both[: self.num_rows]).sum())

    @property
    def decode_tokens(self) -> float:
        """KV memory of all members that decode, in tokens."""
        return self._decoding_sum("total_tokens")

    @property
    def decoding_tokens(self) -> float:
        """Reported tokens of all requests in decode, whichever gateway sent them."""
        return self._decoding_sum("context_in_use_tokens")

    def worker(self, row: int) -> WorkerView:
        """The member in a row."""
        return self._views[self._ids[row]]

    def row(self, worker_id: str) -> int | None:
        """The row of a member; None for a worker that is not a member."""
        return self._rows.get(worker_id)

    def rows_of(self, worker_ids: Collection[str]) -> list[int]:
        """The rows of these workers, without those that are not members."""
        return [self._rows[worker_id] for worker_id in worker_ids if worker_id in self._rows]

    def on_device(self, device: str) -> Bools:
        """Mask [num_rows] of the members whose device begins so, in any case."""
        rows, begins = np.zeros(self.num_rows, dtype=np.bool_), device.lower()
        rows[[self._rows[name] for name, one in self._views.items() if one.device.lower().startswith(begins)]] = True
        return rows

    def in_unit_of(self, row: int) -> Bools | None:
        """Mask [num_rows] of the members in the paired unit of a member, itself included; None if it is in none."""
        unit, rows = self.worker(row).unit, np.zeros(self.num_rows, dtype=np.bool_)
        if not unit:
            return None
        rows[[self._rows[name] for name, one in self._views.items() if one.unit == unit]] = True
        return rows

    def colocated_with(self, worker_id: str) -> Bools:
        """Mask [num_rows + 1] of the other members on the host of a member; its last entry is False."""
        row = self._rows[worker_id]
        others: Bools = self.hosts[: self.num_rows + 1] == self.hosts[row]
        others[[row, -1]] = False
        return others

    def put(self, worker: WorkerView) -> None:
        """Adds or updates a member."""
        row = self._rows.get(worker.worker_id)
        if row is None:
            row = self._new_row(worker.worker_id)
            self.busy.join(worker.worker_id, worker.host)
        before = self._views.get(worker.worker_id)
        if before is None or before.address != worker.address:
            self.links.join(row, worker.address)
        if before is None or before.is_another(worker):
            self._capabilities = None
        self._views[worker.worker_id] = worker
        self.can_prefill[row] = worker.can_prefill
        self.can_decode[row] = worker.can_decode
        self.can_do_both[row] = worker.can_do_both
        self._columns[row] = (
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
            worker.chunk_tokens,
            worker.step_tokens,
            worker.layer_passes,
            worker.max_running,
            worker.tokens_per_step,
        )
        self.prefill_coefficients[row] = worker.prefill_model
        self.step_coefficients[row] = worker.step_model
        self.hosts[row] = self._hosts.setdefault(worker.host, len(self._hosts))
        self.holders[row] = worker.holder
        if worker.holder >= 0:
            self.fetch_links.note_memory(worker.holder, worker.total_blocks)
        if worker.store_holder >= 0:
            self.fetch_links.note_store(worker.store_holder)

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
        """Updates the load of a member in the columns, which decisions read. Its `WorkerView` stays as it is.

        Cheaper than `put` where many members report often.
        """
        self._columns[row, _LOAD] = (
            free_blocks,
            num_requests,
            waiting_prefill_tokens,
            context_in_use_tokens,
            prefill_free_s,
            others_prefill_s,
        )

    def remove(self, worker_id: str) -> None:
        """Removes a member; does nothing for a worker that is not one."""
        row = self._rows.pop(worker_id, None)
        if row is not None:
            self._capabilities = None
            self.fetch_links.report(row, ())
            self.links.leave(row, self._views.pop(worker_id).address)
            self.busy.forget(worker_id)
            self.can_prefill[row] = self.can_decode[row] = self.can_do_both[row] = False
            self.hosts[row] = -1
            self._free_rows.append(row)

    def column(self, name: str) -> Floats:
        """One of `COLUMNS` [num_rows]."""
        column: Floats = self._columns[: self.num_rows, COLUMNS[name]]
        return column

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
        """Allocates the arrays anew and fills them: once per doubling of the cluster."""
        self._capabilities = None
        self.can_prefill: Bools = np.zeros(num_rows, dtype=np.bool_)
        self.can_decode: Bools = np.zeros(num_rows, dtype=np.bool_)
        self.can_do_both: Bools = np.zeros(num_rows, dtype=np.bool_)
        self._columns: Floats = np.zeros((num_rows, len(COLUMNS)), order="F")
        self.prefill_coefficients: Floats = np.zeros((num_rows, NUM_COEFFICIENTS), order="F")
        self.step_coefficients: Floats = np.zeros((num_rows, NUM_COEFFICIENTS), order="F")
        self.hosts: NDArray[np.int64] = np.full(num_rows + 1, -1)  # the last entry belongs to no row
        self.holders: NDArray[np.int64] = np.full(num_rows, -1)
        for worker in tuple(self._views.values()):
            self.put(worker)
