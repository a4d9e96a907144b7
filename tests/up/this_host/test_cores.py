"""Workers that bind their threads share the cores of a host without a rest, and no two have the same one."""

from __future__ import annotations

import pytest

from halfmoon.up.specs.service_specs import other_specs
from halfmoon.up.this_host.cores import VLLM_CORES, core_lists, core_share, threads_text
from halfmoon.up.up_options import PreparedModel, UpOptions


@pytest.mark.parametrize(("num_cores", "num_workers"), [(2, 2), (7, 3), (64, 5)])
def test_shares_are_disjoint_and_whole(num_cores: int, num_workers: int) -> None:
    shares = [core_share(range(num_cores), worker, num_workers) for worker in range(num_workers)]
    assert [core for share in shares for core in share] == list(range(num_cores))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_too_few_cores_are_for_everybody() -> None:
    assert core_share((0, 1), 2, 3) == (0, 1)
    assert core_lists((0, 1), 2, 3, 1) == ""
    assert core_lists((0, 1), 0, 2, 2) == ""


def cores_of(options: UpOptions) -> list[str | None]:
    specs = other_specs(options, PreparedModel("/models/m", "m"), "x:1", ["x:3"], "x:4")
    return [spec.environment.get(VLLM_CORES) for spec in specs if "--role" in spec.arguments]


def test_workers_with_vllm_have_cores_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VLLM_CORES, raising=False)
    monkeypatch.setattr("halfmoon.up.this_host.cores.physical_cores", lambda: tuple(range(8)))
    monkeypatch.setattr("halfmoon.up.this_host.cores.num_cores", lambda: 8)
    vllm = ("--engine", "vllm")
    assert cores_of(UpOptions(console=False, worker_arguments=vllm)) == ["0,1,2,3", "4,5,6,7"]
    ranks = (*vllm, "--tensor-parallel", "2")
    assert cores_of(UpOptions(console=False, worker_arguments=ranks)) == ["0,1|2,3", "4,5|6,7"]
    alone = UpOptions(num_prefill=0, num_decode=0, num_both=1, console=False, worker_arguments=vllm)
    assert cores_of(alone) == [None]
    assert cores_of(UpOptions(console=False)) == [None, None]
    assert cores_of(UpOptions(console=False, worker_arguments=vllm, on="ray")) == [None, None]
    monkeypatch.setattr("halfmoon.up.this_host.cores.num_cores", lambda: 3)  # a quota says how many, not which
    assert cores_of(UpOptions(console=False, worker_arguments=vllm)) == [None, None]
    monkeypatch.setenv(VLLM_CORES, "0-7")
    assert cores_of(UpOptions(console=False, worker_arguments=vllm)) == [None, None]


def threads_of(options: UpOptions) -> dict[str, str | None]:
    specs = other_specs(options, PreparedModel("/models/m", "m"), "x:1", ["x:3"], "x:4")
    return {spec.name: spec.environment.get("OMP_NUM_THREADS") for spec in specs if "--role" in spec.arguments}


def test_own_workers_divide_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("halfmoon.up.this_host.cores.num_cores", lambda: 7)
    three = UpOptions(num_prefill=1, num_decode=2, console=False)
    assert threads_of(three) == {"prefill-0": "2", "decode-0": "2", "decode-1": "3"}
    alone = UpOptions(num_prefill=0, num_decode=0, num_both=1, console=False)
    assert threads_of(alone) == {"both-0": "7"}
    many = UpOptions(num_prefill=4, num_decode=5, console=False)
    assert set(threads_of(many).values()) == {"2"}  # one for each core would leave cores idle
    monkeypatch.setattr("halfmoon.up.this_host.cores.num_cores", lambda: 1)
    assert set(threads_of(many).values()) == {"1"}
    assert set(threads_of(UpOptions(console=False, on="ray")).values()) == {None}


def test_chosen_threads_are_those_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = ("--num-threads", "3", "--tensor-parallel", "2")
    assert threads_of(UpOptions(console=False, worker_arguments=ranks))["prefill-0"] == "6"
    of_prefill = UpOptions(console=False, settings={"prefill": {"num_threads": "5"}})
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert threads_of(of_prefill) == {"prefill-0": "5", "decode-0": "4"}


def test_what_each_got_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("halfmoon.up.this_host.cores.num_cores", lambda: 4)
    workers = {"gateway": {}, "prefill-0": {"OMP_NUM_THREADS": "2"}, "decode-0": {VLLM_CORES: "2,3"}}
    assert threads_text(workers) == "threads on 4 cores: prefill-0 2, decode-0 on 2,3"
    assert threads_text({"gateway": {}}) == ""
