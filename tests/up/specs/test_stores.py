"""What the stores of `halfmoon up` leave behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmoon.up.specs.stores import StoreOptions, idle_directories
from services.kvstore.tiers.disk import DiskTier


@pytest.mark.parametrize(
    ("before", "now", "idle"),
    [
        (["."], 1, []),
        (["0", "1"], 2, []),
        (["0", "1"], 1, ["0", "1"]),
        (["0", "1", "2"], 2, ["2"]),
        ([".", "0"], 2, ["."]),
    ],
)
async def test_stores_that_are_not_started_any_more_are_told_of(
    tmp_path: Path, before: list[str], now: int, idle: list[str]
) -> None:
    directory = tmp_path / "kvstore"
    for name in before:
        await DiskTier(directory / name, 1 << 20).close()
    assert idle_directories(StoreOptions(num_stores=now), tmp_path) == [directory / name for name in idle]
