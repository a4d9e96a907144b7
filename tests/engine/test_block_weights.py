"""Weights in blocks, and rounded ones: near the numbers, small in memory, and refused by name where they cannot be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from halfmoon.engine.checkpoint.checkpoint import Checkpoint, Quantization, prepare_checkpoint
from halfmoon.engine.checkpoint.convert_gguf import convert_gguf
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.device_path import keeps_blocks, pack
from halfmoon.engine.engine import Engine
from halfmoon.engine.models import Model, build_model
from halfmoon.engine.models.blocks import BLOCK_SIZES, BlockFormat, Blocks, quantised
from halfmoon.engine.models.model_part import ModelPart
from halfmoon.engine.models.weights import load_weights
from halfmoon.engine.native.block_kernels import PackedBlocks
from halfmoon.engine.parallel.grid import Grid
from halfmoon.engine.parallel.weights import load_part
from halfmoon.errors import Incompatible
from tests.engine.gguf_files import write_gguf
from tests.engine.test_models import paged_logits, path_of

MIXED: dict[str, BlockFormat] = {
    "attn_q": "Q4_K",
    "attn_k": "Q4_K",
    "attn_v": "Q6_K",
    "attn_output": "Q4_1",
    "ffn_gate": "Q4_0",
    "ffn_down": "Q6_K",  # ffn_up is in numbers
    "token_embd": "Q8_0",
}
OTHERS: dict[str, BlockFormat] = {
    "attn_q": "Q5_K",
    "attn_k": "Q5_1",
    "attn_v": "IQ4_XS",
    "attn_output": "Q5_0",
    "ffn_gate": "IQ4_NL",
    "ffn_down": "Q3_K",
    "token_embd": "Q5_K",
}
TOKENS = [3, 7, 1, 20, 5, 5, 9, 11, 0, 2, 30, 31, 4]


@pytest.fixture(autouse=True)
def _convert_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a process that loads transformers for each file; those of the tests of the conversion have one."""
    monkeypatch.setattr("halfmoon.engine.checkpoint.converted._convert", convert_gguf)


def gguf(path: Path, formats: Mapping[str, BlockFormat], quantization: Quantization = "auto") -> Checkpoint:
    file = path / "tiny.gguf"
    if not file.exists():
        write_gguf(file, 256, formats, num_layers=2)
    return prepare_checkpoint(str(file), path / "cache", quantization=quantization)


def packed_model(checkpoint: Checkpoint) -> Model:
    path = path_of(checkpoint)
    model = build_model(checkpoint.model_config, torch.float32, "cpu", path.layer_ops)
    as_numbers = not keeps_blocks(checkpoint, path)
    load_weights(model, checkpoint.weight_files, blocks=checkpoint.block_file, as_numbers=as_numbers)
    pack(model, path, checkpoint.quantization)
    return model


def logits(checkpoint: Checkpoint) -> Tensor:
    path = path_of(checkpoint)
    return paged_logits(packed_model(checkpoint), checkpoint, TOKENS, [len(TOKENS)], path.attention)


def distance(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("mix", [MIXED, OTHERS], ids=["mixed", "others"])
@pytest.mark.parametrize("own_head", [False, True])
def test_a_gguf_file_computes_in_its_blocks_what_its_numbers_do(
    mix: dict[str, BlockFormat], own_head: bool, tmp_path: Path
) -> None:
    head: dict[str, BlockFormat] = {"output": "Q6_K", "token_embd": "Q4_K"}
    formats = mix | (head if own_head else {})
    blocks, plain = gguf(tmp_path, formats), gguf(tmp_path, formats, "none")
    assert blocks.block_file is not None
    with safe_open(blocks.block_file, framework="numpy") as kept:
        assert set(kept.metadata().values()) == set(formats.values())
    assert blocks.fingerprint == plain.fingerprint  # the same weights
    assert 0 < distance(logits(blocks), logits(plain)) < 0.03


@pytest.mark.parametrize("name", ["llama", "llama-tied-biased", "qwen3", "opt"])
@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.06), ("int4", 0.5)])
def test_rounded_weights_are_near_the_checkpoint_s(
    name: str, quantization: Quantization, most: float, tiny_checkpoint: Callable[[str], Checkpoint]
) -> None:
    checkpoint = tiny_checkpoint(name)
    rounded = prepare_checkpoint(str(checkpoint.path), quantization=quantization)
    assert 0 < distance(logits(rounded), logits(checkpoint)) < most


