"""Runs schedules over two memories: as `ModelRunner` does, and layer by layer where KV lies on the host."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from halfmoon.engine.attention_backend import AttentionBackend, Span
from halfmoon.engine.chunk import Chunk, chunk_of
from halfmoon.engine.config import OffloadSchedule
from halfmoon.engine.kv_watch import LayerWatch
from halfmoon.engine.model_runner import ModelRunner
from halfmoon.engine.offload.attention import ColdRows, KeysValues, OffloadedAttention, Stores
from halfmoon.engine.offload.link import Link
from halfmoon.engine.offload.plan import GroupPlan, Planner, Row
from halfmoon.engine.offload.staging import Pipeline, Staging, Task
from halfmoon.engine.offload.tiers import TieredKV
from halfmoon.engine.sampler import SampledToken
from halfmoon.engine.scheduler import ScheduledSequence
from halfmoon.policy.offload import Kind, OffloadCosts, Overlap, Split, choose_split

logger = logging.getLogger(__name__)

_NEWEST_SHARE = 0.2  # of the last pass in what is known of the device's speed
_OVERLAPS: dict[OffloadSchedule, Overlap] = {"latency": "within", "throughput": "across"}


@dataclass(frozen=True, slots=True)
class _Pass:
    """One forward pass: its chunks in the order of their rows, and which scheduled sequences' tokens it draws."""

    chunks: tuple[Chunk, ...]
    hot: tuple[int, ...]  # of `chunks`
    groups: tuple[GroupPlan, ...]
    drawn: tuple[int, ...]  # of the schedule


