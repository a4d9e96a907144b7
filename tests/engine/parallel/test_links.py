from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from halfmoon.engine.parallel.grid import Grid
from halfmoon.engine.parallel.links import LOOPBACK, Links, join_rendezvous, serve_rendezvous

ROWS = 33


def sums(port: int, rank: int, size: int, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """What `rank` has as the sum of all rows, and of the first one, two, ... of them alone."""
    links = Links(join_rendezvous(LOOPBACK, port), Grid(size, 1), rank, "cpu")
    rows = torch.randn(ROWS, 96, generator=torch.Generator().manual_seed(rank)).to(dtype)
    return links.all_reduce(rows.clone()), [links.all_reduce(rows[:num].clone()) for num in (1, 2, 8, 16)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_row_has_the_same_sum_beside_any_others_on_all_ranks(size: int, dtype: torch.dtype) -> None:
    store, port = serve_rendezvous(LOOPBACK)
    with ThreadPoolExecutor(size) as ranks:
        found = [one.result() for one in [ranks.submit(sums, port, rank, size, dtype) for rank in range(size)]]
    del store
    whole = found[0][0]
    expected = sum(torch.randn(ROWS, 96, generator=torch.Generator().manual_seed(rank)) for rank in range(size))
    assert torch.allclose(whole.float(), torch.as_tensor(expected), atol=0.1 if dtype == torch.bfloat16 else 1e-5)
    for of_all, parts in found:
        assert torch.equal(of_all, whole)
        assert all(torch.equal(part, whole[: len(part)]) for part in parts)
