"""The cluster view: a row per member, and columns that agree with the views of the workers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.models.latency import PrefillModel, StepModel
from halfmoon.policy.view.cluster_view import COLUMNS, ClusterView
from halfmoon.policy.view.worker_view import Role, WorkerView


def worker(worker_id: str, role: Role, **changed: Any) -> WorkerView:
    plain = WorkerView(worker_id, role, f"{worker_id}:1", 1000, 16, 100, 100)
    return replace(plain, **changed)


P0 = worker("p0", "prefill")


def test_rows_follow_the_members() -> None:
    view = ClusterView([worker(f"w{i}", "decode") for i in range(40)])
    row = view.row("w7")
    view.remove("w7")
    view.remove("w7")
    view.put(worker("new", "prefill", holder=5))
    assert view.row("new") == row
    assert view.row("w7") is None
    view.put(replace(P0, waiting_prefill_tokens=3))
    view.put(replace(P0, waiting_prefill_tokens=4))
    assert [one.worker_id for one in view.workers][-2:] == ["new", "p0"]
    p0 = view.row("p0")
    assert p0 is not None
    assert view.column("waiting_prefill_tokens")[p0] == 4
    assert view.worker(p0).waiting_prefill_tokens == 4
    assert view.num_rows == 41


WORKERS = st.builds(
    WorkerView,
    worker_id=st.sampled_from([f"w{number}" for number in range(40)]),
    role=st.sampled_from(["prefill", "decode", "both"]),
    address=st.sampled_from(["a:1", "b:1", "c:1"]),
    context_tokens=st.integers(1, 300),
    block_tokens=st.just(16),
    total_blocks=st.integers(1, 20),
    free_blocks=st.integers(0, 20),
    num_running=st.integers(0, 5),
    waiting_prefill_tokens=st.integers(0, 500),
    draining=st.booleans(),
    listening=st.booleans(),
    prefill_model=st.sampled_from([PrefillModel(), PrefillModel(0.1, 0.01, 0.0)]),
    step_model=st.sampled_from([StepModel(), StepModel(0.1, 0.01, 0.0)]),
)


@given(st.lists(st.tuples(WORKERS, st.booleans()), max_size=60))
def test_columns_agree_with_the_views(changes: list[tuple[WorkerView, bool]]) -> None:
    view, members = ClusterView(), dict[str, WorkerView]()
    for changed, leaves in changes:
        if leaves:
            view.remove(changed.worker_id)
            members.pop(changed.worker_id, None)
        else:
            view.put(changed)
            members[changed.worker_id] = changed
    assert list(view.workers) == list(members.values())
    for name, member in members.items():
        row = view.row(name)
        assert row is not None
        assert view.worker(row) is member
        for column in COLUMNS.keys() - {"total_tokens"}:
            assert view.column(column)[row] == getattr(member, column)
        assert view.column("total_tokens")[row] == member.total_blocks * member.block_tokens
        assert tuple(view.prefill_coefficients[row]) == member.prefill_model
        colocated = [other for other in members if view.colocated_with(name)[view.row(other)]]
        assert set(colocated) == {other for other, its in members.items() if its.host == member.host} - {name}
    roles = ((view.can_prefill, "can_prefill"), (view.can_decode, "can_decode"), (view.can_do_both, "can_do_both"))
    for mask, attribute in roles:
        assert np.count_nonzero(mask) == sum(getattr(member, attribute) for member in members.values())