def test_rounded_weights_are_another_model(tiny_checkpoint: Callable[[str], Checkpoint]) -> None:
    path = str(tiny_checkpoint("llama").path)
    prints = {name: prepare_checkpoint(path, quantization=name).fingerprint for name in get_args(Quantization)}
    assert prints["auto"] == prints["none"]
    assert len(set(prints.values())) == 3


@pytest.mark.parametrize("block_format", ["Q8_0", "Q4_1"])
def test_numbers_are_rounded_to_the_nearest(block_format: Any) -> None:
    from gguf import GGMLQuantizationType, dequantize

    weight = torch.randn(7, 96, generator=torch.Generator().manual_seed(1))
    weight[0, :32], weight[1, :32] = 0, 3  # no spread
    blocks = quantised(weight, block_format)
    assert blocks is not None
    again = torch.from_numpy(dequantize(blocks.data.numpy(), GGMLQuantizationType[block_format])).view(7, 3, 32)
    groups = weight.view(7, 3, 32)
    spread = groups.abs().amax(-1) / 127 if block_format == "Q8_0" else (groups.amax(-1) - groups.amin(-1)) / 15
    assert ((again - groups).abs().amax(-1) <= spread * 0.51 + 2e-3).all()
    assert quantised(weight[:, :40], block_format) is None


def test_blocks_take_the_place_of_numbers_in_memory(tmp_path: Path) -> None:
    formats: dict[str, BlockFormat] = dict.fromkeys([*MIXED, "ffn_up"], "Q4_0")
    model: Any = packed_model(gguf(tmp_path, formats))
    assert sum(view.nbytes for name, view in model.parameters().items() if "norm" not in name) == 0
    head, table = model._head._multiply, model._embedding._rows
    assert isinstance(head, PackedBlocks)
    assert table is head  # one table, for both ends
    for layer in model._layers:
        for linear, sizes in layer._matrices:
            assert linear._multiply.num_bytes == sum(sizes.values()) * linear._multiply.shape[1] // 32 * 18


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_other_kernels_than_ours_are_refused_by_name(
    quantization: Quantization, tiny_checkpoint: Callable[[str], Checkpoint]
) -> None:
    rounded = prepare_checkpoint(str(tiny_checkpoint("llama").path), quantization=quantization)
    with pytest.raises(Incompatible, match=f"--quantization {quantization} needs our CPU kernels"):
        Engine(rounded, EngineConfig(dtype="float32", attention="sdpa", num_blocks=4))


@pytest.mark.parametrize("grid", [Grid(1, 1), Grid(2, 1), Grid(1, 2)], ids=["whole", "tensor", "stages"])
def test_kernels_that_do_not_multiply_with_blocks_have_the_numbers(grid: Grid, tmp_path: Path) -> None:
    """Those that other engines read, of which a rank has its slices; also where ranks could not divide blocks."""
    checkpoint = gguf(tmp_path, MIXED)
    assert not keeps_blocks(checkpoint, path_of(checkpoint, "sdpa"))
    assert not keeps_blocks(gguf(tmp_path, MIXED, "none"), path_of(checkpoint))
    numbers = prepare_checkpoint(str(tmp_path / "tiny.gguf"), tmp_path / "cache", as_numbers=True)
    for (part, model), (_, expected) in zip(parts_of(checkpoint, grid), parts_of(checkpoint, grid), strict=True):
        load_part(model, part, checkpoint.weight_files, blocks=checkpoint.block_file, as_numbers=True)
        load_part(expected, part, numbers.weight_files)
        views = expected.parameters()
        assert model.parameters().keys() == views.keys()
        assert all(torch.equal(view, views[name]) for name, view in model.parameters().items())
    (_, whole), (_, expected) = parts_of(checkpoint, Grid(1, 1)) * 2
    load_weights(whole, checkpoint.weight_files, blocks=checkpoint.block_file, as_numbers=True)
    load_weights(expected, numbers.weight_files)
    views = expected.parameters()
    assert all(torch.equal(view, views[name]) for name, view in whole.parameters().items())


def test_a_checkpoint_with_both_is_read_once(tmp_path: Path) -> None:
    gguf(tmp_path, MIXED)
    both = prepare_checkpoint(str(tmp_path / "tiny.gguf"), tmp_path / "cache", as_numbers=True)
    assert torch.equal(logits(both), logits(gguf(tmp_path, MIXED)))


