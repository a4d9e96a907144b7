"""Every layer and head has its rank, and what cannot be dealt out is refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from halfmoon.architectures.model_config import ModelConfig
from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.models import Model, build_model
from halfmoon.engine.models.model_part import ModelPart
from halfmoon.engine.models.weights import fill_dummy_weights, load_weights
from halfmoon.engine.parallel.grid import Grid
from halfmoon.engine.parallel.runner import ParallelRunner
from halfmoon.engine.parallel.weights import fill_dummy_part, load_part
from halfmoon.errors import Incompatible
from halfmoon.kv.kv_layout import KVLayout

Tiny = Callable[[str], Checkpoint]


def model_config(num_layers: int, num_heads: int, num_kv_heads: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        family="llama",
        vocab_size=101,
        hidden_size=num_heads * 4,
        intermediate_size=num_heads * 8,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=4,
        max_positions=64,
        context_tokens=64,
        activation="silu",
    )


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (4, 1), (8, 1), (1, 3), (2, 3), (8, 7)])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_each_head_of_each_layer_is_held_and_read_once(tensor: int, pipeline: int, num_kv_heads: int) -> None:
    config, grid = model_config(7, 8, num_kv_heads), Grid(tensor, pipeline)
    grid.check(config)
    held: Counter[tuple[int, int]] = Counter()
    read: Counter[tuple[int, int]] = Counter()
    for rank in grid.ranks:
        shard = grid.shard(config, rank)
        cells = [
            (layer, head)
            for layer in range(shard.layer_start, shard.layer_end)
            for head in range(shard.head_start, shard.head_end)
        ]
        held.update(cells)
        if grid.is_first_holder(config, rank):
            read.update(cells)
    cells = [(layer, head) for layer in range(7) for head in range(num_kv_heads)]
    assert read == Counter(cells)
    assert held == Counter({cell: max(tensor // num_kv_heads, 1) for cell in cells})


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_query_heads_lie_where_their_kv_head_is(num_kv_heads: int) -> None:
    config, grid = model_config(1, 8, num_kv_heads), Grid(4, 1)
    for rank in grid.ranks:
        part = ModelPart(config, grid.shard(config, rank), rank, 4)
        kv_heads = {head * num_kv_heads // 8 for head in range(2 * rank, 2 * rank + 2)}
        assert kv_heads == set(range(part.shard.head_start, part.shard.head_end))


@pytest.mark.parametrize(("num_layers", "pipeline", "expected"), [(7, 3, [3, 2, 2]), (4, 4, [1] * 4), (5, 1, [5])])
def test_layers_are_dealt_out_in_order(num_layers: int, pipeline: int, expected: list[int]) -> None:
    grid, config = Grid(2, pipeline), model_config(num_layers, 8, 8)
    shards = [grid.shard(config, rank) for rank in grid.ranks if grid.tensor_rank(rank) == 1]
    assert [shard.layer_end - shard.layer_start for shard in shards] == expected
    assert all(one.layer_end == two.layer_start for one, two in pairwise(shards))


@pytest.mark.parametrize(
    ("tensor", "pipeline", "config", "message"),
    [
        (3, 1, model_config(4, 8, 8), "3 does not divide the model's 8 attention heads"),
        (2, 1, replace(model_config(4, 8, 8), intermediate_size=65), "2 does not divide the model's 65 inner units"),
        (4, 1, model_config(4, 12, 6), "4 neither divides the model's 6 key-value heads nor"),
        (1, 5, model_config(4, 8, 8), "5 exceeds the model's 4 layers"),
    ],
)
def test_what_cannot_be_dealt_out_is_refused(tensor: int, pipeline: int, config: ModelConfig, message: str) -> None:
    with pytest.raises(Incompatible, match=message):
        Grid(tensor, pipeline).check(config)


def test_an_engine_refuses_before_it_starts_a_process(tiny_checkpoint: Tiny) -> None:
    layout = KVLayout(3, 2, 16, "float32", 8)
    for config, message in (
        (EngineConfig(num_blocks=4, tensor_parallel=3), "attention heads"),
        (EngineConfig(num_blocks=4, pipeline_parallel=4), "layers"),
        (EngineConfig(dtype="float32", kv_memory_bytes=2 * 1023, pipeline_parallel=2), "does not hold one block"),
    ):
        with pytest.raises(Incompatible, match=message):
            ParallelRunner(tiny_checkpoint("llama"), config, layout)
    with pytest.raises(Incompatible, match="pipeline_parallel must be at least 1"):
        EngineConfig(pipeline_parallel=0)


def parts_of(checkpoint: Checkpoint, grid: Grid) -> list[tuple[ModelPart, Model]]:
    config = checkpoint.model_config
    found = []
    for rank in grid.ranks:
        reduce = None if grid.tensor_size == 1 else torch.Tensor.clone  # never called: nothing is computed here
        part = ModelPart(config, grid.shard(config, rank), grid.tensor_rank(rank), grid.tensor_size, reduce)
        found.append((part, build_model(config, torch.float32, "cpu", part=part)))
    return found


MODELS = (
    "llama",
    "llama-tied-biased",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma2",
    "mixtral",
    "qwen2-moe",
    "deepseek-v2",
    "deepseek-v3",
    "opt",
    "opt-norm-after",
)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("grid", [Grid(2, 1), Grid(1, 3), Grid(4, 2)], ids=str)
@pytest.mark.parametrize("weights", ["checkpoint", "dummy"])
def test_the_parts_are_slices_of_the_whole_and_cover_it(
    name: str, grid: Grid, weights: str, tiny_checkpoint: Tiny
) -> None:
    checkpoint = tiny_checkpoint(name)
    model = build_model(checkpoint.model_config, torch.float32, "cpu")
    if weights == "dummy":
        fill_dummy_weights(model)
    else:
        load_weights(model, checkpoint.weight_files)
    whole = model.parameters()
    covered = {key: torch.zeros_like(view, dtype=torch.bool) for key, view in whole.items()}
    for part, piece in parts_of(checkpoint, grid):
        if weights == "dummy":
            fill_dummy_part(piece, part)
        else:
            load_part(piece, part, checkpoint.weight_files)
        for key, view in piece.parameters().items():
            pieces = part.pieces(key)
            if not pieces:
                assert not view.any(), key
                continue
            assert torch.equal(view, torch.cat([whole[key][where] for where in pieces])), key
            for where in pieces:
                covered[key][where] = True
    assert [key for key, mask in covered.items() if not mask.all()] == []


class SpyFile:
    """A safetensors file that notes how many bytes were read from it."""

    def __init__(self, file: str, framework: str) -> None:
        self._open: Any = safe_open(file, framework=framework)
        self.read_bytes = 0

    def __enter__(self) -> SpyFile:
        self._tensors = self._open.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.__exit__(*error)

    def keys(self) -> list[str]:
        return list(self._tensors.keys())

    def get_slice(self, name: str) -> SpySlice:
        return SpySlice(self, self._tensors.get_slice(name))


class SpySlice:
    def __init__(self, file: SpyFile, tensor: Any) -> None:
        self._file = file
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.get_shape())

    def get_dtype(self) -> str:
        return str(self._tensor.get_dtype())

    def __getitem__(self, where: tuple[slice, ...]) -> torch.Tensor:
        piece: torch.Tensor = self._tensor[where]
        self._file.read_bytes += piece.nbytes
        return piece


def test_a_rank_reads_its_own_bytes_only(tiny_checkpoint: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = tiny_checkpoint("llama")
    files: list[SpyFile] = []

    def spy(file: str, framework: str) -> SpyFile:
        files.append(SpyFile(file, framework))
        return files[-1]

    monkeypatch.setattr("halfmoon.engine.parallel.weights.safe_open", spy)
    whole_bytes = sum(file.stat().st_size for file in checkpoint.weight_files)
    for part, model in parts_of(checkpoint, Grid(2, 3)):
        told: dict[int, int] = {}
        load_part(model, part, checkpoint.weight_files, told.__setitem__)
        own_bytes = sum(view.nbytes for view in model.parameters().values())
        assert files[-1].read_bytes == own_bytes < whole_bytes / 2
        assert told[own_bytes] == own_bytes


@pytest.mark.parametrize(
    ("weights_of", "config_of", "message"),
    [
        ("llama", "llama-tied-biased", "lacks .* tensors: .*bias"),
        ("qwen2", "llama", r"does not know: .*[qkv]_proj.bias"),
        ("llama-wide-heads", "llama", r"k_proj.weight has shape \[64, 64\], the configuration says \[32, 64\]"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    weights_of: str, config_of: str, message: str, tiny_checkpoint: Tiny
) -> None:
    part, model = parts_of(tiny_checkpoint(config_of), Grid(2, 1))[1]
    with pytest.raises(Incompatible, match=message):
        load_part(model, part, tiny_checkpoint(weights_of).weight_files)


def test_a_rank_refuses_numbers_that_are_no_plain_weights(tmp_path: Path, tiny_checkpoint: Tiny) -> None:
    checkpoint = tiny_checkpoint("llama")
    weights = load_file(checkpoint.weight_files[0])
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"].to(torch.int8)
    save_file(weights, tmp_path / "model.safetensors")
    part, model = parts_of(checkpoint, Grid(2, 1))[1]
    with pytest.raises(Incompatible, match="is of dtype I8; supported: F64"):
        load_part(model, part, [tmp_path / "model.safetensors"])
