"""Kernels compile for Ampere, Hopper and Blackwell in dtypes the interpreter cannot run, and fit their chips."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is missing (extra `gpu`)")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    program = Path(__file__).with_name("compile_for_gpus.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    kernels: list[dict[str, Any]] = json.loads(done.stdout)
    return kernels


def test_kernels_fit(compiled: list[dict[str, Any]]) -> None:
    assert {kernel["kernel"] for kernel in compiled} == {
        "_add_rms_norm_kernel",
        "_copy_blocks_kernel",
        "_decode_attention_kernel",
        "_kv_write_kernel",
        "_latent_attention_kernel",
        "_merge_splits_kernel",
        "_mixed_attention_kernel",
        "_prefill_attention_kernel",
        "_rms_norm_kernel",
        "_rotary_kernel",
        "_silu_mul_kernel",
    }
    assert {kernel["capability"] for kernel in compiled} == {80, 90, 100}
    for kernel in compiled:
        assert kernel["shared_bytes"] <= kernel["shared_limit"], kernel
        is_mixed = kernel["kernel"] == "_mixed_attention_kernel"
        assert kernel["stack_bytes"] <= (64 if is_mixed and kernel["capability"] == 80 else 32), (
            f"registers spill: {kernel}"
        )
        if is_mixed:  # a prefill's and a decode's share a multiprocessor, which has 64 Ki registers
            assert 2 * (kernel["shared_bytes"] + 1024) <= kernel["shared_limit"] + 1024, kernel
            assert 2 * 32 * kernel["warps"] * kernel["registers"] <= 1 << 16, kernel


def test_attention_uses_the_tensor_cores_and_loads_ahead(compiled: list[dict[str, Any]]) -> None:
    """Those of each generation where a program has 64 rows."""
    of_64_rows = {80: "mma", 90: "wgmma", 100: "tcgen05"}
    for kernel in compiled:
        if kernel["kernel"] in ("_prefill_attention_kernel", "_mixed_attention_kernel", "_latent_attention_kernel"):
            assert kernel[of_64_rows[kernel["capability"]]], kernel
        if kernel["kernel"] == "_decode_attention_kernel":
            assert kernel["mma"], kernel
        if kernel["kernel"].endswith("_attention_kernel"):
            assert kernel["async_copies"], kernel