class OffloadRunner:
    """Owns the order of passes and groups. A step without sequences on the host is the plain runner's.

    "latency" gives each group of sequences that fits the staging buffer a pass of its own, row by row: the weights are
    read once a group. "throughput" is one pass in which every layer takes the groups in turn, column by column: the
    weights are read once. (KVPR, section 3; FlexGen's schedules.)
    """

    def __init__(
        self,
        runner: ModelRunner,
        attention: AttentionBackend,
        memory: TieredKV,
        staging: Staging,
        link: Link,
        keys_values: KeysValues | None,
        schedule: OffloadSchedule,
        block_tokens: int,
    ) -> None:
        self._runner = runner
        self._attention = attention
        self._memory = memory
        self._staging = staging
        self._link = link
        self._keys_values = keys_values
        self._schedule = schedule
        self._block_tokens = block_tokens
        self._num_layers = memory.host.tensor.shape[0]
        self._device = memory.device.tensor.device
        self._costs: OffloadCosts | None = None  # None: everything is loaded
        self._last_kind: Kind | None = None
        self._num_staged: Counter[Kind] = Counter()

    def use(self, costs: OffloadCosts) -> None:
        """From now on what pays is computed again."""
        self._costs = costs

    def take_num_staged(self) -> dict[str, int]:
        """Groups that were staged since the last call, by how."""
        taken = {str(kind): num_groups for kind, num_groups in self._num_staged.items()}
        self._num_staged.clear()
        return taken

    def close(self) -> None:
        """Ends the link."""
        self._link.close()

    @torch.inference_mode()
    def run(self, scheduled: tuple[ScheduledSequence, ...], watch: LayerWatch | None = None) -> list[SampledToken]:
        """As `ModelRunner.run`."""
        chunks = [chunk_of(item) for item in scheduled]
        cold = [number for number, chunk in enumerate(chunks) if self._memory.is_cold(self._used(chunk))]
        if not cold:
            return self._runner.run(scheduled, watch)
        passes = self._passes(scheduled, chunks, cold)
        tasks = iter([task for one in passes for task in self._tasks(one)])
        pipeline = Pipeline(self._staging, self._link, self._memory, tasks)
        try:
            logits = [self._forward(one, pipeline, watch if len(passes) == 1 else None) for one in passes]
        finally:
            pipeline.close()
        order = [number for one in passes for number in one.drawn]
        ranked = sorted(range(len(order)), key=order.__getitem__)
        sampled = self._runner.sample(scheduled, torch.cat(logits)[ranked])
        self._runner.finish_watch()
        if self._device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        for number in cold:
            self._note_inputs(chunks[number])
        return sampled

    def _passes(
        self, scheduled: Sequence[ScheduledSequence], chunks: Sequence[Chunk], cold: Sequence[int]
    ) -> list[_Pass]:
        hot = [number for number in range(len(chunks)) if number not in cold]
        groups = self._groups(chunks, cold)
        if self._schedule == "throughput":
            return [self._pass(scheduled, chunks, hot, groups)]
        return [self._pass(scheduled, chunks, hot if not n else [], [group]) for n, group in enumerate(groups)]

    def _groups(self, chunks: Sequence[Chunk], cold: Sequence[int]) -> list[list[int]]:
        """In their order, as many together as the staging buffer holds; any one of them fits."""
        groups: list[list[int]] = []
        free = 0
        for number in cold:
            num_blocks = len(self._used(chunks[number]))
            assert num_blocks <= self._staging.num_blocks, "the buffer holds the longest sequence"
            if num_blocks > free:
                groups.append([])
                free = self._staging.num_blocks
            groups[-1].append(number)
            free -= num_blocks
        return groups

    def _pass(
        self,
        scheduled: Sequence[ScheduledSequence],
        chunks: Sequence[Chunk],
        hot: Sequence[int],
        groups: Sequence[Sequence[int]],
    ) -> _Pass:
        rows: list[Chunk] = [chunks[number] for number in hot]
        drawn = [number for number in hot if chunks[number].samples]
        num_rows = sum(len(chunk.token_ids) for chunk in rows)
        plans = []
        for group in groups:
            planner = Planner(self._memory, self._block_tokens)
            split = self._split([chunks[number] for number in group])
            total = sum(chunks[number].start for number in group)
            for number in group:
                chunk = chunks[number]
                again = split.num_tokens * chunk.start // max(total, 1)
                again_rows = None
                if split.kind == "tokens" and again:
                    token_ids = scheduled[number].sequence.token_ids[:again]
                    rows.append(Chunk(token_ids, 0, chunk.blocks, samples=False))
                    again_rows = again, num_rows
                    num_rows += again
                planner.add(chunk, num_rows, again if split.kind == "inputs" else 0, again_rows)
                rows.append(chunk)
                num_rows += len(chunk.token_ids)
                drawn += [number] if chunk.samples else []
            plans.append(planner.plan())
        return _Pass(tuple(rows), tuple(range(len(hot))), tuple(plans), tuple(drawn))

    def _split(self, chunks: Sequence[Chunk]) -> Split:
        num_tokens = sum(chunk.start for chunk in chunks)
        split = Split("load", 0, 0.0)
        if self._costs is not None:
            split = choose_split(self._costs, num_tokens, _OVERLAPS[self._schedule])
        self._num_staged[split.kind] += 1
        if split.kind != self._last_kind:
            self._last_kind = split.kind
            logger.info(
                "offload.chosen",
                extra={
                    "kind": split.kind,
                    "num_tokens": num_tokens,
                    "num_computed_again": split.num_tokens,
                    "layer_s": split.layer_s,
                },
            )
        return split

    def _tasks(self, one: _Pass) -> Iterator[Task]:
        for layer in range(self._num_layers):
            for group in one.groups:
                yield layer, group

    def _forward(self, one: _Pass, pipeline: Pipeline, watch: LayerWatch | None) -> Tensor:
        num_hot = sum(len(one.chunks[number].token_ids) for number in one.hot)
        hot = None
        if num_hot:
            spans = [Span(chunk.blocks, chunk.start, chunk.end) for chunk in (one.chunks[n] for n in one.hot)]
            hot = self._numbers(range(num_hot)), self._attention.step(spans)
        groups = tuple(self._cold_rows(plan) for plan in one.groups)
        attention = OffloadedAttention(hot, groups, pipeline, self._memory, self._keys_values)
        batch = self._runner.batch(one.chunks, attention)
        if self._keys_values is not None:
            batch = replace(batch, on_inputs=attention.keep_inputs)
        started_s = time.perf_counter()
        logits = self._runner.forward(batch, watch=watch)
        if self._costs is not None and self._device.type == "cpu":
            num_again = sum(plan.num_inputs for plan in one.groups)
            base_s = time.perf_counter() - started_s - attention.waited_s - attention.again_s
            self._learn(base_s / self._num_layers, attention.again_s / self._num_layers, num_again)
        return logits

    def _learn(self, base_s: float, again_s: float, num_again: int) -> None:
        """What a layer of the last pass took: the start's figures are of one token on a device without other work."""
        costs = self._costs
        assert costs is not None
        inputs = costs.inputs
        if inputs is not None and num_again:
            inputs = replace(inputs, compute_s=_mixed(inputs.compute_s, again_s / num_again))
        self._costs = replace(costs, base_s=_mixed(costs.base_s, base_s), inputs=inputs)

    def _cold_rows(self, plan: GroupPlan) -> ColdRows:
        return ColdRows(
            rows=self._numbers(plan.rows),
            attention=self._attention.step(plan.spans),
            input_slots=self._numbers(plan.input_slots),
            to_device=self._stores([row for row in plan.stores if row.is_on_device], self._device),
            to_host=self._stores([row for row in plan.stores if not row.is_on_device], torch.device("cpu")),
        )

    def _stores(self, rows: Sequence[Row], memory: torch.device) -> Stores | None:
        if not rows:
            return None
        return Stores(self._numbers([row.row for row in rows]), self._numbers([row.slot for row in rows], memory))

    def _numbers(self, values: Sequence[int], device: torch.device | None = None) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=device or self._device)

    def _note_inputs(self, chunk: Chunk) -> None:
        for piece in self._memory.pieces(chunk.blocks, chunk.start, chunk.end - chunk.start):
            if not piece.is_on_device:
                start = piece.start
                slots = [
                    piece.blocks[token // self._block_tokens] * self._block_tokens + token % self._block_tokens
                    for token in range(start, start + piece.num_tokens)
                ]
                self._memory.note_inputs(slots, known=self._keys_values is not None)

    def _used(self, chunk: Chunk) -> Sequence[int]:
        return chunk.blocks[: -(-chunk.end // self._block_tokens)]


def _mixed(before_s: float, last_s: float) -> float:
    return (1 - _NEWEST_SHARE) * before_s + _NEWEST_SHARE * last_s
