"""Our logits are transformers' logits, through the paged path, however the tokens are cut into steps."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from halfmoon.architectures.model_config import ModelConfig
from halfmoon.engine.attention.attention import AttentionBatch, Segment
from halfmoon.engine.attention.attention_backend import AttentionBackend, TokenSpan
from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.device_path import DevicePath, choose_path
from halfmoon.engine.engine import Engine
from halfmoon.engine.kv_memory.kv_arena import KVArena
from halfmoon.engine.models import Model, build_model, llama, opt
from halfmoon.engine.models.forward_batch import ForwardBatch
from halfmoon.engine.models.linear import pack_onednn
from halfmoon.engine.models.rotary import Rotary
from halfmoon.engine.models.weights import fill_dummy_weights, load_weights
from halfmoon.errors import Incompatible
from halfmoon.kv.kv_layout import KVLayout

BLOCK_TOKENS = 8
MODELS = (
    "llama",
    "llama-tied-biased",
    "llama-llama3-rope",
    "llama-yarn-rope",
    "llama-linear-rope",
    "llama-wide-heads",
    "mistral",
    "mistral-window",
    "phi3",
    "mixtral",
    "deepseek-v2",
    "deepseek-v3",
    "qwen2-moe",
    "qwen3-moe",
    "phi3-longrope",
    "gemma2",
    "gemma3",
    "gemma3-short",
    "qwen2-windows",
    "qwen2",
    "qwen3",
    "opt",
    "opt-norm-after",
)


def path_of(checkpoint: Checkpoint, attention: Literal["sdpa", "native"] = "native") -> DevicePath:
    config = EngineConfig(attention=attention, block_tokens=BLOCK_TOKENS)
    return choose_path(config, checkpoint.model_config, torch.float32, checkpoint.context_tokens)


def load(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32, path: DevicePath | None = None) -> Model:
    model = build_model(checkpoint.model_config, dtype, "cpu", path.layer_ops if path is not None else None)
    load_weights(model, checkpoint.weight_files)
    with torch.no_grad():
        model.pack(path.pack_weight if path is not None else pack_onednn)
    return model


def paged_logits(
    model: Model, checkpoint: Checkpoint, token_ids: list[int], cuts: Iterable[int], attention: AttentionBackend
) -> Tensor:
    """Logits of every position, [num_tokens, vocab_size]; `cuts` are the ends of the chunks."""
    config = checkpoint.model_config
    layout = KVLayout(config.num_layers, config.num_kv_heads, config.head_dim, "float32", BLOCK_TOKENS)
    blocks = [5, 6, 2, 9, 10, 11, 0, 1, 20, 19, 18, 17]  # runs of several lengths, not in order
    arena = KVArena(layout, 24, "cpu")
    arena.tensor.fill_(float("nan"))  # whoever reads a slot before it is written shows
    logits, start = [], 0
    for end in cuts:
        batch = ForwardBatch(
            token_ids=torch.tensor(token_ids[start:end]),
            positions=torch.arange(start, end),
            logit_rows=torch.arange(end - start),
            attention=attention.step([TokenSpan(blocks, start, end)]),
        )
        with torch.inference_mode():
            logits.append(model.forward(batch, arena.tensor))
        start = end
    return torch.cat(logits)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("cuts", [(80,), (30, 31, 32, 33, 77, 78, 79, 80)], ids=["one shot", "chunks and decodes"])
@pytest.mark.parametrize("attention", ["sdpa", "native"])
def test_logits_equal_transformers(
    attention: Literal["sdpa", "native"],
    name: str,
    cuts: tuple[int, ...],
    tiny_checkpoint: Callable[[str], Checkpoint],
    reference: Callable[[Checkpoint], torch.nn.Module],
) -> None:
    checkpoint = tiny_checkpoint(name)
    token_ids = torch.randint(3, 199, (80,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference(checkpoint)(token_ids[None]).logits[0]
    path = path_of(checkpoint, attention)
    got = paged_logits(load(checkpoint, path=path), checkpoint, token_ids.tolist(), cuts, path.attention)
    assert expected.std() > 0.1  # else the tolerance would mean nothing
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_close(dtype: torch.dtype, tiny_checkpoint: Callable[[str], Checkpoint]) -> None:
    checkpoint = tiny_checkpoint("llama")
    token_ids = list(range(3, 43))
    expected = paged_logits(load(checkpoint), checkpoint, token_ids, (40,), path_of(checkpoint, "sdpa").attention)
    layout = KVLayout(3, 2, 16, "float16" if dtype == torch.float16 else "bfloat16", BLOCK_TOKENS)
    arena = KVArena(layout, 8, "cpu")
    batch = ForwardBatch(
        torch.tensor(token_ids),
        torch.arange(40),
        torch.arange(40),
        AttentionBatch(torch.arange(40), (Segment(0, 40, ()),)),
    )
    with torch.inference_mode():
        got = load(checkpoint, dtype).forward(batch, arena.tensor).float()
    assert torch.nn.functional.cosine_similarity(got, expected).min() > 0.99


def test_dummy_weights_are_the_same_everywhere(tiny_checkpoint: Callable[[str], Checkpoint]) -> None:
    checkpoint = tiny_checkpoint("qwen3")
    models = [build_model(checkpoint.model_config, torch.float32, "cpu") for _ in range(2)]
    for model in models:
        fill_dummy_weights(model)
    one, two = (model.parameters() for model in models)
    assert all(torch.equal(one[name], two[name]) and one[name].isfinite().all() for name in one)
    assert one["model.layers.0.mlp.up_proj.weight"].std() > 0


@pytest.mark.parametrize(
    ("weights_of", "config_of", "message"),
    [
        ("llama", "llama-tied-biased", "lacks .* tensors: .*bias"),
        ("qwen2", "llama", r"does not know: .*[qkv]_proj.bias"),
        ("llama-wide-heads", "llama", r"k_proj.weight has shape \[64, 64\], the configuration says \[32, 64\]"),
        ("opt", "llama", "does not know: model.decoder"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    weights_of: str, config_of: str, message: str, tiny_checkpoint: Callable[[str], Checkpoint]
) -> None:
    model = build_model(tiny_checkpoint(config_of).model_config, torch.float32, "cpu")
    with pytest.raises(Incompatible, match=message):
        load_weights(model, tiny_checkpoint(weights_of).weight_files)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.bool, torch.float8_e4m3fn])
def test_numbers_that_are_no_plain_weights_are_refused(
    dtype: torch.dtype, tmp_path: Path, tiny_checkpoint: Callable[[str], Checkpoint]
) -> None:
    checkpoint = tiny_checkpoint("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    weights = load_file(checkpoint.weight_files[0])
    save_file({**weights, name: weights[name].to(dtype)}, tmp_path / "model.safetensors")
    model = build_model(checkpoint.model_config, torch.float32, "cpu")
    with pytest.raises(Incompatible, match=rf"tensor {name} is of dtype \w+; supported: F64, F32, F16, BF16"):
        load_weights(model, [tmp_path / "model.safetensors"])


def test_layers_that_predict_further_tokens_are_ignored(
    tmp_path: Path, tiny_checkpoint: Callable[[str], Checkpoint]
) -> None:
    path = tmp_path / "mtp"
    shutil.copytree(tiny_checkpoint("deepseek-v3").path, path)
    save_file({"model.layers.3.enorm.weight": torch.ones(64)}, path / "further.safetensors")
    files = [path / "model.safetensors", path / "further.safetensors"]
    model_config = tiny_checkpoint("deepseek-v3").model_config
    load_weights(build_model(replace(model_config, num_prediction_layers=1), torch.float32, "cpu"), files)
    with pytest.raises(Incompatible, match=r"does not know: model.layers.3.enorm"):
        load_weights(build_model(replace(model_config, num_prediction_layers=0), torch.float32, "cpu"), files)


def test_loading_tells_its_progress(tiny_checkpoint: Callable[[str], Checkpoint]) -> None:
    checkpoint = tiny_checkpoint("llama")
    seen: list[tuple[int, int]] = []
    load_weights(
        build_model(checkpoint.model_config, torch.float32, "cpu"),
        checkpoint.weight_files,
        lambda done, total: seen.append((done, total)),
    )
    done, totals = zip(*seen, strict=True)
    assert list(done) == sorted(done)
    assert set(totals) == {checkpoint.weight_files[0].stat().st_size}
    assert done[-1] > 0.8 * totals[0]


def test_the_rotary_tables_are_those_of_any_processor(tiny_checkpoint: Callable[[str], Checkpoint]) -> None:
    """Cosines and sines in float32 differ in their last bits: prefill and decode may run on different processors."""
    config = tiny_checkpoint("llama").model_config
    frequencies = 1.0 / config.rope_theta ** (torch.arange(0, config.rotary_size, 2) / config.rotary_size)
    angles = torch.outer(torch.arange(config.context_tokens).float(), frequencies)
    for got, function in zip(Rotary(config, torch.float32, "cpu").halves(), (math.cos, math.sin), strict=True):
        assert torch.equal(got, torch.tensor([[function(angle) for angle in row] for row in angles.tolist()]))


@pytest.mark.parametrize(
    ("vocab_size", "hidden_size", "device"), [(1 << 30, 1 << 20, "cpu"), (1 << 31, 1 << 31, "meta")]
)
def test_a_model_that_no_memory_holds_is_refused(
    vocab_size: int, hidden_size: int, device: str, tiny_checkpoint: Callable[[str], Checkpoint]
) -> None:
    config = replace(tiny_checkpoint("llama").model_config, vocab_size=vocab_size, hidden_size=hidden_size)
    with pytest.raises(Incompatible, match=r"no memory for the model of \d+ layers, .* MiB are free: if its config.js"):
        build_model(config, torch.float32, device)


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"max_context_tokens": 96}, 96),
        ({"max_context_tokens": None}, 128),
        ({"tensor_parallel": 2}, 128),
        ({"sequence_parallel": 2}, 128),
    ],
)
def test_rotary_tables_are_as_long_as_a_worker_lets_sequences_be(
    options: dict[str, Any], most: int, tiny_checkpoint: Callable[[str], Checkpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not as the model would: a million tokens took seconds and 256 MB. Without memory nothing is made at all."""
    config = tiny_checkpoint("llama").model_config
    endless = replace(config, context_tokens=1 << 40)
    build_model(endless, torch.float32, "meta")
    lengths: list[int] = []

    class Measured(Rotary):
        def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
            super().__init__(config, dtype, device)
            lengths.append(len(self.halves()[0]))

    monkeypatch.setattr(llama, "Rotary", Measured)
    checkpoint = replace(tiny_checkpoint("llama"), config=endless, context_tokens=1 << 40)
    engine = Engine(checkpoint, EngineConfig(dtype="float32", num_blocks=8, block_tokens=16, **options))
    assert set(lengths) == {most} == {engine.context_tokens}
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["gelu", "gelu_new"])
@pytest.mark.parametrize("width", [1, 31, 96, 100, 2050])
def test_an_activation_depends_on_no_other_row(
    name: Literal["gelu", "gelu_new"], width: int, dtype: torch.dtype
) -> None:
    activation = opt._activation(name)
    rows = torch.randn(9, width, generator=torch.Generator().manual_seed(0)).to(dtype) * 2
    alone = torch.cat([activation(row[None]) for row in rows])
    assert torch.equal(activation(rows), alone)
    torch.testing.assert_close(alone, functional.gelu(rows, approximate="none" if name == "gelu" else "tanh"))
