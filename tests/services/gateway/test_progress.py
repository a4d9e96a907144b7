"""Measurements of one output."""

from __future__ import annotations

from halfmoon.pb.prefill_pb2 import FirstToken
from services.gateway.progress import Progress


def test_progress_measures_gaps() -> None:
    progress = Progress(10.0)
    progress.note_tokens([1], 12.0)
    progress.note_tokens([2, 3], 13.0)
    assert (progress.ttft_s, progress.mean_tbt_s, progress.gaps_s) == (2.0, 0.5, [1.0, 0.0])
    assert progress.output_token_ids == [1, 2, 3]


def test_no_more_is_loaded_than_was_cached() -> None:
    progress = Progress(10.0, num_prompt_tokens=64)
    progress.note_resumed(FirstToken(num_cached_tokens=128, num_loaded_tokens=128), 32, [1, 2], 12.0)
    assert (progress.cached_tokens, progress.loaded_tokens) == (32, 32)
