"""What one step does with a group of sequences whose KV lies on the host: slots and rows, once for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from halfmoon.engine.attention_backend import Span
from halfmoon.engine.chunk import Chunk
from halfmoon.engine.kv_arena import slot_runs
from halfmoon.engine.offload.tiers import TieredKV


class Run(NamedTuple):
    """Consecutive slots to copy: from one of the memories to the staging buffer, or to rows of the inputs' buffer."""

    is_on_device: bool
    source: int
    target: int
    num: int


class Row(NamedTuple):
    """A row of the forward pass whose K and V are kept, and where: a slot of one of the memories."""

    is_on_device: bool
    row: int
    slot: int


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Sequences that are staged together."""

    spans: tuple[Span, ...]  # over blocks of the staging buffer
    rows: tuple[int, ...]  # of the forward pass, those of the spans one after the other
    loads: tuple[Run, ...]  # K and V
    inputs: tuple[Run, ...]  # of the tokens whose K and V are computed from them
    input_slots: tuple[int, ...]  # staging slots of those tokens
    stores: tuple[Row, ...]  # what is new

    @property
    def num_inputs(self) -> int:
        """Tokens whose K and V are computed from the layers' inputs."""
        return len(self.input_slots)


class Planner:
    """Owns one group's plan while it grows. Rows are given in the order of the chunks."""

    def __init__(self, memory: TieredKV, block_tokens: int) -> None:
        self._memory = memory
        self._block_tokens = block_tokens
        self._num_blocks = 0
        self._spans: list[Span] = []
        self._rows: list[int] = []
        self._loads: list[Run] = []
        self._inputs: list[Run] = []
        self._input_slots: list[int] = []
        self._stores: list[Row] = []

    def add(self, chunk: Chunk, first_row: int, num_inputs: int = 0, again: tuple[int, int] | None = None) -> None:
        """chunk: runs at `first_row`. Of the tokens before it `num_inputs` come as inputs, as far as they are known.

        again: (tokens from the first, their first row) that run once more in the same pass instead of being loaded.
        """
        num_blocks = -(-chunk.end // self._block_tokens)
        staged = range(self._num_blocks, self._num_blocks + num_blocks)
        self._num_blocks += num_blocks
        base = staged.start * self._block_tokens
        first = 0
        if again is not None:
            first, row = again
            self._add_span(Span(staged, 0, first), row)
        self._add_span(Span(staged, chunk.start, chunk.end), first_row)
        self._add_fetches(chunk.blocks, first, chunk.start, base, num_inputs)
        position = 0
        for piece in self._memory.pieces(chunk.blocks, chunk.start, chunk.end - chunk.start):
            for run in slot_runs(piece.blocks, self._block_tokens, piece.start, piece.start + piece.num_tokens):
                self._stores += (
                    Row(piece.is_on_device, first_row + position + n, slot) for n, slot in enumerate(range(*run))
                )
                position += run[1] - run[0]

    def plan(self) -> GroupPlan:
        """All of it."""
        lists = (self._spans, self._rows, self._loads, self._inputs, self._input_slots, self._stores)
        return GroupPlan(*map(tuple, lists))  # type: ignore[arg-type]

    def _add_span(self, span: Span, first_row: int) -> None:
        self._spans.append(span)
        self._rows += range(first_row, first_row + span.end - span.start)

    def _add_fetches(self, blocks: Sequence[int], start: int, end: int, base: int, num_inputs: int) -> None:
        position = start
        for piece in self._memory.pieces(blocks, start, end - start):
            for run_start, run_end in slot_runs(
                piece.blocks, self._block_tokens, piece.start, piece.start + piece.num_tokens
            ):
                num = run_end - run_start
                num_again = 0
                if num_inputs and not piece.is_on_device:
                    num_again = self._memory.has_inputs(run_start, min(num, num_inputs))
                    num_inputs = num_inputs - num_again if num_again == num else 0
                if num_again:
                    self._inputs.append(Run(False, run_start, len(self._input_slots), num_again))
                    self._input_slots += range(base + position, base + position + num_again)
                if num_again < num:
                    where = Run(piece.is_on_device, run_start + num_again, base + position + num_again, num - num_again)
                    self._loads.append(where)
                position += num
