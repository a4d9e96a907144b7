"""How many splits a sequence's keys get. What they give together: `test_decode_attention.py`."""

from __future__ import annotations

import pytest

key_splits = pytest.importorskip("halfmoon.engine.kernels.key_splits", reason="triton is missing (extra `gpu`)")


@pytest.mark.parametrize(
    ("num_seqs", "num_kv_heads", "context", "num_sms", "splits"),
    [
        (1, 8, 8192, 132, 32),
        (8, 8, 8192, 132, 8),
        (64, 8, 32768, 132, 1),
        (1, 8, 1024, 132, 4),
        (1, 8, 255, 132, 1),
        (0, 8, 0, 132, 1),
        (1, 32, 32768, 132, 16),
        (3, 4, 32768, 114, 32),  # 38 is nearer to 32 than to 64
    ],
)
def test_choose_num_splits(num_seqs: int, num_kv_heads: int, context: int, num_sms: int, splits: int) -> None:
    assert key_splits.choose_num_splits(num_seqs, num_kv_heads, context, num_sms, 4) == splits
