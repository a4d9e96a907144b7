"""KV memory by default: a share of a host's, a GPU's without the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from halfmoon.architectures.model_config import ModelConfig
from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.kv_memory.kv_budget import kv_budget_bytes, paused_budget_bytes, step_bytes, weight_bytes
from halfmoon.engine.models import build_model
from halfmoon.errors import Incompatible

GIB = 1 << 30


@pytest.fixture
def model(tiny_checkpoint: Callable[[str], Checkpoint]) -> ModelConfig:
    return tiny_checkpoint("llama").model_config


def budget(model: ModelConfig, config: EngineConfig, device_bytes: int = 80 * GIB) -> int:
    return kv_budget_bytes(config, model, torch.bfloat16, lambda: device_bytes)


def test_a_share_of_what_the_host_can_give(model: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfmoon.engine.kv_memory.kv_budget.free_memory_bytes", lambda: 8000 << 10)
    assert budget(model, EngineConfig()) == 1000 << 10
    assert budget(model, EngineConfig(tensor_parallel=2)) == 500 << 10  # ranks share the host
    assert budget(model, EngineConfig(host_workers=2)) == 1000 << 10
    assert budget(model, EngineConfig(host_workers=20)) == 100 << 10  # a quarter in all


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_was_asked_for_is_taken(model: ModelConfig, device: str) -> None:
    assert budget(model, EngineConfig(device=device, kv_memory_bytes=77)) == 77


def test_a_gpu_without_weights_and_working_memory(model: ModelConfig) -> None:
    weights = weight_bytes(model, torch.bfloat16)
    assert weights == sum(view.nbytes for view in build_model(model, torch.bfloat16, "cpu").parameters().values())
    assert budget(model, EngineConfig(device="cuda")) == int(0.9 * 80 * GIB) - weights - GIB
    halves = EngineConfig(device="cuda", gpu_memory_utilization=0.45, tensor_parallel=2)
    assert budget(model, halves) == int(0.45 * 80 * GIB) - weights // 2 - GIB


def test_large_steps_leave_less_for_kv(model: ModelConfig) -> None:
    """Llama-3.1-8B's activations take 0.1 MiB a token, and its logits 3.4 MiB a sequence."""
    model = replace(model, hidden_size=4096, intermediate_size=14336, vocab_size=128256)
    assert step_bytes(EngineConfig(device="cuda"), model, torch.bfloat16) == GIB
    for config in (
        EngineConfig(device="cuda", max_batch_tokens=16384),
        EngineConfig(device="cuda", max_running=512),
    ):
        needed = config.step_tokens * 3 * (4096 + 14336) * 2 + config.max_running * 3 * 128256 * 4
        assert needed < step_bytes(config, model, torch.bfloat16) < needed + 1.5 * GIB


def test_weights_that_fill_a_gpu_are_told(model: ModelConfig) -> None:
    with pytest.raises(Incompatible, match="leaves no room for KV"):
        budget(model, EngineConfig(device="cuda"), GIB)


def test_copies_of_paused_kv_take_a_part_of_what_the_host_can_give(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfmoon.engine.kv_memory.kv_budget.free_memory_bytes", lambda: 8 * GIB)
    assert paused_budget_bytes(EngineConfig(), GIB) == GIB
    assert paused_budget_bytes(EngineConfig(device="cuda"), 70 * GIB) == 2 * GIB
    assert paused_budget_bytes(EngineConfig(device="cuda", host_workers=8), 70 * GIB) == GIB // 2
    assert paused_budget_bytes(EngineConfig(paused_bytes=77), GIB) == 77
    assert paused_budget_bytes(EngineConfig(paused_bytes=0), GIB) == 0


@pytest.mark.parametrize("share", [0.0, -1.0, 1.01])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(Incompatible, match="gpu_memory_utilization"):
        EngineConfig(device="cuda", gpu_memory_utilization=share)
