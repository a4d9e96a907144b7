"""Runs schedules over two memories: like `ModelRunner`, and layer by layer where KV is on the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from halfmoon.engine.attention.attention_backend import AttentionBackend, TokenSpan
from halfmoon.engine.config import OffloadConfig
from halfmoon.engine.kv_memory.kv_watch import LayerWatch
from halfmoon.engine.model_runner import ModelRunner
from halfmoon.engine.offload.attention import ColdRows, OffloadedAttention, Replacement, Stores
from halfmoon.engine.offload.choice import Chooser
from halfmoon.engine.offload.link import Link
from halfmoon.engine.offload.passes import Pass, PassPlanner, PlannedSequence, planned_sequence
from halfmoon.engine.offload.plan import GroupPlan, Replaced
from halfmoon.engine.offload.staging import Pipeline, Staging, Task
from halfmoon.engine.offload.tiers import TieredKV
from halfmoon.engine.request import SampledToken
from halfmoon.engine.scheduling.schedule import ScheduledSequence
from halfmoon.engine.step_result import StagedWork


class OffloadRunner:
    """Owns the order of passes and groups. A step without sequences on the host is the plain runner's.

    "latency" gives each group of sequences that fits the staging buffer a pass of its own, row by row: the weights are
    read once per group. "throughput" is one pass in which every layer takes the groups in turn, column by column: the
    weights are read once. (KVPR, section 3; FlexGen's schedules.)
    """

    def __init__(
        self,
        runner: ModelRunner,
        attention: AttentionBackend,
        memory: TieredKV,
        staging: Staging,
        link: Link,
        chooser: Chooser,
        config: OffloadConfig,
    ) -> None:
        self._runner = runner
        self._attention = attention
        self._memory = memory
        self._staging = staging
        self._link = link
        self.chooser = chooser
        self._config = config
        self._num_layers = memory.host.shape[0]
        self._device = memory.device.tensor.device
        self._work = StagedWork()  # of the step before
        self._groups: list[ColdRows] = []  # of this step

    def take_work(self) -> StagedWork:
        """Work since the last call."""
        work, self._work = self._work, StagedWork()
        return work

    def close(self) -> None:
        """Ends the link."""
        self._link.close()

    @torch.inference_mode()
    def run(self, scheduled: tuple[ScheduledSequence, ...], watch: LayerWatch | None = None) -> list[SampledToken]:
        """See `ModelRunner.run`."""
        started_s = time.perf_counter()
        passes = self.passes([planned_sequence(item) for item in scheduled])
        if not passes:
            return self._runner.run(scheduled, watch)
        try:
            sampled = self._runner.sample(scheduled, self.logits(passes, watch))
        except Exception:
            self._runner.finish()  # others get the blocks of a failed step
            raise
        only_decodes = all(item.num_tokens == 1 for item in scheduled)
        self.finish_step((lambda: time.perf_counter() - started_s) if only_decodes else None)
        return sampled

    def passes(self, items: Sequence[PlannedSequence]) -> list[Pass]:
        """The passes of a step; empty if no sequence has KV on the host."""
        planner = PassPlanner(
            self._memory, self.chooser, self._staging.num_blocks, self._num_layers, self._config.schedule
        )
        return planner.passes(items)

    @torch.inference_mode()
    def logits(self, passes: Sequence[Pass], watch: LayerWatch | None = None) -> Tensor:
        """The model's logits in the order of the planned sequences: of a rank, its part of them.

        The device may still be computing them: `finish_step` ends the step.
        """
        groups = [[self._cold_rows(plan) for plan in forward_pass.groups] for forward_pass in passes]
        tasks = iter([task for forward_pass in passes for task in self._tasks(forward_pass)])
        pipeline = Pipeline(self._staging, self._link, self._memory, tasks, self._config.overlap)
        try:
            watch = watch if len(passes) == 1 else None
            pairs = zip(passes, groups, strict=True)
            logits = [self._forward(forward_pass, cold, pipeline, watch) for forward_pass, cold in pairs]
        finally:
            pipeline.close()
        order = [number for forward_pass in passes for number in forward_pass.drawn]
        ranked = sorted(range(len(order)), key=order.__getitem__)
        self._groups = [cold for pass_groups in groups for cold in pass_groups]
        return torch.cat(logits)[ranked]

    def finish_step(self, took_s: Callable[[], float] | None = None) -> None:
        """Ends a step of passes, once its logits were used. took_s: its duration so far; None: nothing is learned."""
        self._runner.finish()
        for group in self._groups:
            self._replace(group)
        self._groups = []
        self._learn_step(None if took_s is None else took_s())

    def _tasks(self, forward_pass: Pass) -> Iterator[Task]:
        for layer in range(self._num_layers):
            for group in forward_pass.groups:
                yield layer, group

    def _forward(
        self, forward_pass: Pass, groups: Sequence[ColdRows], pipeline: Pipeline, watch: LayerWatch | None
    ) -> Tensor:
        hot = None
        if forward_pass.num_hot:
            spans = [
                TokenSpan(chunk.blocks, chunk.start, chunk.end) for chunk in forward_pass.chunks[: forward_pass.num_hot]
            ]
            rows = range(sum(span.end - span.start for span in spans))
            hot = self._numbers(rows), self._attention.step(spans)
        attention = OffloadedAttention(hot, tuple(groups), pipeline, self._memory)
        batch = self._runner.batch(forward_pass.chunks, attention)
        if self._memory.keys_values is not None:
            batch = replace(batch, on_inputs=attention.keep_inputs)
        logits = self._runner.forward(batch, watch=watch)
        if self._device.type == "cpu":
            self._work = replace(self._work, wait_s=self._work.wait_s + attention.waited_s)
        self._learn_pass(forward_pass, attention)
        return logits

    def _learn_pass(self, forward_pass: Pass, attention: OffloadedAttention) -> None:
        """Learns from the mean of the layers after the first, per group."""
        num_layers = (self._num_layers - 1) * len(forward_pass.groups)
        if not num_layers:
            return
        times, num_groups = attention.times, len(forward_pass.groups)
        num_inputs = sum(len(plan.input_slots) for plan in forward_pass.groups) / num_groups
        rows_again = forward_pass.num_rows_again / num_groups
        self.chooser.learn_pass(times.base_s / num_layers, times.inputs_s / num_layers, num_inputs, rows_again)

    def _learn_step(self, took_s: float | None) -> None:
        link = self._link.take_work()
        self.chooser.learn_link(link, self._token_bytes())
        staged = self.chooser.learn_step(took_s)
        self._work = replace(self._work, num_groups=staged, link_bytes=link.num_bytes, link_s=link.busy_s)

    def _replace(self, group: ColdRows) -> None:
        """Replaces blocks' content once the step no longer reads them."""
        for replaced in group.to_inputs:
            self._memory.replace_by_inputs(replaced.block, replaced.content)
        for replaced in group.to_kv:
            self._memory.replace_by_kv(replaced.block, replaced.content)

    def _cold_rows(self, plan: GroupPlan) -> ColdRows:
        _, num_heads, _, head_dim = self._memory.host.shape
        size = self._memory.block_tokens
        return ColdRows(
            rows=self._numbers(plan.rows),
            attention=self._attention.step(plan.spans),
            input_slots=self._numbers(plan.input_slots),
            stores=tuple(
                Stores(
                    new.content,
                    self._numbers(new.rows),
                    *(self._slots(slots, new.content == "device") for slots in (new.firsts, new.seconds)),
                )
                for new in plan.stores
            ),
            to_inputs=tuple(self._replacement(replaced, size, num_heads * head_dim) for replaced in plan.to_inputs),
            to_kv=tuple(self._replacement(replaced, 2, num_heads, size, head_dim) for replaced in plan.to_kv),
        )

    def _replacement(self, replaced: Replaced, *shape: int) -> Replacement:
        is_pinned = self._device.type == "cuda"
        content = torch.empty(self._num_layers, *shape, dtype=self._memory.host.dtype, pin_memory=is_pinned)
        return Replacement(replaced.block, replaced.first, content)

    def _slots(self, slots: Sequence[int], is_on_device: bool) -> Tensor:
        return self._numbers(slots, self._device if is_on_device else self._memory.host.device)

    def _numbers(self, values: Sequence[int], device: torch.device | None = None) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=device or self._device)

    def _token_bytes(self) -> int:
        return 2 * self._memory.host[0, :, 0].numel() * self._memory.host.element_size()
