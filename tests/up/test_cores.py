"""Workers that bind their threads share the cores of a host without a rest, and no two have the same one."""

from __future__ import annotations

from pathlib import Path

import pytest

from halfmoon.up.cores import VLLM_CORES, core_lists, core_share, physical_cores
from halfmoon.up.service_specs import PreparedModel, other_specs
from halfmoon.up.up_options import UpOptions


@pytest.mark.parametrize(("num_cores", "num_workers"), [(2, 2), (7, 3), (64, 5)])
def test_shares_are_disjoint_and_whole(num_cores: int, num_workers: int) -> None:
    shares = [core_share(range(num_cores), worker, num_workers) for worker in range(num_workers)]
    assert [core for share in shares for core in share] == list(range(num_cores))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_too_few_cores_are_for_everybody() -> None:
    assert core_share((0, 1), 2, 3) == (0, 1)
    assert core_lists((0, 1), 2, 3, 1) == ""
    assert core_lists((0, 1), 0, 2, 2) == ""


def test_of_two_threads_of_a_core_one_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        directory = tmp_path / f"cpu{cpu}" / "topology"
        directory.mkdir(parents=True)
        (directory / "thread_siblings_list").write_text(f"{siblings}\n")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {1, 2, 3}, raising=False)
    assert physical_cores(tmp_path) == (1, 2)


def cores_of(options: UpOptions) -> list[str | None]:
    specs = other_specs(options, PreparedModel("/models/m", "m"), "x:1", ["x:3"], "x:4")
    return [spec.environment.get(VLLM_CORES) for spec in specs if "--role" in spec.arguments]


def test_workers_with_vllm_have_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VLLM_CORES, raising=False)
    monkeypatch.setattr("halfmoon.up.cores.physical_cores", lambda: tuple(range(8)))
    vllm = ("--engine", "vllm")
    assert cores_of(UpOptions(console=False, worker_arguments=vllm)) == ["0,1,2,3", "4,5,6,7"]
    ranks = (*vllm, "--tensor-parallel", "2")
    assert cores_of(UpOptions(console=False, worker_arguments=ranks)) == ["0,1|2,3", "4,5|6,7"]
    alone = UpOptions(num_prefill=0, num_decode=0, num_both=1, console=False, worker_arguments=vllm)
    assert cores_of(alone) == [None]
    assert cores_of(UpOptions(console=False)) == [None, None]
    assert cores_of(UpOptions(console=False, worker_arguments=vllm, on="ray")) == [None, None]
    monkeypatch.setenv(VLLM_CORES, "0-7")
    assert cores_of(UpOptions(console=False, worker_arguments=vllm)) == [None, None]
