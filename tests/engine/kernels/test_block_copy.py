"""Blocks gathered for a transfer and scattered after one: the bytes of `KVArena.read` and `KVArena.write`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from halfmoon.kv.kv_layout import KVSlice

kernels = pytest.importorskip("halfmoon.engine.kernels.block_copy", reason="triton is missing (extra `gpu`)")

BLOCK_TOKENS = 16
RANGES = [(0, 1), (0, 16), (0, 64), (5, 11), (15, 2), (16, 33), (63, 1)]  # start, num_tokens


def random_arena(dtype: torch.dtype, device: str, head_dim: int = 32) -> Tensor:
    values = torch.randint(-100, 100, (3, 2, 2, 9 * BLOCK_TOKENS, head_dim), generator=torch.Generator().manual_seed(0))
    return values.to(device).to(dtype)


@pytest.fixture
def block_ids(device: str) -> Tensor:
    return torch.tensor([7, 2, 3, 0], dtype=torch.int32, device=device)


@pytest.mark.parametrize(("start", "num_tokens"), RANGES)
def test_gather(device: str, block_ids: Tensor, start: int, num_tokens: int) -> None:
    arguments = (random_arena(torch.float16, device), block_ids, BLOCK_TOKENS, 1, 3, start, num_tokens)
    assert torch.equal(kernels.gather_blocks(*arguments), kernels.gather_blocks_reference(*arguments))


@pytest.mark.parametrize(("start", "num_tokens"), RANGES)
def test_scatter(device: str, block_ids: Tensor, start: int, num_tokens: int) -> None:
    actual, expected = random_arena(torch.float16, device), random_arena(torch.float16, device)
    buffer = torch.arange(2 * 2 * 2 * num_tokens * 32, device=device).remainder(999).half()
    buffer = buffer.view(2, 2, 2, num_tokens, 32)
    kernels.scatter_blocks(buffer, actual, block_ids, BLOCK_TOKENS, 1, start)
    kernels.scatter_blocks_reference(buffer, expected, block_ids, BLOCK_TOKENS, 1, start)
    assert torch.equal(actual, expected)  # what lies outside the range too


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        (torch.float32, 32),
        (torch.bfloat16, 80),
        (torch.bfloat16, 33),
        (torch.int8, 34),
        (torch.uint8, 66),
    ],
)
def test_no_dtype_is_interpreted(device: str, block_ids: Tensor, dtype: torch.dtype, head_dim: int) -> None:
    arena = random_arena(dtype, device, head_dim)
    buffer = kernels.gather_blocks(arena, block_ids, BLOCK_TOKENS, 0, 3, 3, 40)
    raw = kernels.gather_blocks_reference(arena, block_ids, BLOCK_TOKENS, 0, 3, 3, 40).contiguous().view(torch.uint8)
    assert torch.equal(buffer.view(torch.uint8), raw)
    back = torch.zeros_like(arena)
    kernels.scatter_blocks(buffer, back, block_ids, BLOCK_TOKENS, 0, 3)
    again = kernels.gather_blocks(back, block_ids, BLOCK_TOKENS, 0, 3, 3, 40)
    assert torch.equal(again.view(torch.uint8), raw)


def test_agrees_with_the_arena(device: str, block_ids: Tensor) -> None:
    from halfmoon.engine.kv_memory.kv_arena import KVArena
    from halfmoon.kv.kv_layout import KVLayout

    arena = KVArena(KVLayout(3, 2, 32, "float16", BLOCK_TOKENS), 9, device)
    arena.tensor.copy_(random_arena(torch.float16, device))
    buffer = kernels.gather_blocks(arena.tensor, block_ids, BLOCK_TOKENS, 0, 2, 5, 40)
    assert buffer.cpu().numpy().tobytes() == bytes(arena.read(block_ids.tolist(), KVSlice(0, 2, 5, 40)))


def test_what_does_not_fit_is_refused(device: str, block_ids: Tensor) -> None:
    arena = random_arena(torch.float16, device)
    with pytest.raises(ValueError, match="outside 4 blocks"):
        kernels.gather_blocks(arena, block_ids, BLOCK_TOKENS, 0, 1, 60, 5)
    with pytest.raises(ValueError, match=r"outside 0\.\.3"):
        kernels.gather_blocks(arena, block_ids, BLOCK_TOKENS, 2, 4, 0, 1)
    with pytest.raises(ValueError, match="arena: must be contiguous"):
        kernels.gather_blocks(arena[..., :16], block_ids, BLOCK_TOKENS, 0, 1, 0, 1)
    buffer = kernels.gather_blocks(arena, block_ids, BLOCK_TOKENS, 0, 1, 0, 4)
    with pytest.raises(ValueError, match="buffer: shape"):
        kernels.scatter_blocks(buffer[:, :, :1], arena, block_ids, BLOCK_TOKENS, 0, 0)
    with pytest.raises(TypeError, match="buffer: dtype"):
        kernels.scatter_blocks(buffer.float(), arena, block_ids, BLOCK_TOKENS, 0, 0)
