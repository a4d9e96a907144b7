"""The tokens of rows of logits by the compiled kernels (sampling.h), with the rules of `sampler.py`."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import partial

import numpy as np
from torch import Tensor

from halfmoon.engine.native.library import NativeLibrary
from halfmoon.engine.sampler import ChooseTokens, SamplingRow, has_penalties, is_greedy

_DRAW = np.dtype(  # sampling.h: draw_t
    [
        *((name, np.uint64) for name in ("logits", "ids")),
        *((name, np.int64) for name in ("num_ids", "num_prompt")),
        *((name, np.uint64) for name in ("seed", "position")),
        ("top_k", np.int64),
        *((name, np.float64) for name in ("top_p", "min_p", "temperature")),
        *((name, np.float64) for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")),
    ]
)
_SEEDS = 1 << 64
_NO_IDS = array("q")


def native_choice(library: NativeLibrary) -> ChooseTokens:
    """A `ChooseTokens` for logits on the CPU."""
    return partial(_choose, library)


def _choose(library: NativeLibrary, logits: Tensor, rows: Sequence[SamplingRow]) -> list[int]:
    logits = logits.float().contiguous()
    vocab_size = logits.shape[1]
    ids = [_ids(row) for row in rows]
    draws = [
        (
            logits.data_ptr() + 4 * vocab_size * index,
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
    return library.sample(np.array(draws, _DRAW), vocab_size)


def _ids(row: SamplingRow) -> array[int]:
    """What the kernels read of a row's tokens."""
    if not has_penalties(row.params):
        return _NO_IDS
    return array("q", row.token_ids) if row.ids is None else row.ids
