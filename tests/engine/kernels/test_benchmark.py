"""`benchmarks/engine/kernels.py` where there is nothing to measure."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.engine.kernels import table

ROOT = Path(__file__).parents[3]


def test_without_a_gpu_it_says_so_and_exits_2() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.engine.kernels", "--json"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "no CUDA device" in done.stderr


def test_the_table_needs_no_gpu() -> None:
    assert "| triton | latents | latent_attention |" in table()
    assert "| none | only with `--mixed-attention fused` |" in table()