@pytest.mark.parametrize("as_numbers", [False, True])
@pytest.mark.parametrize("with_both", [False, True])
def test_loading_tells_of_what_is_read(with_both: bool, as_numbers: bool, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", 256, MIXED)
    checkpoint = prepare_checkpoint(str(tmp_path / "tiny.gguf"), tmp_path / "cache", as_numbers=with_both)
    model = build_model(checkpoint.model_config, torch.float32, "cpu", path_of(checkpoint).layer_ops)
    seen: list[tuple[int, int]] = []
    load_weights(
        model,
        checkpoint.weight_files,
        lambda done, total: seen.append((done, total)),
        checkpoint.block_file,
        as_numbers=as_numbers,
    )
    done, totals = zip(*seen, strict=True)
    assert list(done) == sorted(done)
    assert len(set(totals)) == 1
    assert 0.95 * totals[0] < done[-1] <= totals[0]


def parts_of(checkpoint: Checkpoint, grid: Grid) -> list[tuple[ModelPart, Model]]:
    config = checkpoint.model_config
    parts = [ModelPart(config, grid.shard(config, r), grid.tensor_rank(r), grid.tensor_size) for r in grid.ranks]
    return [(part, build_model(config, torch.float32, "cpu", part=part)) for part in parts]


def test_ranks_have_slices_of_the_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = gguf(tmp_path, dict.fromkeys([*MIXED, "ffn_up"], "Q4_1"))
    whole = {name: blocks.data for name, blocks in given_blocks(checkpoint, Grid(1, 1), monkeypatch)}
    size, num_bytes = BLOCK_SIZES["Q4_1"]
    for (name, piece), (part, _) in zip(
        given_blocks(checkpoint, Grid(2, 1), monkeypatch),
        [pair for pair in parts_of(checkpoint, Grid(2, 1)) for _ in whole],
        strict=True,
    ):
        rows, inputs = (*(part.slices(name) or ()), slice(None))[:2]
        start, end, _ = inputs.indices(piece.shape[1] * (2 if inputs != slice(None) else 1))
        assert torch.equal(piece.data, whole[name][rows, start // size * num_bytes : end // size * num_bytes]), name


def given_blocks(checkpoint: Checkpoint, grid: Grid, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Blocks]]:
    """What each rank's model is given, rank after rank."""
    given: list[tuple[str, Blocks]] = []
    for part, model in parts_of(checkpoint, grid):
        put = model.put_blocks

        def note(name: str, blocks: Blocks, put: Callable[[str, Blocks], bool] = put) -> bool:
            given.append((name, blocks))
            return put(name, blocks)

        monkeypatch.setattr(model, "put_blocks", note)
        load_part(model, part, checkpoint.weight_files, blocks=checkpoint.block_file)
    return given


def test_blocks_that_ranks_cannot_divide_are_refused_by_name(tmp_path: Path) -> None:
    checkpoint = gguf(tmp_path, {"attn_output": "Q4_K"})
    part, model = parts_of(checkpoint, Grid(2, 1))[1]
    with pytest.raises(Incompatible, match=r"o_proj.weight is stored in Q4_K blocks of 256 .* 2 ranks cannot divide"):
        load_part(model, part, checkpoint.weight_files, blocks=checkpoint.block_file)


def test_blocks_of_another_shape_are_refused_by_name(tmp_path: Path) -> None:
    checkpoint = gguf(tmp_path, {"attn_output": "Q4_0"})
    other = prepare_checkpoint(
        str(write_gguf(tmp_path / "other.gguf", 64, {"attn_output": "Q4_0"})), tmp_path / "cache"
    )
    model = build_model(checkpoint.model_config, torch.float32, "cpu")
    with pytest.raises(Incompatible, match=r"o_proj.weight has shape \[64, 64\], the configuration says \[256, 256\]"):
        load_weights(model, checkpoint.weight_files, blocks=other.block_file)


@pytest.mark.parametrize("formats", [MIXED, dict.fromkeys([*MIXED, "ffn_up"], "Q4_1")], ids=["mixed", "Q4_1"])
def test_two_ranks_compute_what_one_does(formats: dict[str, BlockFormat], tmp_path: Path) -> None:
    del formats["attn_output"]
    checkpoint = gguf(tmp_path, {**formats, "ffn_down": "Q4_1"})
    one, two = (
        generated(Engine(checkpoint, EngineConfig(dtype="float32", num_blocks=16, tensor_parallel=size)))
        for size in (1, 2)
    )
    assert one == two


def generated(engine: Engine) -> list[int]:
    from halfmoon.engine.request import EngineRequest, SamplingParams
    from tests.engine.engine_runs import finish, tokens

    engine.add(EngineRequest("a", tuple(TOKENS), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)))
    try:
        return tokens(finish(engine))
    finally:
        engine.close()
