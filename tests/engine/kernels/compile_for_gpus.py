"""Run as a program: compiles every kernel for GPUs of several generations through its wrapper, and prints JSON.

No GPU is needed, but an environment without TRITON_INTERPRET. Nothing is launched: the tensors are on the CPU.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from halfmoon.engine.kernels import paged_kv
from halfmoon.engine.kernels.block_copy import gather_blocks, scatter_blocks
from halfmoon.engine.kernels.decode_attention import decode_attention
from halfmoon.engine.kernels.kv_write import kv_write
from halfmoon.engine.kernels.latent_attention import latent_attention
from halfmoon.engine.kernels.mixed_attention import Decodes, Prefills, mixed_attention
from halfmoon.engine.kernels.paged_kv import PagedKV
from halfmoon.engine.kernels.prefill_attention import prefill_attention
from halfmoon.engine.kernels.rms_norm import add_rms_norm, rms_norm
from halfmoon.engine.kernels.rotary import rotary
from halfmoon.engine.kernels.silu_mul import silu_mul
from halfmoon.engine.kv_memory.quantised_rows import is_quantised

BF16 = torch.bfloat16


# A program's limit by compute capability (CUDA programming guide, "Technical Specifications per Compute Capability").
SHARED_BYTES = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}


class Target:
    """What Triton's compiler asks of a driver. Its devices are numbered by their capability: each has its own cache."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0


def paged(dtype: torch.dtype, head_dim: int, num_kv_heads: int = 2) -> PagedKV:
    shape = (num_kv_heads, 128, head_dim)
    if is_quantised(dtype):
        return PagedKV.of_layer(torch.zeros(2, num_kv_heads, 128, head_dim + 2, dtype=dtype), 64)
    return PagedKV(torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype), 64)


def decode(dtype: torch.dtype, head_dim: int, num_splits: int, q_dtype: torch.dtype = BF16) -> None:
    table, lens = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    q = torch.zeros(1, 8, head_dim, dtype=q_dtype)
    decode_attention(q, paged(dtype, head_dim), table, lens, 0.1, num_splits)


def prefill(dtype: torch.dtype, head_dim: int, num_tokens: int, q_dtype: torch.dtype = BF16) -> None:
    table, lens = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    starts = torch.zeros(2, dtype=torch.int32)
    q = torch.zeros(num_tokens, 8, head_dim, dtype=q_dtype)
    prefill_attention(q, paged(dtype, head_dim), table, starts, lens, num_tokens, 0.1)


