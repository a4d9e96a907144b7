"""The requests that are with this worker's engine: their sequences, their blocks, and who hears of their KV."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from halfmoon.engine.kv_memory.kv_watch import OnKV
from halfmoon.engine.scheduling.sequence import Sequence
from halfmoon.errors import NotFound
from halfmoon.kv.frame_plan import Written
from halfmoon.vllm_engine.messages import Saved
from halfmoon.vllm_engine.requests.kept_answers import KeptAnswers
from halfmoon.vllm_engine.requests.prefix_loading import PrefixLoading
from halfmoon.vllm_engine.requests.shared_blocks import SharedBlocks


@dataclass(slots=True)
class PresentRequest:
    """Owned by the engine until the request has ended here."""

    sequence: Sequence
    use: int  # of its blocks of shared memory
    on_kv: OnKV | None = None
    task: asyncio.Task[None] | None = None
    is_with_vllm: bool = False
    has_begun: bool = False
    is_kept: bool = False  # vLLM will report its end by `Finished`
    loading: PrefixLoading | None = None
    saved: dict[int, Saved] = field(default_factory=dict)  # the newest report of each rank

    @property
    def is_unsaved(self) -> bool:
        """Whether somebody wants its KV, and some is not here."""
        return self.on_kv is not None and self.sequence.written.num_tokens < len(self.sequence.token_ids)

    def take_saved(self, report: Saved, num_ranks: int) -> Written | None:
        """Takes a rank's report; returns what all ranks have saved, None as long as one has not reported."""
        self.saved[report.rank] = report
        if len(self.saved) < num_ranks:
            return None
        reports = self.saved.values()
        written = Written(
            min(report.num_tokens for report in reports),
            min(report.end for report in reports),
            min(report.num_layers for report in reports),
        )
        self.sequence.num_computed = max(self.sequence.num_computed, written.num_tokens)
        return written

    def tell_written(self, written: Written) -> None:
        """Tells who reads its KV how much is here, loaded blocks included."""
        if self.loading is not None:
            written = written._replace(loaded=tuple(self.loading.runs(written.num_tokens)))
        self.sequence.written = written
        if self.on_kv is not None:
            self.on_kv(written)

    def tell_loaded(self) -> None:
        """Reports loaded blocks, once there is room for them."""
        if self.loading is not None and self.sequence.blocks:
            self.loading.report()
            self.tell_written(Written())

    def remove(self) -> None:
        """Ends copies of its KV; waits for one that runs."""
        with self.sequence.kv_lock:
            self.sequence.state = "removed"


class PresentRequests:
    """Owns the requests by id, and the numbers of their uses of shared blocks. Event-loop thread only."""

    def __init__(self, blocks: SharedBlocks, answers: KeptAnswers) -> None:
        self._blocks = blocks
        self._answers = answers
        self._by_id: dict[str, PresentRequest] = {}
        self._num_uses = 0

    def __iter__(self) -> Iterator[PresentRequest]:
        return iter(tuple(self._by_id.values()))

    def new_use(self) -> int:
        """A number that no use of blocks has had."""
        self._num_uses += 1
        return self._num_uses

    def put(self, entry: PresentRequest) -> None:
        """Adds a request."""
        self._by_id[entry.sequence.request_id] = entry

    def get(self, request_id: str) -> PresentRequest | None:
        """The request, if it is here."""
        return self._by_id.get(request_id)

    def find(self, request_id: str) -> PresentRequest:
        """The request. Raises NotFound."""
        entry = self._by_id.get(request_id)
        if entry is None:
            raise NotFound(f"request {request_id} is not here")
        return entry

    def pop(self, request_id: str) -> PresentRequest | None:
        """Drops a request whose blocks the caller gives back."""
        return self._by_id.pop(request_id, None)

    def forget(self, entry: PresentRequest) -> None:
        """Drops a request that has ended by itself."""
        entry.sequence.state = "removed"
        self._by_id.pop(entry.sequence.request_id, None)
        entry.on_kv = None  # its output says it
        if entry.is_with_vllm:
            self.leave(entry)
        else:
            self._blocks.give_back(entry.use)

    def leave(self, entry: PresentRequest) -> None:
        """Notes that a request has left which vLLM still has: the connector reports the end of its use."""
        if entry.is_kept:
            self._answers.leave(entry.use, entry.sequence)
