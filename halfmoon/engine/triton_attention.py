"""The `triton` attention back end: paged kernels over a block table. On CPU tensors it runs in Triton's interpreter.

Needs triton (the extra `gpu`). Not run on a GPU yet. Knows nothing of requests or weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
from torch import Tensor
from triton import knobs

from halfmoon.engine.attention_backend import Span
from halfmoon.engine.kernels.decode_attention import choose_num_splits, decode_attention
from halfmoon.engine.kernels.kv_store import kv_store
from halfmoon.engine.kernels.paged_kv import PagedKV
from halfmoon.engine.kernels.prefill_attention import prefill_attention
from halfmoon.engine.kv_arena import slot_runs
from halfmoon.errors import Incompatible


@dataclass(frozen=True, slots=True)
class TritonStep:
    """A step's rows: first `num_decodes` sequences of one row each, then the sequences of `cu_seqlens`."""

    slot_mapping: Tensor  # [num_tokens] int64, -1 stores nothing
    block_table: Tensor  # [num_seqs, max_blocks] int32
    context_lens: Tensor  # [num_seqs] int32, this step's tokens included; 0 pads a captured graph
    cu_seqlens: Tensor | None  # [num_seqs - num_decodes + 1] int32, counted from row `num_decodes`; None: decodes only
    num_decodes: int
    num_splits: int  # of the decodes' keys
    max_new_tokens: int  # of any sequence of `cu_seqlens`
    block_tokens: int

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_kv: Tensor, scale: float) -> Tensor:
        """As `StepAttention.attend`."""
        kv = PagedKV(layer_kv[0], layer_kv[1], self.block_tokens)
        kv_store(k, v, kv, self.slot_mapping)
        outs = []
        split = self.num_decodes
        if split:
            table, contexts = self.block_table[:split], self.context_lens[:split]
            outs.append(decode_attention(q[:split], kv, table, contexts, scale, self.num_splits))
        if self.cu_seqlens is not None:
            table, contexts = self.block_table[split:], self.context_lens[split:]
            outs.append(prefill_attention(q[split:], kv, table, self.cu_seqlens, contexts, self.max_new_tokens, scale))
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).flatten(1)


class TritonBackend:
    """Prepares steps for the kernels. How keys are split depends on the number of sequences alone.

    Not on their lengths: so a captured graph and an eager step of one size compute the same, bit for bit.
    """

    def __init__(self, block_tokens: int, num_kv_heads: int, context_tokens: int, device: str) -> None:
        """`context_tokens` is the longest sequence there can be. Raises Incompatible on a CPU without interpreter."""
        self.block_tokens = block_tokens
        self.max_blocks = -(-context_tokens // block_tokens)
        self.device = device
        self._num_kv_heads = num_kv_heads
        self._context_tokens = context_tokens
        self._num_sms = 1
        if torch.device(device).type == "cuda":
            self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        elif not knobs.runtime.interpret:
            raise Incompatible("the triton kernels run on a CPU only in Triton's interpreter: set TRITON_INTERPRET=1")

    def step(self, spans: Sequence[Span]) -> TritonStep:
        """Leading spans of one row are decodes; the rest, of one row or more, are prefills."""
        num_decodes = next((index for index, span in enumerate(spans) if span.end - span.start > 1), len(spans))
        slots = [
            np.arange(*run, dtype=np.int64)
            for blocks, start, end in spans
            for run in slot_runs(blocks, self.block_tokens, start, end)
        ]
        used = [-(-end // self.block_tokens) for _, _, end in spans]
        table = np.zeros((len(spans), max(used)), dtype=np.int32)
        for row, num_blocks, span in zip(table, used, spans, strict=True):
            row[:num_blocks] = span.blocks[:num_blocks]
        new_tokens = [end - start for _, start, end in spans[num_decodes:]]
        return TritonStep(
            slot_mapping=torch.from_numpy(np.concatenate(slots)).to(self.device),
            block_table=torch.from_numpy(table).to(self.device),
            context_lens=self._int32([end for _, _, end in spans]),
            cu_seqlens=self._int32([0, *np.cumsum(new_tokens)]) if new_tokens else None,
            num_decodes=num_decodes,
            num_splits=self._num_splits(num_decodes),
            max_new_tokens=max(new_tokens, default=0),
            block_tokens=self.block_tokens,
        )

    def decode_step(self, slot_mapping: Tensor, block_table: Tensor, context_lens: Tensor) -> TritonStep:
        """A step of decodes over tensors that are there already, of the shapes of `TritonStep`."""
        num_decodes = context_lens.shape[0]
        return TritonStep(
            slot_mapping=slot_mapping,
            block_table=block_table,
            context_lens=context_lens,
            cu_seqlens=None,
            num_decodes=num_decodes,
            num_splits=self._num_splits(num_decodes),
            max_new_tokens=0,
            block_tokens=self.block_tokens,
        )

    def _num_splits(self, num_seqs: int) -> int:
        """As for the next power of two of sequences: the size of the graph that would run them."""
        size = triton.next_power_of_2(max(1, num_seqs))
        return choose_num_splits(size, self._num_kv_heads, self._context_tokens, self._num_sms)

    def _int32(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)