def mixed(dtype: torch.dtype, head_dim: int, num_splits: int, q_dtype: torch.dtype = BF16) -> None:
    tables, lens = torch.zeros(2, 1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    q = torch.zeros(1 + 512, 8, head_dim, dtype=q_dtype)
    prefills = Prefills(tables[1], torch.zeros(2, dtype=torch.int32), lens, 512)
    mixed_attention(q, paged(dtype, head_dim), Decodes(tables[0], lens, num_splits), prefills, 0.1)


def latent(num_tokens: int, num_splits: int, dtype: torch.dtype = BF16, num_heads: int = 128) -> None:
    """Of DeepSeek's sizes."""
    layer = torch.zeros(2, 1, 128, 288 + 2 * is_quantised(dtype), dtype=dtype)
    table, lens = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    starts = None if num_tokens == 1 else torch.zeros(2, dtype=torch.int32)
    q = torch.zeros(num_tokens, num_heads, 576, dtype=torch.float32 if dtype is torch.float32 else BF16)
    kv = PagedKV.of_layer(layer, 64)
    latent_attention(q, kv, table, lens, 0.1, 512, num_splits, starts, num_tokens)


def store(dtype: torch.dtype) -> None:
    k = torch.zeros(1, 2, 128, dtype=BF16)
    kv_write(k, k, paged(dtype, 128), torch.zeros(1, dtype=torch.int64))


def copies() -> None:
    arena, blocks = torch.zeros(2, 2, 2, 128, 128, dtype=BF16), torch.zeros(2, dtype=torch.int32)
    scatter_blocks(gather_blocks(arena, blocks, 64, 0, 2, 0, 100), arena, blocks, 64, 0, 0)


def pointwise() -> None:
    x, weight = torch.zeros(2, 4096, dtype=BF16), torch.zeros(4096, dtype=BF16)
    rms_norm(x, weight, 1e-5)
    add_rms_norm(x, x.clone(), weight, 1e-5)
    silu_mul(x)
    q, k, cos = torch.zeros(2, 32, 128, dtype=BF16), torch.zeros(2, 8, 128, dtype=BF16), torch.zeros(4, 64)
    rotary(q, k, torch.zeros(2, dtype=torch.int64), cos, cos)


CASES: dict[str, Callable[[], None]] = {
    "decode bf16 128": lambda: decode(BF16, 128, 4),
    "prefill bf16 128": lambda: prefill(BF16, 128, 512),
    "mixed bf16 128": lambda: mixed(BF16, 128, 4),
    "latent decode bf16": lambda: latent(1, 64),
    "latent prefill bf16": lambda: latent(4, 1),
    "store bf16": lambda: store(BF16),
    "store int8": lambda: store(torch.int8),
    "store e4m3": lambda: store(torch.uint8),
    "decode int8 64": lambda: decode(torch.int8, 64, 4),  # blocks that are no whole tiles
    "decode e4m3 128": lambda: decode(torch.uint8, 128, 4),
    "copies": copies,
    "pointwise": pointwise,
}
MORE: dict[str, Callable[[], None]] = {  # not in the test, for its time
    "decode bf16 64": lambda: decode(BF16, 64, 1),
    "decode bf16 96": lambda: decode(BF16, 96, 1),
    "decode bf16 256": lambda: decode(BF16, 256, 1),
    "decode int8 128": lambda: decode(torch.int8, 128, 4),
    "prefill int8 128": lambda: prefill(torch.int8, 128, 512),
    "prefill e4m3 128": lambda: prefill(torch.uint8, 128, 512),
    "decode fp32 128": lambda: decode(torch.float32, 128, 1, torch.float32),
    "prefill bf16 64": lambda: prefill(BF16, 64, 512),
    "prefill bf16 256": lambda: prefill(BF16, 256, 512),
    "prefill bf16 short": lambda: prefill(BF16, 128, 2),
    "mixed bf16 64": lambda: mixed(BF16, 64, 1),
    "mixed bf16 256": lambda: mixed(BF16, 256, 4),
    "mixed int8 128": lambda: mixed(torch.int8, 128, 4),
    "mixed e4m3 128": lambda: mixed(torch.uint8, 128, 4),
    "mixed fp32 128": lambda: mixed(torch.float32, 128, 4, torch.float32),
    "latent decode bf16 16 heads": lambda: latent(1, 1, num_heads=16),
    "latent decode int8": lambda: latent(1, 1, torch.int8),
    "latent decode e4m3": lambda: latent(1, 1, torch.uint8),
    "latent decode fp32": lambda: latent(1, 1, torch.float32),
    "prefill fp32 128": lambda: prefill(torch.float32, 128, 512, torch.float32),
}


def usage(case: str, capability: int, compiled: Any) -> dict[str, Any]:
    """Shared memory and, registers and stack (spills) of one compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    ptx = compiled.asm["ptx"]
    return {
        "case": case,
        "capability": capability,
        "shared_limit": SHARED_BYTES[capability],
        "kernel": compiled.metadata.name,
        "shared_bytes": compiled.metadata.shared,
        "registers": int(found[1]),
        "stack_bytes": int(found[2]),
        "warps": compiled.metadata.num_warps,
        "wgmma": "wgmma.mma_async" in ptx,
        "tcgen05": "tcgen05.mma" in ptx,
        "mma": "mma.sync" in ptx,
        "async_copies": ptx.count("cp.async.cg") + ptx.count("cp.async.ca"),
    }


def main() -> None:
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        compiled.append(run(self, *args, grid=grid, warmup=True, **options))

    JITFunction.run = compile_only
    report = []
    cases = CASES | (MORE if "--all" in sys.argv else {})
    for capability, shared_bytes in SHARED_BYTES.items():
        driver.set_active(Target(capability))
        paged_kv._SHARED_BYTES, paged_kv._GENERATION = shared_bytes, capability // 10
        for name, case in cases.items():
            if "bf16" in name or capability == 90 or len(cases) > len(CASES):  # others are no other code elsewhere
                compiled.clear()
                case()
                report += [usage(name, capability, kernel) for kernel in compiled]
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
