"""The layout's arithmetic, and what it refuses."""

from __future__ import annotations

import math

import pytest

from halfmoon.errors import Incompatible
from halfmoon.kv.kv_layout import KVLayout, Shard

SMOLLM2 = KVLayout(30, 3, 64, "bfloat16", 64)


def test_sizes_of_a_known_model() -> None:
    assert SMOLLM2.item_bytes == 2
    assert SMOLLM2.token_layer_bytes == 2 * 3 * 64 * 2
    assert SMOLLM2.token_bytes == 23_040
    assert SMOLLM2.block_bytes == 64 * 23_040
    assert math.prod(SMOLLM2.shape(SMOLLM2.num_layers, 64)) * SMOLLM2.item_bytes == SMOLLM2.block_bytes


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (64, 1), (65, 2), (128, 2)])
def test_a_part_filled_block_counts(tokens: int, blocks: int) -> None:
    assert SMOLLM2.num_blocks(tokens) == blocks


def test_fingerprint_is_pinned_and_names_every_field() -> None:
    assert SMOLLM2.fingerprint() == 0xD86ECF01E0DD7B3B
    others = [
        KVLayout(31, 3, 64, "bfloat16", 64),
        KVLayout(30, 4, 64, "bfloat16", 64),
        KVLayout(30, 3, 32, "bfloat16", 64),
        KVLayout(30, 3, 64, "float16", 64),
        KVLayout(30, 3, 64, "bfloat16", 32),
    ]
    assert len({layout.fingerprint() for layout in (SMOLLM2, *others)}) == 6


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "block_tokens"])
def test_empty_dimensions_are_refused_by_name(name: str) -> None:
    fields: dict[str, int] = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "block_tokens": 1, name: 0}
    with pytest.raises(Incompatible) as caught:
        KVLayout(dtype="float32", **fields)
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads"])
def test_what_a_frame_header_cannot_name_is_refused(name: str) -> None:
    fields: dict[str, int] = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, name: 1 << 16}
    with pytest.raises(Incompatible) as caught:
        KVLayout(dtype="float32", **fields)
    assert caught.value.param == name


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(Incompatible) as caught:
        KVLayout(1, 1, 1, "int3")  # type: ignore[arg-type]
    assert caught.value.param == "dtype"


def test_the_whole_is_a_shard_of_its_layout() -> None:
    assert SMOLLM2.whole() == Shard(0, 30, 0, 3)
