"""All layers in one call give the bits that they give one by one, with listeners between two layers, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch
from torch import Tensor

from halfmoon.engine.attention.attention_backend import AttentionBackend, AttentionRule, StepAttention, TokenSpan
from halfmoon.engine.attention.watched_attention import GatedAttention, WatchedAttention
from halfmoon.engine.checkpoint.checkpoint import Checkpoint, Quantization
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.device_path import choose_path, pack
from halfmoon.engine.kv_memory.kv_arena import KVArena
from halfmoon.engine.kv_memory.kv_watch import LayerWatch
from halfmoon.engine.kv_memory.quantised_rows import is_quantised
from halfmoon.engine.models import Model, build_model
from halfmoon.engine.models.forward_batch import ForwardBatch
from halfmoon.engine.models.weights import load_weights
from halfmoon.engine.native.layers import NativeLayers
from halfmoon.engine.scheduling.layer_gate import LayerGate, LayerLate
from halfmoon.kv.kv_layout import KVLayout

BLOCK_TOKENS = 8
NUM_BLOCKS = 200
MODELS = ("llama", "llama-tied-biased", "llama-wide-heads", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Between:
    """Attends layer by layer."""

    inner: StepAttention

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer_kv: Tensor, rule: AttentionRule) -> Tensor:
        return self.inner.attend(q, k, v, layer_kv, rule)


def computed(model: Model, batch: ForwardBatch, arena: KVArena) -> tuple[Tensor, Tensor]:
    """Logits, and all KV after the step."""
    earlier = torch.linspace(-1, 1, arena.tensor.numel()).view(arena.tensor.shape)
    arena.tensor.copy_(torch.zeros_like(earlier) if is_quantised(arena.tensor.dtype) else earlier)
    with torch.inference_mode():
        return model.forward(batch, arena.tensor), arena.tensor.clone()


@dataclass(frozen=True, slots=True)
class Native:
    """A model on the native path, and memory for its KV."""

    model: Model
    arena: KVArena
    attention: AttentionBackend

    def batch(self, spans: Sequence[tuple[int, int]]) -> ForwardBatch:
        """A step over `spans` of as many sequences, each in blocks of its own, with logits of all rows."""
        blocks = torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
        own = [blocks[at::3] for at in range(len(spans))]
        attention = self.attention.step([TokenSpan(row, *span) for row, span in zip(own, spans, strict=True)])
        positions = torch.cat([torch.arange(*span) for span in spans])
        return ForwardBatch(positions * 7 % 190 + 3, positions, torch.arange(len(positions)), attention)


def native_model(checkpoint: Checkpoint, config: EngineConfig, quantization: Quantization = "none") -> Native:
    of, dtype = checkpoint.model_config, "float32" if config.dtype == "auto" else config.dtype
    path = choose_path(config, of, getattr(torch, dtype), checkpoint.context_tokens)
    model = build_model(of, getattr(torch, dtype), "cpu", path.layer_ops)
    load_weights(model, checkpoint.weight_files)
    pack(model, path, quantization)
    layout = KVLayout(of.num_layers, of.num_kv_heads, of.head_dim, config.layout_dtype(dtype), BLOCK_TOKENS)
    return Native(model, KVArena(layout, NUM_BLOCKS, "cpu", path.kernels), path.attention)


def count_steps(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Counts the steps that are one call from now on."""
    steps: list[object] = []
    run = NativeLayers.run

    def counted(*arguments: object) -> tuple[Tensor, Tensor]:
        steps.append(arguments)
        return run(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(NativeLayers, "run", counted)
    return lambda: len(steps)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kv_dtype", ["auto", "int8", "fp8"])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_one_call_gives_the_bits_of_many(
    name: str,
    dtype: Literal["float32", "bfloat16"],
    kv_dtype: Literal["auto", "int8", "fp8"],
    quantization: Quantization,
    tiny_checkpoint: Callable[[str], Checkpoint],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = EngineConfig(attention="native", dtype=dtype, kv_dtype=kv_dtype, block_tokens=BLOCK_TOKENS, num_threads=2)
    native = native_model(tiny_checkpoint(name), config, quantization)
    num_steps = count_steps(monkeypatch)
    many = [(0, 300), (100, 165)]  # so many that silu(gate) * up is made where the sums are, if inner units fit
    for spans in ([(0, 1)], [(9, 10), (500, 501)], [(0, 70), (30, 31), (100, 165)], many):
        batch = native.batch(spans)
        joined = computed(native.model, batch, native.arena)
        single = computed(native.model, replace(batch, attention=Between(batch.attention)), native.arena)
        assert torch.equal(joined[0], single[0])
        assert torch.equal(joined[1], single[1])
    assert num_steps() == 4


def test_a_step_that_is_watched_and_waits_is_one_call(
    tiny_checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    native = native_model(tiny_checkpoint("llama"), EngineConfig(attention="native", block_tokens=BLOCK_TOKENS))
    num_layers = native.arena.tensor.shape[0]
    batch = native.batch([(0, 70)])
    single = computed(native.model, replace(batch, attention=Between(batch.attention)), native.arena)
    num_steps = count_steps(monkeypatch)
    events: list[tuple[str, int]] = []
    gate = LayerGate([0], num_layers, patience_s=0.0)
    monkeypatch.setattr(gate, "wait", lambda layer: events.append(("waited", layer)))
    watch = LayerWatch(1, lambda num_stored: events.append(("stored", num_stored)))
    watched = WatchedAttention(GatedAttention(batch.attention, gate), num_layers, watch)
    joined = computed(native.model, replace(batch, attention=watched), native.arena)
    assert torch.equal(joined[0], single[0])
    assert torch.equal(joined[1], single[1])
    assert events == [event for at in range(num_layers) for event in (("waited", at), ("stored", at + 1))]
    assert num_steps() == 1


def test_a_layer_that_is_late_ends_the_one_call(
    tiny_checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    native = native_model(tiny_checkpoint("llama"), EngineConfig(attention="native", block_tokens=BLOCK_TOKENS))
    num_layers = native.arena.tensor.shape[0]
    batch, num_steps = native.batch([(0, 70)]), count_steps(monkeypatch)
    gate, stored = LayerGate([0], num_layers, patience_s=0.0), list[int]()
    gate.arrived(num_layers - 1)
    watched = WatchedAttention(
        GatedAttention(batch.attention, gate), num_layers, LayerWatch(num_layers - 1, stored.append)
    )
    with pytest.raises(LayerLate):
        computed(native.model, replace(batch, attention=watched), native.arena)
    assert (stored, num_steps()) == ([num_layers - 1], 1)
