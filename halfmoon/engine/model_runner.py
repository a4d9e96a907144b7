"""Runs a schedule: the only owner of tensors. Knows nothing of queues, clocks or finish rules."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor

from halfmoon.engine.attention.attention_backend import AttentionBackend, StepAttention, TokenSpan
from halfmoon.engine.attention.chosen_kv import choosing
from halfmoon.engine.attention.watched_attention import DeviceWatch, Gate, GatedAttention, WatchedAttention
from halfmoon.engine.chunk import Chunk, chunk_of
from halfmoon.engine.constraint import TokenMasks
from halfmoon.engine.kv_memory.kv_arena import KVArena
from halfmoon.engine.kv_memory.kv_watch import LayerWatch
from halfmoon.engine.models import Model
from halfmoon.engine.models.forward_batch import ForwardBatch
from halfmoon.engine.request import SampledToken
from halfmoon.engine.sampler import TORCH_SAMPLER, SamplerOps, SamplingRow, has_penalties, prompt_logprobs, sample
from halfmoon.engine.scheduling.schedule import ScheduledSequence


class DecodeSteps(Protocol):
    """Steps that were recorded beforehand (`cuda_graphs.py`)."""

    def fits(self, chunks: Sequence[Chunk]) -> bool:
        """Whether `run` can compute them."""

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Logits [num_chunks, vocab_size], valid until the next `run`."""


class ModelRunner:
    """Owns the model and the KV arena. When `run` returns or raises, the device has finished the step.

    So nothing writes to blocks that are given to others after a step, whichever stream these use.
    """

    def __init__(
        self,
        model: Model,
        arena: KVArena,
        attention: AttentionBackend,
        eos_token_ids: frozenset[int],
        recorded: DecodeSteps | None = None,
        masks: TokenMasks | None = None,
        sampler: SamplerOps = TORCH_SAMPLER,
    ) -> None:
        self._model = model
        self._arena = arena
        self._attention = attention
        self._eos_token_ids = eos_token_ids
        self._recorded = recorded
        self._masks = masks
        self._sampler = sampler
        self._device_watch = DeviceWatch() if arena.tensor.is_cuda else None

    @property
    def is_on_cpu(self) -> bool:
        """Whether the device is the CPU, where what another thread writes is seen at once."""
        return self._arena.tensor.device.type == "cpu"

    @torch.inference_mode()
    def run(
        self, scheduled: tuple[ScheduledSequence, ...], watch: LayerWatch | None = None, gate: Gate | None = None
    ) -> list[SampledToken]:
        """Computes the scheduled tokens; returns each item's `num_drawn` sampled tokens, in order.

        `watch` is notified of finished layers, and each layer passes `gate`, on a CPU, where this may be called again
        with other sequences; neither if the step was recorded. Raises LayerLate if KV that was to arrive meanwhile did
        not.
        """
        try:
            return self._run(scheduled, watch, gate)
        finally:
            self.finish()

    def _run(
        self, scheduled: tuple[ScheduledSequence, ...], watch: LayerWatch | None, gate: Gate | None
    ) -> list[SampledToken]:
        chunks = [chunk_of(item) for item in scheduled]
        pools = any(item.sequence.sampling.pooling for item in scheduled)
        if self._recorded is not None and self._recorded.fits(chunks) and not pools:
            return self.sample(scheduled, self._recorded.run(chunks))
        batch = self.batch(chunks)
        if pools:
            batch = replace(batch, on_outputs=partial(_pool, scheduled))
        for each in (gate, *(item.gate for item in scheduled)):
            if each is not None:
                batch = replace(batch, attention=GatedAttention(batch.attention, each))
        return self.sample(scheduled, self.forward(batch, watch=watch))

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, hidden: Tensor | None = None, watch: LayerWatch | None = None) -> Tensor:
        """Calls `Model.forward` over this runner's KV memory. `finish` ends what it began."""
        if watch is not None:
            watch = watch if self._device_watch is None else self._device_watch.behind(watch)
            batch = replace(batch, attention=WatchedAttention(batch.attention, self._arena.tensor.shape[0], watch))
        return self._model.forward(batch, self._arena.tensor, hidden)

    def finish(self) -> None:
        """Waits until the device has finished what was launched, and for all notifications of the last `forward`."""
        if self._device_watch is not None:
            self._device_watch.finish()

    @torch.inference_mode()
    def sample(self, scheduled: tuple[ScheduledSequence, ...], logits: Tensor) -> list[SampledToken]:
        """Draws each item's `num_drawn` tokens. Sequences take note of what their prompts' tokens had.

        logits: [sum of the items' num_logits, vocab_size].
        """
        rows = [row for item in scheduled for row in _sampling_rows(item)]
        if any(item.num_logits != item.num_drawn for item in scheduled):
            logits = logits[_note_prompts(scheduled, logits)]
        return sample(logits, rows, self._eos_token_ids, self._masks, self._sampler) if rows else []

    def batch(self, chunks: Sequence[Chunk], attention: StepAttention | None = None) -> ForwardBatch:
        """The tensors of one forward pass over `chunks`, with `attention`, if given."""
        token_ids: list[int] = []
        positions: list[range] = []
        spans: list[TokenSpan] = []
        logit_rows: list[int] = []
        for chunk in chunks:
            token_ids += chunk.token_ids
            positions.append(range(chunk.start, chunk.end))
            spans += seen_spans(chunk, self._arena.block_tokens)
            logit_rows += range(len(token_ids) - chunk.num_logits, len(token_ids))
        return ForwardBatch(
            token_ids=self._tensor(token_ids),
            positions=self._tensor(list(chain.from_iterable(positions))),
            logit_rows=self._tensor(logit_rows),
            attention=attention or choosing(self._attention.step(spans), chunks, self._arena),
        )

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._arena.tensor.device)


