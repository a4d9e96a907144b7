"""All layers in one call give the bits that they give one by one, which steps with listeners between layers need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from halfmoon.engine.attention.attention_backend import StepAttention, TokenSpan
from halfmoon.engine.checkpoint.checkpoint import Checkpoint, Quantization
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.device_path import choose_path, pack
from halfmoon.engine.kv_memory.kv_arena import KVArena
from halfmoon.engine.models import Model, build_model
from halfmoon.engine.models.forward_batch import ForwardBatch
from halfmoon.engine.models.weights import load_weights
from halfmoon.engine.native.layers import NativeLayers
from halfmoon.kv.kv_layout import KVLayout

BLOCK_TOKENS = 8
NUM_BLOCKS = 200
MODELS = ("llama", "llama-tied-biased", "llama-wide-heads", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Between:
    """Attends layer by layer."""

    inner: StepAttention

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_kv: Tensor, scale: float) -> Tensor:
        return self.inner.attend(q, k, v, layer_kv, scale)


def computed(model: Model, batch: ForwardBatch, arena: KVArena) -> tuple[Tensor, Tensor]:
    """Logits, and all KV after the step."""
    earlier = torch.linspace(-1, 1, arena.tensor.numel()).view(arena.tensor.shape)
    arena.tensor.copy_(torch.zeros_like(earlier) if arena.tensor.dtype == torch.int8 else earlier)
    with torch.inference_mode():
        return model.forward(batch, arena.tensor), arena.tensor.clone()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_one_call_gives_the_bits_of_many(
    name: str,
    dtype: Literal["float32", "bfloat16"],
    kv_dtype: Literal["auto", "int8"],
    quantization: Quantization,
    tiny_checkpoint: Callable[[str], Checkpoint],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint = tiny_checkpoint(name)
    config = EngineConfig(attention="native", dtype=dtype, kv_dtype=kv_dtype, block_tokens=BLOCK_TOKENS)
    of = checkpoint.model_config
    path = choose_path(config, of, getattr(torch, dtype), checkpoint.context_tokens)
    model = build_model(of, getattr(torch, dtype), "cpu", path.layer_ops)
    load_weights(model, checkpoint.weight_files)
    pack(model, path, quantization)
    layout = KVLayout(of.num_layers, of.num_kv_heads, of.head_dim, config.layout_dtype(dtype), BLOCK_TOKENS)
    arena = KVArena(layout, NUM_BLOCKS, "cpu", path.kernels)
    blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
    steps = 0
    run = NativeLayers.run

    def counted(*arguments: object) -> tuple[Tensor, Tensor]:
        nonlocal steps
        steps += 1
        return run(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(NativeLayers, "run", counted)
    for spans in ([(0, 1)], [(9, 10), (500, 501)], [(0, 70), (30, 31), (100, 165)]):
        own = [blocks[at::3] for at in range(len(spans))]
        attention = path.attention.step([TokenSpan(row, *span) for row, span in zip(own, spans, strict=True)])
        positions = torch.cat([torch.arange(*span) for span in spans])
        token_ids = positions * 7 % 190 + 3
        batch = ForwardBatch(token_ids, positions, torch.arange(len(positions)), attention)
        joined = computed(model, batch, arena)
        single = computed(model, replace(batch, attention=Between(attention)), arena)
        assert torch.equal(joined[0], single[0])
        assert torch.equal(joined[1], single[1])
    assert steps == 3
