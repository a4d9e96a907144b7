"""Which code computes: what was asked for or an error, and torch's where the better code cannot run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from halfmoon.engine.attention.attention import SdpaBackend
from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.device_path import choose_path
from halfmoon.engine.engine import Engine
from halfmoon.engine.models.layer_ops import TORCH_OPS
from halfmoon.engine.native.attention import NativeBackend
from halfmoon.engine.native.compiler import compiled
from halfmoon.errors import Incompatible

TinyCheckpoint = Callable[[str], Checkpoint]


def test_a_cpu_computes_with_the_native_kernels(tiny_checkpoint: TinyCheckpoint) -> None:
    path = choose_path(EngineConfig(), tiny_checkpoint("llama").model_config, torch.bfloat16, 100)
    assert path.kernels == "native"
    assert isinstance(path.attention, NativeBackend)


@pytest.mark.parametrize(
    ("device", "built_for", "has_gpu", "says"),
    [
        ("cuda", None, False, r"--device cuda: PyTorch .* is a build without CUDA: install one with it, or use --devi"),
        (
            "cuda",
            "13.0",
            False,
            r"--device cuda: PyTorch sees no CUDA device here: see whether nvidia-smi does, or use",
        ),
        ("cuda:2", "13.0", True, r"--device cuda:2: PyTorch sees 2 CUDA devices here"),
        ("cuda:x", "13.0", True, r"--device cuda:x: there are cpu and cuda"),
        ("tpu", "13.0", True, r"--device tpu: there are cpu and cuda"),
    ],
)
def test_a_device_that_is_not_here_is_refused_before_anything_is_loaded(
    device: str,
    built_for: str | None,
    has_gpu: bool,
    says: str,
    tiny_checkpoint: TinyCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(Incompatible, match=says):
        Engine(tiny_checkpoint("llama"), EngineConfig(device=device, num_blocks=4))


def test_torch_takes_over_where_no_compiler_is(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("HALFMOON_CACHE_DIR", str(tmp_path))
    model = tiny_checkpoint("llama").model_config
    path = choose_path(EngineConfig(), model, torch.float32, 100)
    assert (path.kernels, path.layer_ops, type(path.attention)) == ("torch", TORCH_OPS, SdpaBackend)
    assert [record.message for record in caplog.records] == ["native_kernels.unavailable"]
    with pytest.raises(Incompatible, match=r"could not be compiled|need a C compiler"):
        choose_path(EngineConfig(attention="native"), model, torch.float32, 100)


def test_torch_takes_over_where_the_compiled_file_cannot_be_loaded(
    tiny_checkpoint: TinyCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HALFMOON_CACHE_DIR", str(tmp_path))
    compiled(tmp_path).write_bytes(b"")  # as a machine leaves it that loses its power
    model = tiny_checkpoint("llama").model_config
    assert choose_path(EngineConfig(), model, torch.float32, 100).kernels == "torch"
    with pytest.raises(Incompatible, match="could not be loaded"):
        choose_path(EngineConfig(attention="native"), model, torch.float32, 100)


def test_the_native_kernels_are_refused_elsewhere_than_on_a_cpu(tiny_checkpoint: TinyCheckpoint) -> None:
    config = EngineConfig(device="cuda", attention="native")
    with pytest.raises(Incompatible, match="on a CPU, not on cuda"):
        choose_path(config, tiny_checkpoint("llama").model_config, torch.bfloat16, 100)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_torch_takes_over_where_the_kernels_do_not_fit(tiny_checkpoint: TinyCheckpoint, dtype: torch.dtype) -> None:
    model = replace(tiny_checkpoint("llama").model_config, head_dim=16 if dtype == torch.float16 else 20)
    assert choose_path(EngineConfig(), model, dtype, 100).kernels == "torch"
