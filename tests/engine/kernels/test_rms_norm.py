"""RMSNorm, alone and with the residual addition."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.engine.kernels.conftest import Close

kernels = pytest.importorskip("halfmoon.engine.kernels.rms_norm", reason="triton is missing (extra `gpu`)")

EPS = 1e-5
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]


def random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (3, 4096), (70, 64), (5, 9, 128), (2, 96), (3, 5000)])
def test_plain(device: str, assert_close: Close, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = random(*shape, dtype=dtype, device=device), random(shape[-1], dtype=dtype, device=device, seed=1)
    out = kernels.rms_norm(x, weight, EPS)
    assert_close(out, kernels.rms_norm_reference(x, weight, EPS))
    assert_close(out, functional.rms_norm(x, weight.shape, weight, EPS))


def test_heads_inside_a_fused_projection(device: str, assert_close: Close) -> None:
    qkv, weight = random(6, 12, 128, dtype=torch.float32, device=device), torch.ones(128, device=device)
    heads = qkv[:, 3:8]
    assert_close(kernels.rms_norm(heads, weight, EPS), kernels.rms_norm_reference(heads, weight, EPS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 576), (3, 4096), (40, 64)])
def test_with_the_residual(device: str, assert_close: Close, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, residual = random(*shape, dtype=dtype, device=device), random(*shape, dtype=dtype, device=device, seed=1)
    weight = random(shape[-1], dtype=dtype, device=device, seed=2)
    expected_residual = residual.clone()
    expected = kernels.add_rms_norm_reference(x, expected_residual, weight, EPS)
    assert_close(kernels.add_rms_norm(x, residual, weight, EPS), expected)
    assert torch.equal(residual, expected_residual)


def test_no_rows(device: str) -> None:
    x, weight = torch.empty(0, 64, device=device), torch.ones(64, device=device)
    assert kernels.rms_norm(x, weight, EPS).shape == (0, 64)
    assert kernels.add_rms_norm(x, x.clone(), weight, EPS).shape == (0, 64)


def test_what_does_not_fit_is_refused(device: str) -> None:
    x, weight = torch.zeros(2, 64, device=device), torch.ones(64, device=device)
    with pytest.raises(ValueError, match="weight: shape"):
        kernels.rms_norm(x, weight[:32], EPS)
    with pytest.raises(ValueError, match="residual: shape"):
        kernels.add_rms_norm(x, x[:1], weight, EPS)
    with pytest.raises(ValueError, match="x: shape"):
        kernels.rms_norm(weight, weight, EPS)
    with pytest.raises(TypeError, match="x: dtype"):
        kernels.rms_norm(x.double(), weight, EPS)
