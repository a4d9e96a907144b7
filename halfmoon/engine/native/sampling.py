"""What `sampler.py` does with rows of logits, by the compiled kernels (sampling.h)."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
from torch import Tensor

from halfmoon.engine.native.library import NativeLibrary
from halfmoon.engine.request import TokenLogprobs
from halfmoon.engine.sampler import SamplerOps, SamplingRow, has_penalties, is_greedy

_DRAW = struct.Struct("=QQqqQQqdddddd")  # sampling.h: draw_t
_LOGPROBS = np.dtype(  # sampling.h: logprobs_t
    [
        ("logits", np.uint64),
        *((name, np.int64) for name in ("token", "num_top")),
        *((name, np.uint64) for name in ("logprob", "top", "top_ids")),
    ]
)
_SEEDS = 1 << 64
_NO_IDS = array("q")


def native_sampler(library: NativeLibrary) -> SamplerOps:
    """For logits on the CPU."""
    return SamplerOps(partial(_choose, library), partial(_logprobs, library))


def _choose(
    library: NativeLibrary, logits: Tensor, rows: Sequence[SamplingRow], adjusted: Mapping[int, Tensor]
) -> list[int]:
    """See `SamplerOps.choose`."""
    logits = logits.float().contiguous()
    vocab_size = logits.shape[1]
    ids = [_ids(row) for row in rows]
    address, row_bytes = logits.data_ptr(), 4 * vocab_size
    draws = [
        _DRAW.pack(
            adjusted[index].data_ptr() if index in adjusted else address + row_bytes * index,
            of_row.buffer_info()[0],
            len(of_row),
            row.num_prompt,
            row.params.seed % _SEEDS,
            row.position,
            row.params.top_k,
            row.params.top_p,
            row.params.min_p,
            0.0 if is_greedy(row.params) else row.params.temperature,
            row.params.repetition_penalty,
            row.params.presence_penalty,
            row.params.frequency_penalty,
        )
        for index, (row, of_row) in enumerate(zip(rows, ids, strict=True))
    ]
    return library.sample(b"".join(draws), len(rows), vocab_size)


def _ids(row: SamplingRow) -> array[int]:
    """What the kernels read of a row's tokens."""
    if not has_penalties(row.params):
        return _NO_IDS
    return array("q", row.token_ids) if row.ids is None else row.ids


def _logprobs(
    library: NativeLibrary, logits: Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprobs]:
    """See `SamplerOps.logprobs`."""
    logits = logits.float().contiguous()
    num_rows, vocab_size = logits.shape
    width = max(num_top)
    of_tokens, top = np.empty(num_rows), np.empty((num_rows, width))
    top_ids = np.empty((num_rows, width), np.int64)
    wanted = np.zeros(num_rows, _LOGPROBS)
    rows = np.arange(num_rows, dtype=np.uint64)
    wanted["logits"] = logits.data_ptr() + rows * (4 * vocab_size)
    wanted["token"], wanted["num_top"] = token_ids, num_top
    wanted["logprob"] = of_tokens.ctypes.data + rows * 8
    wanted["top"], wanted["top_ids"] = top.ctypes.data + rows * (8 * width), top_ids.ctypes.data + rows * (8 * width)
    library.log_probabilities(wanted, vocab_size)
    found = zip(of_tokens.tolist(), top_ids.tolist(), top.tolist(), num_top, strict=True)
    return [
        TokenLogprobs(one, tuple(pair for pair in zip(ids[:num], values[:num], strict=True) if pair[0] >= 0))
        for one, ids, values, num in found
    ]
