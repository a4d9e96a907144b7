"""Decode steps as CUDA graphs: one for each power-of-two batch size, over buffers that never move.

A graph is recorded once from `forward` and replayed with new content in its buffers. Rows past the batch are padding:
they store nothing (slot -1) and attend to nothing (context 0). Knows nothing of requests; `Capture` knows CUDA.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halfmoon.engine.attention.triton_attention import TritonBackend
from halfmoon.engine.chunk import Chunk
from halfmoon.engine.models.forward_batch import ForwardBatch

logger = logging.getLogger(__name__)

Replay = Callable[[], Tensor]
Capture = Callable[[Callable[[], Tensor]], Replay]

_MIN_ROWS = 4  # fewer int32 would leave the next field unaligned to 16 bytes, and kernels are compiled for alignment


class _Fields(NamedTuple):
    """Views into one flat int32 buffer, so that a step is one copy to the device."""

    token_ids: Tensor  # [max_rows] int64
    positions: Tensor  # [max_rows] int64
    slot_mapping: Tensor  # [max_rows] int64
    context_lens: Tensor  # [max_rows] int32
    block_table: Tensor  # [max_rows, max_blocks] int32, last: only the rows in use are copied


def _fields(flat: Tensor, max_rows: int, max_blocks: int) -> _Fields:
    wide = flat[: 6 * max_rows].view(torch.int64).view(3, max_rows)
    table = flat[7 * max_rows :].view(max_rows, max_blocks)
    return _Fields(wide[0], wide[1], wide[2], flat[6 * max_rows : 7 * max_rows], table)


class DecodeGraphs:
    """Owns the static buffers and the captured steps for up to `max_running` sequences."""

    def __init__(
        self,
        forward: Callable[[ForwardBatch], Tensor],
        attention: TritonBackend,
        max_running: int,
        capture: Capture,
    ) -> None:
        """Captures every size, largest first: smaller graphs then reuse its memory in the pool."""
        started = time.perf_counter()
        self._attention = attention
        largest = 1 << (max_running - 1).bit_length()
        self._max_rows = max(largest, _MIN_ROWS)
        size = self._max_rows * (7 + attention.max_blocks)
        self._on_device = torch.zeros(size, dtype=torch.int32, device=attention.device)
        self._on_host = torch.zeros(size, dtype=torch.int32, pin_memory=self._on_device.is_cuda)
        fields = _fields(self._on_device, self._max_rows, attention.max_blocks)
        fields.slot_mapping.fill_(-1)  # the captured run must not store anything
        self._host = tuple(view.numpy() for view in _fields(self._on_host, self._max_rows, attention.max_blocks))
        self._tables: list[Sequence[int]] = [()] * self._max_rows  # the blocks in each row of the host's table
        self._replays: dict[int, Replay] = {}
        self._batches: list[ForwardBatch] = []  # a graph reads where they lie, and does not keep them
        while largest:
            batch = self._batch(fields, largest)
            self._batches.append(batch)
            self._replays[largest] = capture(lambda batch=batch: forward(batch))  # type: ignore[misc]
            largest //= 2
        logger.info(
            "cuda_graphs_captured",
            extra={"batch_sizes": sorted(self._replays), "duration_s": time.perf_counter() - started},
        )

    def fits(self, chunks: Sequence[Chunk]) -> bool:
        """Whether a graph covers the step: decodes only, and not too many."""
        return 0 < len(chunks) <= max(self._replays) and all(
            len(chunk.token_ids) == chunk.num_logits == 1 and chunk.policy is None for chunk in chunks
        )

    def run(self, chunks: Sequence[Chunk]) -> Tensor:
        """Logits [num_chunks, vocab_size] of a step that `fits`; the next call overwrites them and the buffers.

        The device must have finished the last step: the buffer that is copied from is written here.
        """
        num_seqs = len(chunks)
        size = 1 << (num_seqs - 1).bit_length()
        ids, positions, slots, contexts, table = self._host
        block_tokens = self._attention.block_tokens
        ids[:num_seqs] = [chunk.token_ids[0] for chunk in chunks]
        positions[:num_seqs] = [chunk.start for chunk in chunks]
        contexts[:num_seqs] = [chunk.end for chunk in chunks]
        for row, chunk in enumerate(chunks):
            index, offset = divmod(chunk.start, block_tokens)
            slots[row] = chunk.blocks[index] * block_tokens + offset
            blocks = chunk.blocks[: index + 1]
            if blocks != self._tables[row]:  # comparing is cheaper, and most steps begin no block
                table[row, : index + 1] = blocks
                self._tables[row] = blocks
        ids[num_seqs:size], positions[num_seqs:size] = 0, 0
        slots[num_seqs:size], contexts[num_seqs:size] = -1, 0
        used = self._max_rows * 7 + size * self._attention.max_blocks
        self._on_device[:used].copy_(self._on_host[:used], non_blocking=True)
        return self._replays[size]()[:num_seqs]

    def _batch(self, fields: _Fields, size: int) -> ForwardBatch:
        token_ids, positions, slots, contexts, table = (view[:size] for view in fields)
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            logit_rows=torch.arange(size, device=self._attention.device),
            attention=self._attention.decode_step(slots, table, contexts),
        )


class CudaCapture:
    """A `Capture` on the current CUDA device. Owns the memory pool that its graphs share: one replays at a time.

    All are recorded on one stream: cuBLAS keeps a workspace for each stream that it was ever called on (32 MiB on
    Hopper), and graphs of one pool reuse each other's memory only so.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, forward: Callable[[], Tensor]) -> Replay:
        """Runs `forward` once to compile its kernels and size its workspaces, then records it."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            forward()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads may use the device without breaking the recording
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            logits = forward()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
