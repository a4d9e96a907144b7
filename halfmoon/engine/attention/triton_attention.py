"""The `triton` attention back end: paged kernels over a block table. On CPU tensors it runs in Triton's interpreter.

Needs triton (the extra `gpu`). Knows nothing of requests or weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from triton import knobs

from halfmoon.engine.attention.attention_backend import AttentionRule, TokenSpan
from halfmoon.engine.attention.attention_table import MixedAttention, fused_from
from halfmoon.engine.kernels.decode_attention import PROGRAMS_PER_SM, decode_attention
from halfmoon.engine.kernels.key_splits import choose_num_splits
from halfmoon.engine.kernels.kv_write import kv_write
from halfmoon.engine.kernels.latent_attention import latent_attention
from halfmoon.engine.kernels.mixed_attention import Decodes, Prefills, mixed_attention
from halfmoon.engine.kernels.paged_kv import PagedKV, num_sms
from halfmoon.engine.kernels.prefill_attention import prefill_attention
from halfmoon.engine.kernels.tile_counts import padded
from halfmoon.engine.kv_memory.kv_arena import slot_runs
from halfmoon.errors import Incompatible


class Paged(NamedTuple):
    """Where the keys of some sequences lie. Each tensor is its own memory: kernels are compiled for its alignment."""

    block_table: Tensor  # [num_seqs, max_blocks] int32
    context_lens: Tensor  # [num_seqs] int32, this step's tokens included; 0 pads a captured graph


class LayerMemories:
    """Owns how kernels see the KV memory of each layer, made and checked once: it is the same in every step."""

    def __init__(self, block_tokens: int) -> None:
        self._block_tokens = block_tokens
        # By address and shape. What is here keeps its memory, so the address is not another's.
        self._seen: dict[tuple[int, torch.Size, tuple[int, ...], torch.dtype], PagedKV] = {}

    def paged(self, layer_kv: Tensor) -> PagedKV:
        """See `PagedKV.of_layer`."""
        key = layer_kv.data_ptr(), layer_kv.shape, layer_kv.stride(), layer_kv.dtype
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = PagedKV.of_layer(layer_kv, self._block_tokens)
        return seen


@dataclass(frozen=True, slots=True)
class TritonStep:
    """A step's rows: first those of sequences with one row each, then those of `cu_seqlens`."""

    slot_mapping: Tensor  # [num_tokens] int64, -1 stores nothing
    memories: LayerMemories
    decodes: Paged | None
    num_decodes: int
    num_splits: int  # of the decodes' keys
    prefills: Paged | None = None
    cu_seqlens: Tensor | None = None  # [num_prefills + 1] int32, counted from row `num_decodes`
    max_new_tokens: int = 0  # of any prefill
    is_fused: bool = False  # decodes and prefills by one kernel

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_kv: Tensor, rule: AttentionRule) -> Tensor:
        """See `StepAttention.attend`; of a rule neither windows nor caps are known here (`attention_table`)."""
        scale = rule.scale
        kv = self.memories.paged(layer_kv)
        kv_write(k, v, kv, self.slot_mapping)
        if rule.latent_size is not None:
            return self._attend_latents(q, kv, scale, rule.latent_size)
        if self.is_fused and self.decodes is not None and self.prefills is not None and self.cu_seqlens is not None:
            decodes = Decodes(*self.decodes, self.num_splits)
            prefills = Prefills(self.prefills[0], self.cu_seqlens, self.prefills[1], self.max_new_tokens)
            return mixed_attention(q, kv, decodes, prefills, scale).flatten(1)
        outs = []
        if self.decodes is not None:
            outs.append(decode_attention(q[: self.num_decodes], kv, *self.decodes, scale, self.num_splits))
        if self.prefills is not None and self.cu_seqlens is not None:
            rows, (table, contexts) = q[self.num_decodes :], self.prefills
            outs.append(prefill_attention(rows, kv, table, self.cu_seqlens, contexts, self.max_new_tokens, scale))
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).flatten(1)

    def _attend_latents(self, q: Tensor, kv: PagedKV, scale: float, latent_size: int) -> Tensor:
        outs, size = [], latent_size
        if self.decodes is not None:
            outs.append(latent_attention(q[: self.num_decodes], kv, *self.decodes, scale, size, self.num_splits))
        if self.prefills is not None:
            new = (self.cu_seqlens, self.max_new_tokens)
            outs.append(latent_attention(q[self.num_decodes :], kv, *self.prefills, scale, size, 1, *new))
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).flatten(1)


