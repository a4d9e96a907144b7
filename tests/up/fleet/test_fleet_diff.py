"""From the workers that run to those of a plan."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.errors import Incompatible
from halfmoon.policy.view.worker_view import Role
from halfmoon.up.fleet.fleet_diff import worker_change
from halfmoon.up.specs.worker_specs import WorkerSpec
from halfmoon.up.this_host.gpus import gpus_beside
from halfmoon.up.up_options import WorkerStart

PLAIN = WorkerStart()
ROLES = st.sampled_from(("prefill", "decode", "both"))
STARTS = st.sampled_from((WorkerStart(), WorkerStart(("--tensor-parallel", "2"), 2)))


def running(name: str, role: Role, start: WorkerStart = PLAIN, gpus: str = "") -> WorkerSpec:
    return WorkerSpec(name, (), {"CUDA_VISIBLE_DEVICES": gpus}, role=role, start=start)


@given(st.lists(st.tuples(ROLES, STARTS)), st.lists(st.tuples(ROLES, STARTS)))
def test_afterwards_there_is_what_was_wanted_and_nobody_goes_in_vain(
    now: list[tuple[Role, WorkerStart]], wanted: list[tuple[Role, WorkerStart]]
) -> None:
    change = worker_change([running(f"w{at}", *one) for at, one in enumerate(now)], wanted)
    assert Counter(change.then) == Counter(wanted)
    assert Counter(change.now) == Counter(now)
    assert len(change.kept) == (Counter(now) & Counter(wanted)).total()


def test_other_options_are_another_worker() -> None:
    change = worker_change([running("a", "both")], [("both", WorkerStart(("--max-running", "8")))])
    assert ([spec.name for spec in change.stopped], len(change.started), change.kept) == (["a"], 1, ())


def test_new_workers_get_gpus_that_nobody_has() -> None:
    now = [running("a", "prefill", gpus="g0"), running("b", "decode", gpus="g1")]
    change = worker_change(now, [("prefill", WorkerStart()), ("both", WorkerStart()), ("both", WorkerStart())])
    gpus = {"g0": "", "g1": "", "g2": "", "g3": ""}
    three = dict(list(gpus.items())[:3])
    assert change.gpus(gpus, stop_first=False) == [{"CUDA_VISIBLE_DEVICES": name} for name in ("g2", "g3")]
    assert change.gpus(three, stop_first=True) == [{"CUDA_VISIBLE_DEVICES": name} for name in ("g1", "g2")]
    with pytest.raises(Incompatible, match="need 2 GPUs, and 1 of this host's 3 are free"):
        change.gpus(three, stop_first=False)


def test_when_all_gpus_are_taken_nobody_computes_elsewhere() -> None:
    with pytest.raises(Incompatible):
        gpus_beside({"g0": ""}, {"g0"}, [1])
    assert gpus_beside({"g0": ""}, {"g0"}, []) == []
    assert gpus_beside({}, (), [1, 2]) == [{}, {}]


def test_a_worker_that_no_plan_started_is_kept_whatever_its_gpu() -> None:
    now = [running("a", "prefill", gpus="g0")]
    assert worker_change(now, [("prefill", WorkerStart(gpu="h200"))]).kept == tuple(now)
    planned = [replace(now[0], start=WorkerStart(gpu="h200"))]
    assert worker_change(planned, [("prefill", WorkerStart(gpu="l40s"))]).stopped == tuple(planned)
    assert worker_change(planned, [("prefill", WorkerStart())]).kept == tuple(planned)
