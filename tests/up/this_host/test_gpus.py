"""Workers of one host spread over its GPUs; those that share one share its memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmoon.errors import InvalidRequest
from halfmoon.up.this_host.gpus import GPUShares, is_kind, named_gpus, visible_gpus, whole_gpus


@pytest.mark.parametrize(
    ("named", "gpus"),
    [("0,2", ("0", "2")), ("GPU-a, GPU-b", ("GPU-a", "GPU-b")), ("", ()), ("-1", ()), ("1,-1,2", ("1",))],
)
def test_what_cuda_was_told_already_counts(named: str, gpus: tuple[str, ...]) -> None:
    assert named_gpus({"CUDA_VISIBLE_DEVICES": named}) == gpus


def test_else_the_driver_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 0, GPU-1, NVIDIA H200\necho 1, GPU-2, NVIDIA L40S\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert visible_gpus({}) == {"GPU-1": "NVIDIA H200", "GPU-2": "NVIDIA L40S"}
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "1,MIG-3"}) == {"1": "NVIDIA L40S", "MIG-3": ""}
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == {}
    fake.write_text("#!/bin/sh\nexit 9\n")
    assert visible_gpus({}) == {}
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "0"}) == {"0": ""}
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert visible_gpus({}) == {}


@pytest.mark.parametrize(
    ("planned", "product", "fits"),
    [
        ("h100", "NVIDIA H100 80GB HBM3", True),
        ("h200", "NVIDIA H100 80GB HBM3", False),
        ("a100-80g", "NVIDIA A100-SXM4-80GB", True),
        ("a100-80g", "NVIDIA A100-SXM4-40GB", False),
        ("b200", "NVIDIA GB200", False),
        ("l40s", "NVIDIA L40S", True),
        ("", "NVIDIA L40S", True),
        ("l40s", "", True),
    ],
)
def test_a_plan_s_kind_is_found_in_the_product_s_name(planned: str, product: str, fits: bool) -> None:
    assert is_kind(planned, product) == fits


def test_workers_get_gpus_of_the_kind_that_their_plan_names() -> None:
    host = {"a": "NVIDIA L40S", "b": "NVIDIA H200", "c": "NVIDIA L40S"}
    seen = [one["CUDA_VISIBLE_DEVICES"] for one in whole_gpus(host, [1, 2], ["h200", "l40s"])]
    assert seen == ["b", "a,c"]
    with pytest.raises(InvalidRequest, match=r"2 x h200.*2 x NVIDIA L40S, 1 x NVIDIA H200"):
        whole_gpus(host, [2], ["h200"])


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
