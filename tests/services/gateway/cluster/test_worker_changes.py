"""Which workers may leave, or change."""

from __future__ import annotations

from typing import Any

import pytest

from halfmoon.errors import InvalidRequest, NotFound
from halfmoon.pb.gateway_pb2 import WorkerLoad
from halfmoon.pb.types_pb2 import Role
from services.gateway.cluster.member import Member
from services.gateway.cluster.membership import Membership
from services.gateway.cluster.worker_changes import ChangeRefused, check_without, named
from tests.services.gateway.cluster.test_membership import identity


def members(*roles: str, draining: tuple[int, ...] = ()) -> list[Member]:
    """Workers called by their roles and numbers."""
    membership = Membership("f" * 32, 1.0)
    for number, role in enumerate(roles):
        member = membership.join(identity(f"{role}-{number}", role=Role.Value(role.upper())), 0.0)
        membership.report(member, WorkerLoad(draining=number in draining), 0.0)
    return membership.members()


@pytest.mark.parametrize(
    ("roles", "leaves", "phase"),
    [
        (("prefill", "decode"), 0, "prefill"),
        (("prefill", "decode"), 1, "decode"),
        (("prefill", "decode", "decode"), 1, None),
        (("prefill", "decode", "both"), 0, None),
        (("both",), 0, "serve"),
        (("both", "decode"), 0, "prefill"),
        (("decode",), 0, None),  # nothing is served before either
    ],
)
def test_the_last_of_a_phase_stays(roles: tuple[str, ...], leaves: int, phase: str | None) -> None:
    there = members(*roles)
    if phase is None:
        check_without(there[leaves], there)
        return
    with pytest.raises(ChangeRefused, match=f"last worker that can {phase}"):
        check_without(there[leaves], there)


def test_who_drains_is_no_help() -> None:
    there = members("prefill", "decode", "decode", draining=(1,))
    with pytest.raises(ChangeRefused):
        check_without(there[2], there)


def test_a_changed_worker_still_counts() -> None:
    there = members("prefill", "prefill", "decode")
    check_without(there[0], there, "decode")
    check_without(there[2], there, "both")
    with pytest.raises(ChangeRefused, match="last worker that can decode"):
        check_without(there[2], there, "prefill")


def test_a_worker_is_named_by_the_beginning_of_its_id() -> None:
    there: list[Any] = members("prefill", "decode", "decode")
    assert named("pre", there) is there[0]
    assert named("decode-2", there) is there[2]
    with pytest.raises(InvalidRequest, match=r"decode-1, decode-2"):
        named("decode", there)
    with pytest.raises(NotFound, match="nobody"):
        named("nobody", there)