def seen_spans(chunk: Chunk, block_tokens: int) -> Iterator[TokenSpan]:
    """A chunk's rows with the blocks that they see, counted from the first of these.

    Under a policy, tokens of different blocks see different blocks before them: each block's rows are a span of their
    own, over the sinks and the window, as if nothing were between these. So a back end knows of no policy.
    """
    if chunk.policy is None:
        yield TokenSpan(chunk.blocks, chunk.start, chunk.end)
        return
    start = chunk.start
    while start < chunk.end:
        unseen = chunk.policy.unseen(start, block_tokens)
        end = (start // block_tokens + 1) * block_tokens
        while end < chunk.end and not chunk.policy.unseen(end, block_tokens):
            end += block_tokens
        end = min(end, chunk.end)
        blocks = [*chunk.blocks[: unseen.start], *chunk.blocks[unseen.stop : -(-end // block_tokens)]]
        num_unseen = len(unseen) * block_tokens
        yield TokenSpan(blocks, start - num_unseen, end - num_unseen)
        start = end


def _sampling_rows(item: ScheduledSequence) -> list[SamplingRow]:
    """The rows of the next token and of those behind each guess, as if the guesses before it were right."""
    if not item.num_drawn:
        return []
    sequence, sampling = item.sequence, item.sequence.sampling
    num_prompt, forbidden, token_ids = sequence.num_prompt, sequence.forbidden, sequence.token_ids
    ids = sequence.ids() if has_penalties(sampling) else None
    first = SamplingRow(sampling, token_ids, num_prompt, forbidden, ids)
    if item.num_drawn == 1:
        return [first]
    guessed = ([*token_ids, *item.drafts[:number]] for number in range(1, item.num_drawn))
    return [first, *(SamplingRow(sampling, guess, num_prompt, forbidden) for guess in guessed)]


def _note_prompts(scheduled: Sequence[ScheduledSequence], logits: Tensor) -> list[int]:
    """Notes the log-probabilities of prompts that want them; returns the rows from which tokens are drawn."""
    drawn: list[int] = []
    end = 0
    for item in scheduled:
        begin, end = end, end + item.num_logits
        sequence = item.sequence
        if sequence.wants_prompt_logprobs:
            targets = sequence.token_ids[item.start + 1 : item.start + 1 + item.num_tokens]
            num_top = sequence.sampling.num_prompt_logprobs or 0
            sequence.prompt_logprobs[item.start :] = prompt_logprobs(
                logits[begin : begin + len(targets)], targets, num_top
            )
        drawn += range(end - item.num_drawn, end)
    return drawn


def _pool(scheduled: Sequence[ScheduledSequence], outputs: Tensor) -> None:
    """Adds what is wanted of prompts to their sequences. outputs: [sum of the items' num_logits, hidden_size]."""
    end = 0
    for item in scheduled:
        begin, end = end, end + item.num_logits
        sequence, pooling = item.sequence, item.sequence.sampling.pooling
        if pooling is None or sequence.num_output or (pooling == "last" and not item.samples):
            continue
        last = end - len(item.drafts)
        rows = outputs[last - 1 : last] if pooling == "last" else outputs[begin:last] / sequence.num_prompt
        before = sequence.pooled if pooling == "mean" and item.start else [0.0] * outputs.shape[1]
        added = rows.double().sum(dim=0).tolist()
        sequence.pooled = [one + other for one, other in zip(before, added, strict=True)]
