"""The forward passes of a step: which sequences are staged together, and what each of them recomputes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from halfmoon.engine.chunk import Chunk, chunk_of
from halfmoon.engine.config import OffloadSchedule
from halfmoon.engine.offload.choice import Chooser, Group, RecomputeChoice
from halfmoon.engine.offload.plan import Again, GroupPlan
from halfmoon.engine.offload.tiers import TieredKV
from halfmoon.engine.scheduling.schedule import ScheduledSequence


class PlannedSequence(NamedTuple):
    """A scheduled sequence as far as passes are planned by it. Without `token_ids` everything is loaded."""

    chunk: Chunk
    token_ids: Sequence[int] = ()  # all that are known
    steps_left: int = 0


def planned_sequence(item: ScheduledSequence) -> PlannedSequence:
    """The sequence to plan for a scheduled one."""
    sequence = item.sequence
    return PlannedSequence(chunk_of(item), sequence.token_ids, sequence.sampling.max_tokens - sequence.num_output)


@dataclass(frozen=True, slots=True)
class Pass:
    """One forward pass: its chunks in the order of their rows, and the sequences whose tokens it draws."""

    chunks: tuple[Chunk, ...]
    num_hot: int  # leading chunks whose KV is on the device
    groups: tuple[GroupPlan, ...]
    drawn: tuple[int, ...]  # indices of the sequences, one for each row of logits
    num_rows_again: int  # rows of prompts, and of tokens that run again


class PassPlanner:
    """Owns the passes of one step while they are planned. Blocks that will hold inputs are halved on the way."""

    def __init__(
        self, memory: TieredKV, chooser: Chooser, staging_blocks: int, num_layers: int, schedule: OffloadSchedule
    ) -> None:
        self._memory = memory
        self._chooser = chooser
        self._staging_blocks = staging_blocks
        self._num_layers = num_layers
        self._schedule = schedule
        self._replaced: set[int] = set()  # blocks replaced in this step

    def passes(self, items: Sequence[PlannedSequence]) -> list[Pass]:
        """The passes; empty if no sequence has KV on the host."""
        chunks = [item.chunk for item in items]
        cold = [number for number, chunk in enumerate(chunks) if self._memory.is_cold(self._used(chunk))]
        hot = [number for number in range(len(chunks)) if number not in cold]
        groups = self._groups(chunks, cold)
        num_layers = self._num_layers * len(groups)
        if self._schedule == "throughput" and groups:
            return [self._pass(items, hot, groups, num_layers)]
        return [self._pass(items, hot if not n else [], [group], num_layers) for n, group in enumerate(groups)]

    def _groups(self, chunks: Sequence[Chunk], cold: Sequence[int]) -> list[list[int]]:
        """Groups in order, each with as many sequences as the staging buffer holds; any single one fits."""
        groups: list[list[int]] = []
        free = 0
        for number in cold:
            num_blocks = len(self._used(chunks[number]))
            assert num_blocks <= self._staging_blocks, "the buffer holds the longest sequence"
            if num_blocks > free:
                groups.append([])
                free = self._staging_blocks
            groups[-1].append(number)
            free -= num_blocks
        return groups

    def _pass(
        self,
        items: Sequence[PlannedSequence],
        hot: Sequence[int],
        groups: Sequence[Sequence[int]],
        num_layers: int,
    ) -> Pass:
        rows: list[Chunk] = [items[number].chunk for number in hot]
        drawn = [number for number in hot for _ in range(items[number].chunk.num_logits)]
        plans = []
        for group in groups:
            plans.append(self._plan([items[number] for number in group], rows, num_layers))
            drawn += [number for number in group for _ in range(items[number].chunk.num_logits)]
        num_rows = sum(len(chunk.token_ids) for chunk in rows)
        return Pass(tuple(rows), len(hot), tuple(plans), tuple(drawn), num_rows - len(drawn))

    def _plan(self, items: Sequence[PlannedSequence], rows: list[Chunk], num_layers: int) -> GroupPlan:
        """Adds the group's chunks to `rows`, each after the rows of its sequence that run again."""
        self._begin_inputs(items, num_layers)
        plain = [self._plain_blocks(item.chunk) for item in items]
        group = self._group(items, sum(map(len, plain)))
        choice = self._chooser.choose(group, num_layers)
        wanted = choice.num_to_inputs, choice.num_to_kv
        plan = GroupPlan()
        first_row = sum(len(chunk.token_ids) for chunk in rows)
        for item, blocks in zip(items, plain, strict=True):
            chunk = item.chunk
            to_inputs = blocks[: wanted[0]]
            to_kv = self._input_blocks(chunk)[: wanted[1]]
            wanted = wanted[0] - len(to_inputs), wanted[1] - len(to_kv)
            again = self._again(chunk, choice, group.num_tokens, to_inputs, first_row)
            if again is not None:
                token_ids = item.token_ids[again.start : again.end]
                rows.append(Chunk(token_ids, again.start, chunk.blocks, num_logits=0))
                first_row += again.end - again.start
            self._replaced.update(chunk.blocks[n] for n in (*to_inputs, *to_kv))
            plan.add(self._memory, chunk, first_row, again, [chunk.blocks[n] for n in to_kv])
            rows.append(chunk)
            first_row += len(chunk.token_ids)
        return plan

    def _begin_inputs(self, items: Sequence[PlannedSequence], num_layers: int) -> None:
        """Halves first blocks of growing sequences to keep inputs in them, for as many tokens as pays."""
        share = self._chooser.inputs_share(sum(len(item.token_ids) for item in items), num_layers)
        size = self._memory.block_tokens
        for item in items:
            chunk = item.chunk
            last = min(int(share * len(item.token_ids)), chunk.end + size - 1) // size
            for block in chunk.blocks[-(-chunk.start // size) : last]:
                if self._is_on_host(block) and not self._memory.holds_inputs(block):
                    self._memory.begin_inputs(block)

    def _group(self, items: Sequence[PlannedSequence], num_plain_blocks: int) -> Group:
        num_inputs = sum(
            run.num_tokens
            for item in items
            for run in self._memory.runs(item.chunk.blocks, 0, item.chunk.start)
            if run.content == "inputs"
        )
        steps_left = max(item.steps_left for item in items)
        return Group(sum(item.chunk.start for item in items), num_inputs, num_plain_blocks, steps_left)

    def _plain_blocks(self, chunk: Chunk) -> list[int]:
        """The indices of the first consecutive blocks of a decoding sequence that hold K and V on the host."""
        plain: list[int] = []
        if len(chunk.token_ids) > 1:
            return plain
        for n in range(chunk.start // self._memory.block_tokens):
            block = chunk.blocks[n]
            is_plain = self._is_on_host(block) and not self._memory.holds_inputs(block) and block not in self._replaced
            if is_plain:
                plain.append(n)
            elif plain:
                break
        return plain

    def _input_blocks(self, chunk: Chunk) -> list[int]:
        """The indices of a sequence's blocks that hold inputs of all their tokens, last first."""
        full = range(chunk.start // self._memory.block_tokens)
        blocks = [(n, chunk.blocks[n]) for n in reversed(full)]
        return [n for n, block in blocks if self._memory.holds_inputs(block) and block not in self._replaced]

    def _again(
        self, chunk: Chunk, choice: RecomputeChoice, group_tokens: int, to_inputs: Sequence[int], first_row: int
    ) -> Again | None:
        size = self._memory.block_tokens
        if to_inputs:
            return Again(to_inputs[0] * size, (to_inputs[-1] + 1) * size, first_row, keeps_inputs=True)
        num_again = choice.num_again * chunk.start // max(group_tokens, 1)
        return Again(0, num_again, first_row, keeps_inputs=False) if num_again else None

    def _is_on_host(self, block: int) -> bool:
        return block >= self._memory.device.num_blocks

    def _used(self, chunk: Chunk) -> Sequence[int]:
        return chunk.blocks[: -(-chunk.end // self._memory.block_tokens)]
