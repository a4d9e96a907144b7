"""Kernels run on a GPU where there is one, else in Triton's interpreter, which must be chosen before triton's import.

transformers imports triton, and so `tests/engine/conftest.py` has by now: then triton is imported anew.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, NamedTuple, Protocol

import pytest
import torch
from torch import Tensor

if TYPE_CHECKING:
    from halfmoon.engine.kernels.paged_kv import PagedKV

HAS_GPU = torch.cuda.is_available()
TOLERANCE = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}

if not HAS_GPU and find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") != "1":
    os.environ["TRITON_INTERPRET"] = "1"
    for name in [name for name in sys.modules if name.split(".")[0] == "triton" and not name.startswith("triton._C")]:
        del sys.modules[name]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.parent.name == "kernels" and item.get_closest_marker("gpu") and not HAS_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def device() -> str:
    return "cuda" if HAS_GPU else "cpu"


class Close(Protocol):
    def __call__(self, actual: Tensor, expected: Tensor) -> None: ...


@pytest.fixture
def assert_close() -> Close:
    """Equal within what one rounding to the dtype explains."""

    def check(actual: Tensor, expected: Tensor) -> None:
        tolerance = TOLERANCE[expected.dtype]
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)

    return check


class Paged(NamedTuple):
    kv: PagedKV
    block_table: Tensor  # [num_seqs, max_blocks] int32
    context_lens: Tensor  # [num_seqs] int32


class MakePaged(Protocol):
    def __call__(
        self,
        contexts: Sequence[int],
        dtype: torch.dtype,
        num_kv_heads: int = 2,
        head_dim: int = 64,
        block_tokens: int = 64,
    ) -> Paged: ...


@pytest.fixture
def make_paged(device: str) -> MakePaged:
    """`make_paged([5, 70], torch.float16)`: sequences of random K and V in scattered blocks.

    Every slot that no sequence covers is poisoned, and unused entries of the table name a poisoned block.
    """
    from halfmoon.engine.kernels.kv_write import kv_write_reference
    from halfmoon.engine.kernels.paged_kv import PagedKV

    def make(
        contexts: Sequence[int],
        dtype: torch.dtype,
        num_kv_heads: int = 2,
        head_dim: int = 64,
        block_tokens: int = 64,
    ) -> Paged:
        generator = torch.Generator().manual_seed(11)
        needed = [-(-context // block_tokens) for context in contexts]
        ids = torch.randperm(sum(needed), generator=generator) + 1  # block 0 is the poisoned one
        shape = (num_kv_heads, (sum(needed) + 1) * block_tokens, head_dim)
        tensors = [torch.full(shape, float("nan"), dtype=dtype, device=device) for _ in range(2)]
        kv = PagedKV(tensors[0], tensors[1], block_tokens)
        table = torch.zeros(len(contexts), max(1, *needed), dtype=torch.int32)
        slots: list[int] = []
        for seq, context in enumerate(contexts):
            blocks = ids[sum(needed[:seq]) : sum(needed[: seq + 1])]
            table[seq, : len(blocks)] = blocks
            slots += [int(blocks[t // block_tokens]) * block_tokens + t % block_tokens for t in range(context)]
        new = torch.randn(2, len(slots), num_kv_heads, head_dim, generator=generator).to(device)
        new = new.to(dtype)
        kv_write_reference(new[0], new[1], kv, torch.tensor(slots, dtype=torch.int64, device=device))
        return Paged(kv, table.to(device), torch.tensor(contexts, dtype=torch.int32, device=device))

    return make
