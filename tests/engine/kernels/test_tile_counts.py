"""Counts of tiles and padded sizes are Triton's."""

from __future__ import annotations

import pytest

from halfmoon.engine.kernels.tile_counts import num_tiles, padded

triton = pytest.importorskip("triton", reason="triton is missing (extra `gpu`)")


def test_they_are_those_of_triton() -> None:
    for size in (*range(1, 70), 4095, 4096, 4097, (1 << 40) + 1):
        assert padded(size) == triton.next_power_of_2(size)
        assert [num_tiles(size, tile) for tile in (1, 16, 32)] == [triton.cdiv(size, tile) for tile in (1, 16, 32)]
    assert num_tiles(0, 16) == 0
