"""A worker's role, its changes, and work that was placed before one."""

from __future__ import annotations

import pytest

from halfmoon.errors import StalePlacement
from halfmoon.pb.gateway_pb2 import RoleChange, WorkerIdentity
from halfmoon.pb.types_pb2 import BOTH, DECODE, PREFILL, ROLE_UNSPECIFIED, Role
from halfmoon.worker.membership.worker_role import WorkerRole


def test_a_change_counts_and_is_what_the_next_registration_says() -> None:
    identity = WorkerIdentity(role=DECODE)
    role = WorkerRole(identity)
    assert (role.role, role.epoch, role.age_s(9.0)) == (DECODE, 0, 0.0)
    assert role.change(RoleChange(role=PREFILL, epoch=0), 5.0)
    assert (role.role, role.epoch, role.age_s(9.0)) == (PREFILL, 1, 4.0)
    assert (identity.role, identity.role_epoch) == (PREFILL, 1)


@pytest.mark.parametrize(
    "change", [RoleChange(role=BOTH, epoch=0), RoleChange(role=BOTH, epoch=2), RoleChange(epoch=1)]
)
def test_what_was_decided_without_knowing_the_latest_change_has_no_effect(change: RoleChange) -> None:
    role = WorkerRole(WorkerIdentity(role=DECODE, role_epoch=1))
    assert not role.change(change, 5.0)
    assert (role.role, role.epoch) == (DECODE, 1)


@pytest.mark.parametrize(
    ("own", "epoch", "work", "is_refused"),
    [
        (DECODE, 3, (DECODE,), False),
        (DECODE, None, (DECODE,), False),  # from who does not know of epochs
        (DECODE, 2, (DECODE,), True),
        (DECODE, 3, (PREFILL,), True),
        (DECODE, None, (PREFILL,), True),
        (DECODE, 3, (PREFILL, DECODE), False),
        (BOTH, 3, (PREFILL,), False),
        (BOTH, 2, (PREFILL,), True),
    ],
)
def test_which_work_is_taken(
    own: Role.ValueType, epoch: int | None, work: tuple[Role.ValueType, ...], is_refused: bool
) -> None:
    role = WorkerRole(WorkerIdentity(role=own, role_epoch=3))
    if is_refused:
        with pytest.raises(StalePlacement):
            role.check(epoch, *work)
    else:
        role.check(epoch, *work)


def test_a_worker_of_no_role_takes_nothing() -> None:
    with pytest.raises(StalePlacement):
        WorkerRole(WorkerIdentity(role=ROLE_UNSPECIFIED)).check(None, PREFILL)
