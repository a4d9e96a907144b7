"""The fused layer functions compute what the plain ones compute."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from halfmoon.engine.checkpoint.checkpoint import Checkpoint
from halfmoon.engine.models.layer_ops import TORCH_OPS
from halfmoon.engine.models.rotary import Rotary

pytest.importorskip("triton", reason="triton is missing (extra `gpu`)")
from tests.engine.kernels.conftest import HAS_GPU, TOLERANCE  # isort: skip  (chooses the interpreter without a GPU)
from halfmoon.engine.models.triton_ops import TRITON_OPS  # isort: skip

DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = [torch.float32, torch.float16]


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def assert_close(got: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms(dtype: torch.dtype) -> None:
    x, residual, weight = (random(*shape, dtype=dtype, seed=i) for i, shape in enumerate([(5, 48), (5, 48), (48,)]))
    heads = random(5, 7, 48, dtype=dtype)[:, 1:4]
    for values in (x, heads):
        assert_close(TRITON_OPS.rms_norm(values, weight, 1e-5), TORCH_OPS.rms_norm(values, weight, 1e-5))
    expected = TORCH_OPS.add_rms_norm(x, residual, weight, 1e-5)
    for got, want in zip(TRITON_OPS.add_rms_norm(x, residual.clone(), weight, 1e-5), expected, strict=True):
        assert_close(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = random(3, 96, dtype=dtype)
    assert_close(TRITON_OPS.silu_mul(gate_up), TORCH_OPS.silu_mul(gate_up))


@pytest.mark.parametrize("name", ["llama", "llama-yarn-rope"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation(name: str, dtype: torch.dtype, tiny_checkpoint: Callable[[str], Checkpoint]) -> None:
    rotary = Rotary(tiny_checkpoint(name).model_config, dtype, DEVICE)
    positions = torch.tensor([0, 1, 5, 300], device=DEVICE)
    heads = random(4, 8, 16, dtype=dtype)
    expected = TORCH_OPS.rotation(rotary, positions)(heads[:, :6], 4)
    got = TRITON_OPS.rotation(rotary, positions)(heads[:, :6].clone(), 4)
    assert [part.shape[1] for part in got] == [4, 2]
    for one, want in zip(got, expected, strict=True):
        assert_close(one, want)
