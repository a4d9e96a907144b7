"""Measurements of one output."""

from __future__ import annotations

from services.gateway.progress import Progress


def test_progress_measures_gaps() -> None:
    progress = Progress(10.0)
    progress.note_tokens([1], 12.0)
    progress.note_tokens([2, 3], 13.0)
    assert (progress.ttft_s, progress.mean_tbt_s, progress.gaps_s) == (2.0, 0.5, [1.0, 0.0])
    assert progress.output_token_ids == [1, 2, 3]
