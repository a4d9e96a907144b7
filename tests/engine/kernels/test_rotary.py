"""Rotary embedding in place, against its reference and against the engine's own rotation."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.engine.kernels.conftest import Close

kernels = pytest.importorskip("halfmoon.engine.kernels.rotary", reason="triton is missing (extra `gpu`)")


def tables(num_positions: int, half: int, device: str) -> tuple[Tensor, Tensor]:
    angles = torch.outer(torch.arange(num_positions), 1.0 / 100.0 ** (torch.arange(half) / half)).to(device)
    return angles.cos(), angles.sin()


def fused(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: str) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("num_tokens", "num_q", "num_kv"), [(1, 1, 1), (5, 9, 3), (17, 32, 8)])
@pytest.mark.parametrize("head_dim", [64, 80])
def test_views_of_a_fused_projection(
    device: str, assert_close: Close, dtype: torch.dtype, num_tokens: int, num_q: int, num_kv: int, head_dim: int
) -> None:
    actual = fused(num_tokens, num_q + 2 * num_kv, head_dim, dtype, device)
    expected = actual.clone()
    positions = torch.randint(0, 200, (num_tokens,), generator=torch.Generator().manual_seed(0)).to(device)
    for heads, rotate in ((actual, kernels.rotary), (expected, kernels.rotary_reference)):
        q, k = heads[:, :num_q], heads[:, num_q : num_q + num_kv]
        rotate(q, k, positions, *tables(200, head_dim // 2, device))
    assert_close(actual, expected)  # the values after K too: they were left alone


def test_only_the_first_dimensions_may_rotate(device: str, assert_close: Close) -> None:
    q, k = fused(3, 4, 64, torch.float32, device), fused(3, 2, 64, torch.float32, device)
    before, expected_k = q.clone(), k.clone()
    expected_q = q.clone()
    arguments = (torch.tensor([0, 3, 9], device=device), *tables(10, 16, device))
    kernels.rotary(q, k, *arguments)
    kernels.rotary_reference(expected_q, expected_k, *arguments)
    assert_close(q, expected_q)
    assert_close(k, expected_k)
    assert torch.equal(q[..., 32:], before[..., 32:])


def test_agrees_with_the_engine(device: str, assert_close: Close) -> None:
    from halfmoon.engine.models.rotary import rotate

    cos, sin = tables(50, 32, device)
    positions = torch.tensor([0, 7, 49], device=device)
    q, k = fused(3, 4, 64, torch.float32, device), fused(3, 2, 64, torch.float32, device)
    full_cos, full_sin = cos.repeat(1, 2)[positions].unsqueeze(1), torch.cat((-sin, sin), 1)[positions].unsqueeze(1)
    expected_q, expected_k = rotate(q, full_cos, full_sin), rotate(k, full_cos, full_sin)
    kernels.rotary(q, k, positions, cos, sin)
    assert_close(q, expected_q)
    assert_close(k, expected_k)


def test_what_does_not_fit_is_refused(device: str) -> None:
    q, k = fused(2, 4, 64, torch.float32, device), fused(2, 2, 64, torch.float32, device)
    positions = torch.zeros(2, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match="frequencies are too many"):
        kernels.rotary(q, k, positions, *tables(4, 33, device))
    with pytest.raises(ValueError, match="positions"):
        kernels.rotary(q, k, positions[:1], *tables(4, 32, device))
    with pytest.raises(TypeError, match="k: dtype"):
        kernels.rotary(q, k.half(), positions, *tables(4, 32, device))
