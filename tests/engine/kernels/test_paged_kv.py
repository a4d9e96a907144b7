"""What kernels are told of a device."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

paged_kv = pytest.importorskip("halfmoon.engine.kernels.paged_kv", reason="triton is missing (extra `gpu`)")


def test_a_device_is_asked_once_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []

    def properties(device: torch.device) -> SimpleNamespace:
        asked.append(device)
        return SimpleNamespace(shared_memory_per_block_optin=100 << 10, major=8)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    device = torch.device("cuda", 7)
    try:
        assert [paged_kv.num_stages(device, 40 << 10, 0) for _ in range(3)] == [2] * 3
        assert paged_kv.generation(device) == 8
    finally:
        paged_kv._properties.cache_clear()
    assert asked == [device]
