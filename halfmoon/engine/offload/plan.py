"""What one step does with a group of sequences whose KV is on the host: slots and rows, once for all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from halfmoon.engine.attention.attention_backend import TokenSpan
from halfmoon.engine.chunk import Chunk
from halfmoon.engine.offload.tiers import Run, TieredKV


class Load(NamedTuple):
    """Consecutive slots to copy: K and V to the staging buffer, or inputs to the buffer of inputs."""

    run: Run
    target: int


class Again(NamedTuple):
    """Tokens `start`..`end` of a sequence that run once more in the same pass, from row `first_row` on."""

    start: int
    end: int
    first_row: int
    keeps_inputs: bool  # whole blocks on the host whose inputs replace K and V


class Replaced(NamedTuple):
    """A block on the host whose content is replaced, and where that is in a pass: its first row, or computed input."""

    block: int
    first: int


class NewSlots(NamedTuple):
    """Rows of a pass whose K and V, or inputs, are kept in one memory, and in which slots."""

    content: Literal["device", "kv", "inputs"]
    rows: tuple[int, ...]
    firsts: tuple[int, ...]  # slots, as in `Run`
    seconds: tuple[int, ...]


@dataclass(slots=True)
class GroupPlan:
    """Owns the plan of sequences that are staged together while it grows. Rows come in the order of the chunks."""

    spans: list[TokenSpan] = field(default_factory=list)  # over blocks of the staging buffer
    rows: list[int] = field(default_factory=list)  # rows of the forward pass, span by span
    loads: list[Load] = field(default_factory=list)  # K and V
    inputs: list[Load] = field(default_factory=list)  # for the tokens whose K and V are computed from them
    input_slots: list[int] = field(default_factory=list)  # staging slots of those tokens
    stores: list[NewSlots] = field(default_factory=list)  # new K and V or inputs
    to_inputs: list[Replaced] = field(default_factory=list)
    to_kv: list[Replaced] = field(default_factory=list)
    num_blocks: int = 0  # staged so far

    def add(
        self, memory: TieredKV, chunk: Chunk, first_row: int, again: Again | None = None, to_kv: Sequence[int] = ()
    ) -> None:
        """Adds a chunk at `first_row`. Tokens run `again` are not loaded; in blocks `to_kv` K and V replace inputs."""
        size = memory.block_tokens
        num_blocks = -(-chunk.end // size)
        staged = range(self.num_blocks, self.num_blocks + num_blocks)
        self.num_blocks += num_blocks
        base = staged.start * size
        pieces = [(0, chunk.start)]
        if again is not None:
            self._add_span(TokenSpan(staged, again.start, again.end), again.first_row)
            pieces = [(0, again.start), (again.end, chunk.start)]
            if again.keeps_inputs:
                replaced = range(again.start // size, again.end // size)
                self.to_inputs += [
                    Replaced(chunk.blocks[n], again.first_row + n * size - again.start) for n in replaced
                ]
        self._add_span(TokenSpan(staged, chunk.start, chunk.end), first_row)
        for start, end in pieces:
            for run in memory.runs(chunk.blocks, start, end - start):
                self._add_load(run, base + start + run.start)
        for block in to_kv:
            slot = base + chunk.blocks.index(block) * size
            self.to_kv.append(Replaced(block, self.input_slots.index(slot)))
        for run in memory.runs(chunk.blocks, chunk.start, chunk.end - chunk.start):
            self.stores.append(_new_slots(run, first_row))

    def _add_span(self, span: TokenSpan, first_row: int) -> None:
        self.spans.append(span)
        self.rows += range(first_row, first_row + span.end - span.start)

    def _add_load(self, run: Run, staged: int) -> None:
        if run.content == "inputs":
            self.inputs.append(Load(run, len(self.input_slots)))
            self.input_slots += range(staged, staged + run.num_tokens)
        else:
            self.loads.append(Load(run, staged))


def _new_slots(run: Run, first_row: int) -> NewSlots:
    rows = range(first_row + run.start, first_row + run.start + run.num_tokens)
    firsts, seconds = (range(slot, slot + run.num_tokens) for slot in (run.first, run.second))
    return NewSlots(run.content, tuple(rows), tuple(firsts), tuple(seconds))
