"""A model whose packed weights are mapped computes the bits of one that is packed."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from halfmoon.engine import assembly
from halfmoon.engine.checkpoint.checkpoint import Checkpoint, Quantization, prepare_checkpoint
from halfmoon.engine.config import EngineConfig
from halfmoon.engine.device_path import keeps_blocks, pack, weights_place
from halfmoon.engine.engine import Engine
from halfmoon.engine.models import Model, build_model
from halfmoon.engine.models.blocks import BlockFormat
from halfmoon.engine.models.model_part import ModelPart
from halfmoon.engine.models.weights import load_block_shapes, load_weights
from halfmoon.engine.native.prepared_model import ModelSteps, ready_model
from halfmoon.engine.parallel.grid import Grid
from halfmoon.engine.parallel.weights import load_part, load_part_shapes
from tests.engine.engine_runs import generate, request
from tests.engine.test_block_weights import MIXED, TOKENS, gguf
from tests.engine.test_models import paged_logits, path_of

# Of norms with an offset, latents, experts, matrices fused in the checkpoint, biases, tied heads and learned positions.
MODELS = ("llama", "llama-tied-biased", "mixtral", "deepseek-v3", "gemma3", "phi3", "opt")


class Loads:
    """Makes models through a directory, and counts how often weights were read and packed."""

    def __init__(self, checkpoint: Checkpoint, directory: Path, part: ModelPart | None = None) -> None:
        self.count = 0
        self._checkpoint, self._part, self._directory = checkpoint, part, directory

    def _load(self, model: Model) -> None:
        self.count += 1
        checkpoint, path = self._checkpoint, path_of(self._checkpoint)
        blocks, as_numbers = checkpoint.block_file, not keeps_blocks(checkpoint, path)
        if self._part is None:
            load_weights(model, checkpoint.weight_files, blocks=blocks, as_numbers=as_numbers)
        else:
            load_part(model, self._part, checkpoint.weight_files, blocks=blocks, as_numbers=as_numbers)

    @torch.no_grad()
    def model(self, *, is_kept: bool = True) -> Model:
        checkpoint, part, path = self._checkpoint, self._part, path_of(self._checkpoint)
        blocks = checkpoint.block_file if keeps_blocks(checkpoint, path) else None

        def load_shapes(model: Model) -> None:
            if part is None:
                load_block_shapes(model, blocks)
            else:
                load_part_shapes(model, part, blocks)

        steps = ModelSteps(
            partial(build_model, checkpoint.model_config, torch.float32, "cpu", path.layer_ops, part),
            self._load,
            load_shapes,
            lambda model, wrap: pack(model, path, checkpoint.quantization, wrap),
        )
        config = EngineConfig(prepared_weights=self._directory if is_kept else None)
        return ready_model(steps, weights_place(config, checkpoint, path, torch.float32, part))

    def logits(self, model: Model) -> Tensor:
        return paged_logits(model, self._checkpoint, TOKENS, [8, 13], path_of(self._checkpoint).attention)


def check_mapped(loads: Loads) -> None:
    expected = loads.logits(loads.model(is_kept=False))
    first, second = loads.model(), loads.model()
    assert loads.count == 2  # without a file, and for the file
    assert torch.equal(loads.logits(first), expected)
    assert torch.equal(loads.logits(second), expected)


@pytest.mark.parametrize("name", MODELS)
def test_a_mapped_model_computes_the_same_bits(
    name: str, tiny_checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    check_mapped(Loads(tiny_checkpoint(name), tmp_path / "prepared"))


def test_what_loading_took_is_given_back(
    tiny_checkpoint: Callable[[str], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[int] = []
    loads = Loads(tiny_checkpoint("llama"), tmp_path / "prepared")
    give_back = "halfmoon.engine.native.prepared_model.give_back_freed_memory"
    monkeypatch.setattr(give_back, lambda: given_back.append(loads.count))
    for is_kept in (False, True):
        loads.model(is_kept=is_kept)
    assert given_back == [1, 2]  # each after the weights were read


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_rounded_weights_are_mapped(
    quantization: Quantization, tiny_checkpoint: Callable[[str], Checkpoint], tmp_path: Path
) -> None:
    checkpoint = prepare_checkpoint(str(tiny_checkpoint("qwen3").path), quantization=quantization)
    check_mapped(Loads(checkpoint, tmp_path / "prepared"))


@pytest.mark.parametrize("own_head", [False, True])
def test_blocks_are_mapped(own_head: bool, tmp_path: Path) -> None:
    head: dict[str, BlockFormat] = {"output": "Q6_K", "token_embd": "Q4_K"} if own_head else {}
    check_mapped(Loads(gguf(tmp_path, MIXED | head), tmp_path / "prepared"))


def test_every_rank_has_a_file_of_its_own(tmp_path: Path) -> None:
    formats: dict[str, BlockFormat] = dict.fromkeys([*MIXED, "ffn_up"], "Q8_0")
    checkpoint = gguf(tmp_path, formats)
    config, grid = checkpoint.model_config, Grid(2, 1)
    for rank in range(2):
        part = ModelPart(config, grid.shard(config, rank), rank, 2, lambda x: x)
        loads = Loads(checkpoint, tmp_path / "prepared", part)
        first, second = loads.model(), loads.model()
        assert loads.count == 1
        x = torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(1))
        for one, other in zip(matrices(first), matrices(second), strict=True):
            assert torch.equal(one(x[:, : one.packed.shape[1]]), other(x[:, : one.packed.shape[1]]))
    assert len(list((tmp_path / "prepared").glob("*.weights"))) == 2


def matrices(model: Any) -> list[Any]:
    return [matrix for layer in model._layers for matrix, _ in layer._matrices if matrix.packed.shape[1] <= 256]


def test_changed_weights_are_packed_again(tiny_checkpoint: Callable[[str], Checkpoint], tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama")
    loads = Loads(checkpoint, tmp_path / "prepared")
    loads.model()
    (file,) = checkpoint.weight_files
    os.utime(file, (1, 1))
    loads.model()
    assert loads.count == 2


def test_a_file_of_another_model_under_the_same_name_is_not_used(
    tiny_checkpoint: Callable[[str], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("halfmoon.engine.native.prepared_model._weights_key", lambda *_: "same")
    one, other = (Loads(tiny_checkpoint(name), tmp_path / "prepared") for name in ("llama", "qwen3"))
    expected = other.logits(other.model(is_kept=False))
    one.model()
    assert torch.equal(other.logits(other.model()), expected)


def test_without_a_place_a_model_is_packed_as_ever(
    tiny_checkpoint: Callable[[str], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.chmod(0o755)
    refused = Loads(tiny_checkpoint("llama"), tmp_path)  # others may enter it
    expected = refused.logits(refused.model(is_kept=False))
    assert torch.equal(refused.logits(refused.model()), expected)

    def full(*_: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("halfmoon.engine.native.weight_file.os.fsync", full)
    loads = Loads(tiny_checkpoint("llama"), tmp_path / "prepared")
    assert torch.equal(loads.logits(loads.model()), expected)
    assert list((tmp_path / "prepared").glob("*.weights")) == []


def test_an_engine_starts_without_reading_the_checkpoint_s_weights(
    tiny_checkpoint: Callable[[str], Checkpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = tiny_checkpoint("llama")
    config = EngineConfig(dtype="float32", num_blocks=8, prepared_weights=tmp_path / "prepared")
    expected = generate(Engine(checkpoint, config), request())

    def unread(*_: Any) -> None:
        raise AssertionError("read again")

    monkeypatch.setattr(assembly, "load_weights", unread)
    assert generate(Engine(checkpoint, config), request()) == expected
