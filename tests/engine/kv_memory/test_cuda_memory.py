"""Who may open whose device memory; on a GPU, that KV gathered in one process is scattered in another.

The checks run on a fake `torch.cuda`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from halfmoon.engine.kv_memory.cuda_memory import CudaMemory
from halfmoon.errors import Incompatible, Unavailable
from halfmoon.kv.kv_layout import KVLayout, KVSlice

ROOT = Path(__file__).parents[3]
LAYOUT = KVLayout(3, 2, 16, "bfloat16", 8)
SENDER = """
import sys, torch
from halfmoon.engine.kv_memory.cuda_memory import CudaMemory
from halfmoon.engine.kv_memory.kv_arena import KVArena
from halfmoon.kv.kv_layout import KVLayout, KVSlice

layout = KVLayout(3, 2, 16, "bfloat16", 8)
arena = KVArena(layout, 10, "cuda", "triton")
arena.tensor.copy_(torch.randn(arena.tensor.shape, generator=torch.Generator().manual_seed(1)))
torch.cuda.synchronize()
region, exported = CudaMemory(layout).allocate(8 << 20)
arena.read([7, 2, 3, 0, 9], KVSlice(0, 3, 0, 40), region.part(2 << 20, 40 * layout.token_bytes))
print(exported.decode(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> CudaMemory:
    """This process computes on the second of two GPUs, which do not reach each other."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"GPU-{index}"))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda mine, theirs: False)
    return CudaMemory(LAYOUT)


def exported(**changes: Any) -> bytes:
    said = {
        "process": os.getpid() + 1,
        "layout": LAYOUT.fingerprint(),
        "gpu": "GPU-1",
        "handle": "00",
        "num_bytes": 64,
        "offset": 0,
        "counter": "00",
        "counter_offset": 0,
        "event": "00",
    }
    return json.dumps(said | changes).encode()


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"process": os.getpid()}, "one process"),
        ({"layout": KVLayout(3, 2, 16, "float16", 8).fingerprint()}, "layout or dtype"),
        ({"gpu": "GPU-0"}, "cannot reach"),
        ({"handle": "no hexadecimal"}, "makes no sense"),
    ],
)
def test_what_cannot_be_shared_is_declined(memory: CudaMemory, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(Incompatible, match=match):
        memory.open(exported(**changes))


@pytest.mark.parametrize("said", [b"", b"{}", b"[]", b"\xff"])
def test_what_makes_no_sense_is_declined(memory: CudaMemory, said: bytes) -> None:
    with pytest.raises(Incompatible, match="no sense"):
        memory.open(said)


@pytest.mark.parametrize("gpu", ["GPU-1", "GPU-elsewhere"], ids=["its own", "an invisible one"])
def test_what_cuda_refuses_is_declined(memory: CudaMemory, monkeypatch: pytest.MonkeyPatch, gpu: str) -> None:
    asked: list[Any] = []

    def refuse(*arguments: Any) -> None:
        asked.extend(arguments)
        raise RuntimeError("CUDA error: invalid resource handle")

    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", refuse)
    with pytest.raises(Unavailable, match="invalid resource handle"):
        memory.open(exported(gpu=gpu))
    assert asked[0] == 1  # the device of this process, whatever number the sender's has


def test_memory_that_cannot_be_had_is_unavailable(memory: CudaMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(Unavailable, match="out of memory"):
        memory.allocate(64)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_kv_gathered_in_one_process_is_scattered_in_another() -> None:
    from halfmoon.engine.kv_memory.kv_arena import KVArena

    blocks = [7, 2, 3, 0, 9]
    child = subprocess.Popen([sys.executable, "-c", SENDER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdin is not None
        assert child.stdout is not None
        said = child.stdout.readline().strip()
        region = CudaMemory(LAYOUT).open(said)
        arena = KVArena(LAYOUT, 10, "cuda", "triton")
        arena.tensor.zero_()
        torch.cuda.synchronize()
        arena.write(blocks, KVSlice(0, 3, 0, 40), region.part(2 << 20, 40 * LAYOUT.token_bytes))
        sent = KVArena(LAYOUT, 10, "cpu")
        sent.tensor.copy_(torch.randn(sent.tensor.shape, generator=torch.Generator().manual_seed(1)))
        assert bytes(arena.read(blocks, KVSlice(0, 3, 0, 40))) == bytes(sent.read(blocks, KVSlice(0, 3, 0, 40)))
        del region
        child.stdin.close()
    assert child.returncode == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_process_does_not_open_its_own() -> None:
    memory = CudaMemory(LAYOUT)
    _, said = memory.allocate(8 << 20)
    with pytest.raises(Incompatible, match="one process"):
        memory.open(said)
