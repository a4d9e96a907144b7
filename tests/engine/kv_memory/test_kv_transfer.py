"""KV through the copy kernels is, byte for byte, KV through the arena's own views."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from halfmoon.engine.kv_memory.kv_arena import KVArena
from halfmoon.errors import Incompatible, InvalidRequest
from halfmoon.kv.device_bytes import DeviceBytes
from halfmoon.kv.kv_layout import KVDtype, KVLayout, KVSlice

pytest.importorskip("triton", reason="triton is missing (extra `gpu`)")
from tests.engine.kernels.conftest import HAS_GPU  # isort: skip  (chooses the interpreter where there is no GPU)
from halfmoon.engine.kernels.block_copy import gather_blocks, scatter_blocks  # isort: skip
from halfmoon.engine.kv_memory import kv_transfer  # isort: skip

DEVICE = "cuda" if HAS_GPU else "cpu"
BLOCKS = [7, 2, 3, 0, 9]


def arenas(dtype: KVDtype, head_dim: int) -> tuple[KVArena, KVArena]:
    """One that copies by kernels, one that copies by views; their content is the same."""
    layout = KVLayout(3, 2, head_dim, dtype, 8)
    by_kernels = KVArena(layout, 10, DEVICE, "triton")
    by_views = KVArena(layout, 10, "cpu")
    generator = torch.Generator().manual_seed(1)
    by_views.tensor.copy_(99 * torch.randn(by_views.tensor.shape, generator=generator).clamp(-1, 1))
    by_kernels.tensor.copy_(by_views.tensor)
    return by_kernels, by_views


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("float32", 16), ("bfloat16", 16), ("float16", 5), ("int8", 16), ("fp8", 16)]
)
@pytest.mark.parametrize("part", [KVSlice(0, 3, 0, 40), KVSlice(1, 2, 9, 20), KVSlice(2, 3, 16, 1)], ids=str)
def test_the_same_bytes(dtype: KVDtype, head_dim: int, part: KVSlice) -> None:
    by_kernels, by_views = arenas(dtype, head_dim)
    expected = bytes(by_views.read(BLOCKS, part))
    assert bytes(by_kernels.read(BLOCKS, part)) == expected
    payload = bytes(range(256)) * (len(expected) // 256 + 1)
    for arena in (by_kernels, by_views):
        arena.write(BLOCKS, part, payload[: len(expected)])
    assert torch.equal(
        by_kernels.tensor.cpu().contiguous().view(torch.uint8), by_views.tensor.contiguous().view(torch.uint8)
    )


def test_the_memory_that_is_given_is_filled() -> None:
    for arena in arenas("float32", 16):
        expected = bytes(arena.read(BLOCKS, KVSlice(1, 3, 5, 20)))
        out = bytearray(len(expected) + 3)
        assert bytes(arena.read(BLOCKS, KVSlice(1, 3, 5, 20), memoryview(out))) == expected
        assert out == expected + bytes(3)


def test_what_was_read_stays_while_the_arena_changes() -> None:
    arena, _ = arenas("float32", 16)
    first = arena.read(BLOCKS, KVSlice(0, 1, 0, 8))
    before = bytes(first)
    arena.write(BLOCKS, KVSlice(0, 1, 0, 8), bytes(len(before)))
    assert bytes(first) == before != bytes(arena.read(BLOCKS, KVSlice(0, 1, 0, 8)))


@pytest.mark.parametrize(("piece_layers", "pieces"), [(3, [3]), (2, [2, 1]), (0.5, [1, 1, 1])])
def test_long_sequences_go_in_pieces(piece_layers: float, pieces: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece takes device memory that is not KV's: as much as set, or what one layer needs."""
    arena, by_views = arenas("float32", 16)
    part = KVSlice(0, 3, 3, 30)
    expected = bytes(by_views.read(BLOCKS, part))
    copied: list[int] = []

    def gather(arena: Tensor, *args: Any) -> Tensor:
        buffer = gather_blocks(arena, *args)
        copied.append(buffer.shape[0])
        return buffer

    def scatter(buffer: Tensor, *args: Any) -> None:
        copied.append(buffer.shape[0])
        scatter_blocks(buffer, *args)

    monkeypatch.setattr(kv_transfer, "gather_blocks", gather)
    monkeypatch.setattr(kv_transfer, "scatter_blocks", scatter)
    monkeypatch.setattr(kv_transfer, "_PIECE_BYTES", int(piece_layers * len(expected) / 3))
    assert bytes(arena.read(BLOCKS, part)) == expected
    arena.tensor.zero_()
    arena.write(BLOCKS, part, expected)
    assert bytes(arena.read(BLOCKS, part)) == expected
    assert copied == pieces * 3


@pytest.mark.parametrize(("dtype", "head_dim"), [("float32", 16), ("bfloat16", 16), ("float16", 5)])
@pytest.mark.parametrize("part", [KVSlice(0, 3, 0, 40), KVSlice(1, 2, 9, 20), KVSlice(2, 3, 16, 1)], ids=str)
def test_the_same_bytes_by_way_of_a_slot_in_device_memory(dtype: KVDtype, head_dim: int, part: KVSlice) -> None:
    sender, by_views = arenas(dtype, head_dim)
    receiver, _ = arenas(dtype, head_dim)
    receiver.tensor.zero_()
    expected = bytes(by_views.read(BLOCKS, part))
    ring = torch.zeros(2 * 65536, dtype=torch.uint8, device=DEVICE)
    slot = DeviceBytes(len(expected), ring[65536 : 65536 + len(expected)])
    assert sender.read(BLOCKS, part, slot).nbytes == 0
    assert bytes(ring[65536:].cpu().numpy()) == expected + bytes(65536 - len(expected))
    assert not ring[:65536].any()
    receiver.write(list(reversed(BLOCKS)), part, slot)
    assert bytes(receiver.read(list(reversed(BLOCKS)), part)) == expected


def test_device_memory_of_another_size_is_refused() -> None:
    arena, by_views = arenas("float32", 16)
    size = len(arena.read(BLOCKS, KVSlice(0, 1, 0, 8)))
    for num_bytes in (size - 4, size + 4):
        place = DeviceBytes(num_bytes, torch.zeros(num_bytes, dtype=torch.uint8, device=DEVICE))
        with pytest.raises(InvalidRequest, match="device memory"):
            arena.read(BLOCKS, KVSlice(0, 1, 0, 8), place)
        with pytest.raises(InvalidRequest, match="device memory"):
            arena.write(BLOCKS, KVSlice(0, 1, 0, 8), place)
    with pytest.raises(Incompatible, match="triton"):
        by_views.write(BLOCKS, KVSlice(0, 1, 0, 8), DeviceBytes(size, torch.zeros(size, dtype=torch.uint8)))
