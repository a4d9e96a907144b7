"""Workers of one host spread over its GPUs; those that share one share its memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmoon.up.gpus import GPUShares, visible_gpus


@pytest.mark.parametrize(
    ("named", "gpus"),
    [("0,2", ("0", "2")), ("GPU-a, GPU-b", ("GPU-a", "GPU-b")), ("", ()), ("-1", ()), ("1,-1,2", ("1",))],
)
def test_what_cuda_was_told_already_counts(named: str, gpus: tuple[str, ...]) -> None:
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": named}) == gpus


def test_else_the_driver_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho GPU-1\necho GPU-2\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert visible_gpus({}) == ("GPU-1", "GPU-2")
    fake.write_text("#!/bin/sh\nexit 9\n")
    assert visible_gpus({}) == ()
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert visible_gpus({}) == ()


def test_workers_take_gpus_in_turns() -> None:
    shares = GPUShares(("a", "b"), 3)
    assert [shares.environment(worker) for worker in range(3)] == [
        {"CUDA_VISIBLE_DEVICES": name} for name in ("a", "b", "a")
    ]
    half = ("--gpu-memory-utilization", "0.450")
    assert [shares.arguments(worker) for worker in range(3)] == [half, (), half]


def test_without_gpus_nothing_is_said() -> None:
    shares = GPUShares((), 2)
    assert (shares.environment(1), shares.arguments(1)) == ({}, ())
