"""Every kernel compiles for Hopper in the dtypes the interpreter cannot run, uses tensor cores and fits the chip."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is missing (extra `gpu`)")

ROOT = Path(__file__).parents[3]
MAX_SHARED_BYTES = 227 * 1024  # a block's limit at compute capability 9.0 (CUDA programming guide)


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    program = Path(__file__).with_name("compile_for_hopper.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr
    kernels: list[dict[str, Any]] = json.loads(done.stdout)
    return kernels


@pytest.mark.slow
def test_kernels_fit(compiled: list[dict[str, Any]]) -> None:
    assert {kernel["kernel"] for kernel in compiled} == {
        "_add_rms_norm_kernel",
        "_copy_blocks_kernel",
        "_decode_attention_kernel",
        "_kv_write_kernel",
        "_merge_splits_kernel",
        "_prefill_attention_kernel",
        "_rms_norm_kernel",
        "_rotary_kernel",
        "_silu_mul_kernel",
    }
    for kernel in compiled:
        assert kernel["shared_bytes"] <= MAX_SHARED_BYTES, kernel
        assert kernel["stack_bytes"] <= 16, f"registers spill: {kernel}"


@pytest.mark.slow
def test_attention_uses_the_tensor_cores_and_loads_ahead(compiled: list[dict[str, Any]]) -> None:
    for kernel in compiled:
        if kernel["kernel"] == "_prefill_attention_kernel":
            assert kernel["wgmma"], kernel
        if kernel["kernel"] == "_decode_attention_kernel":
            assert kernel["mma"], kernel
        if kernel["kernel"].endswith("_attention_kernel"):
            assert kernel["async_copies"], kernel
