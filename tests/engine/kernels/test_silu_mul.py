"""The gated activation."""

from __future__ import annotations

import pytest
import torch

from tests.engine.kernels.conftest import Close

kernels = pytest.importorskip("halfmoon.engine.kernels.silu_mul", reason="triton is missing (extra `gpu`)")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("num_tokens", "size"), [(1, 1), (3, 1536), (7, 1024), (2, 3000)])
def test_gate_times_up(device: str, assert_close: Close, dtype: torch.dtype, num_tokens: int, size: int) -> None:
    wide = torch.randn(num_tokens, 2 * size + 8, generator=torch.Generator().manual_seed(0)) * 4
    gate_up = wide.to(device, dtype)[:, : 2 * size]  # rows need not be dense
    assert_close(kernels.silu_mul(gate_up), kernels.silu_mul_reference(gate_up))


def test_no_tokens(device: str) -> None:
    assert kernels.silu_mul(torch.empty(0, 64, device=device)).shape == (0, 32)


def test_what_does_not_fit_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match="not two halves"):
        kernels.silu_mul(torch.zeros(2, 7, device=device))
    with pytest.raises(ValueError, match="must be dense"):
        kernels.silu_mul(torch.zeros(8, 2, device=device).t())