class TritonBackend:
    """Prepares steps for the kernels. How keys are split depends only on the number of sequences, not on their lengths.

    So a captured graph and an eager step of one size compute the same, bit for bit.
    """

    def __init__(
        self,
        block_tokens: int,
        num_programs: int,
        context_tokens: int,
        device: str,
        mixed: MixedAttention = "auto",
        programs_per_sm: int = PROGRAMS_PER_SM,
    ) -> None:
        """`num_programs` decode a sequence whose keys are not split: as many as KV heads, or tiles of rows of latents.

        `context_tokens` bounds the length of a sequence; `mixed` has no effect on latents; `programs_per_sm`: see
        `choose_num_splits`. Raises Incompatible on a CPU without the interpreter.
        """
        self.block_tokens = block_tokens
        self.max_blocks = -(-context_tokens // block_tokens)
        self.device = device
        self._memories = LayerMemories(block_tokens)
        self._num_programs, self._programs_per_sm = num_programs, programs_per_sm
        self._context_tokens = context_tokens
        self._num_sms = 1
        capability = None
        where = torch.device(device)
        if where.type == "cuda":
            if where.index not in (None, torch.cuda.current_device()):  # kernels are launched on the current device
                raise Incompatible(f"{device} is not the current CUDA device: choose it with CUDA_VISIBLE_DEVICES")
            self._num_sms = num_sms(where)
            capability = torch.cuda.get_device_capability(device)
        elif not knobs.runtime.interpret:
            raise Incompatible("the triton kernels run on a CPU only in Triton's interpreter: set TRITON_INTERPRET=1")
        self._fused_from = fused_from(mixed, capability)

    def step(self, spans: Sequence[TokenSpan]) -> TritonStep:
        """Prepares a step: leading spans of one row are decodes; the rest, of one row or more, are prefills."""
        num_decodes = next((index for index, span in enumerate(spans) if span.end - span.start > 1), len(spans))
        slots = [
            np.arange(*run, dtype=np.int64)
            for blocks, start, end in spans
            for run in slot_runs(blocks, self.block_tokens, start, end)
        ]
        new_tokens = [end - start for _, start, end in spans[num_decodes:]]
        return TritonStep(
            slot_mapping=torch.from_numpy(np.concatenate(slots)).to(self.device),
            memories=self._memories,
            decodes=self._paged(spans[:num_decodes]),
            num_decodes=num_decodes,
            num_splits=self._num_splits(num_decodes),
            prefills=self._paged(spans[num_decodes:]),
            cu_seqlens=self._int32([0, *accumulate(new_tokens)]) if new_tokens else None,
            max_new_tokens=max(new_tokens, default=0),
            is_fused=self._is_fused(spans[:num_decodes]),
        )

    def decode_step(self, slot_mapping: Tensor, block_table: Tensor, context_lens: Tensor) -> TritonStep:
        """A step of decodes over existing tensors, of the shapes of `TritonStep` and `Paged`."""
        num_decodes = context_lens.shape[0]
        paged = Paged(block_table, context_lens)
        return TritonStep(slot_mapping, self._memories, paged, num_decodes, self._num_splits(num_decodes))

    def _is_fused(self, decodes: Sequence[TokenSpan]) -> bool:
        return self._fused_from is not None and sum(end for _, _, end in decodes) >= self._fused_from

    def _paged(self, spans: Sequence[TokenSpan]) -> Paged | None:
        if not spans:
            return None
        used = [-(-end // self.block_tokens) for _, _, end in spans]
        table = np.zeros((len(spans), max(used)), dtype=np.int32)
        for row, num_blocks, (blocks, _, _) in zip(table, used, spans, strict=True):
            row[:num_blocks] = blocks[:num_blocks]
        return Paged(torch.from_numpy(table).to(self.device), self._int32([end for _, _, end in spans]))

    def _num_splits(self, num_seqs: int) -> int:
        """Rounds the sequences up to the next power of two, the size of the graph that would run them."""
        size = padded(max(1, num_seqs))
        return choose_num_splits(size, self._num_programs, self._context_tokens, self._num_sms, self._programs_per_sm)

    def _int32(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)
