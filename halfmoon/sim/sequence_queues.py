"""The sequences of a modelled worker by what becomes of them: each is in the queue of its state."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from halfmoon.sim.modelled_sequence import ModelledSequence, State


class SequenceQueues:
    """Owns the sequences by request, their states, and the order in which those of a state have their turn.

    Knows nothing of blocks and of time.
    """

    def __init__(self) -> None:
        self._here: dict[str, ModelledSequence] = {}
        self.waiting: list[ModelledSequence] = []  # by rank
        self.prefilling: list[ModelledSequence] = []  # by rank
        self.decoding: dict[ModelledSequence, None] = {}  # in the order of joining
        self.num_reserved = 0

    def __iter__(self) -> Iterator[ModelledSequence]:
        return iter(tuple(self._here.values()))

    @property
    def num_running(self) -> int:
        """With blocks and something to compute."""
        return len(self.prefilling) + len(self.decoding)

    @property
    def num_held(self) -> int:
        """Prefilled, and their KV still wanted."""
        return len(self._here) - self.num_running - len(self.waiting) - self.num_reserved

    def find(self, request_id: str) -> ModelledSequence | None:
        """The request's sequence, if it is here."""
        return self._here.get(request_id)

    def enter(self, sequence: ModelledSequence, state: State) -> None:
        """A new one. There must be none of its request."""
        assert sequence.request.request_id not in self._here, "the request is here already"
        self._here[sequence.request.request_id] = sequence
        self.move(sequence, state)

    def move(self, sequence: ModelledSequence, state: State) -> None:
        """From the queue of its state to that of another one; removed, it is not here any more."""
        self._take_out(sequence)
        sequence.state = state
        match state:
            case "waiting":
                insort(self.waiting, sequence)
            case "prefilling":
                insort(self.prefilling, sequence)
            case "decoding":
                self.decoding[sequence] = None
            case "reserved":
                self.num_reserved += 1
            case "removed":
                del self._here[sequence.request.request_id]

    def last_running(self) -> ModelledSequence:
        """The last in rank of those with blocks and something to compute; there must be one."""
        return max((*self.decoding, *self.prefilling))

    def _take_out(self, sequence: ModelledSequence) -> None:
        match sequence.state:
            case "waiting":
                self.waiting.remove(sequence)
            case "prefilling":
                self.prefilling.remove(sequence)
            case "decoding":
                del self.decoding[sequence]
            case "reserved":
                self.num_reserved -= 1
