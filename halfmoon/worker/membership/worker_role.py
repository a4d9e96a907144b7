"""The role of a worker, which gateways may change while it serves: a pure core. Time is an argument."""

from __future__ import annotations

from halfmoon.errors import StalePlacement
from halfmoon.pb.gateway_pb2 import RoleChange, WorkerIdentity
from halfmoon.pb.types_pb2 import BOTH, ROLE_UNSPECIFIED, Role


class WorkerRole:
    """Owns the role and its epoch, both in the worker's identity: how often the role was changed.

    A change that was decided under another epoch has no effect: whoever decided it did not know the latest one. What
    was accepted in an earlier role is not asked again.
    """

    def __init__(self, identity: WorkerIdentity) -> None:
        self._identity = identity
        self._changed_s = 0.0

    @property
    def role(self) -> Role.ValueType:
        """The role at present."""
        return self._identity.role

    @property
    def epoch(self) -> int:
        """How often the role was changed."""
        return self._identity.role_epoch

    def age_s(self, now_s: float) -> float:
        """Time since the last change; 0 before the first."""
        return now_s - self._changed_s if self.epoch else 0.0

    def change(self, change: RoleChange, now_s: float) -> bool:
        """Takes a change. Returns False, and does nothing, for one of another epoch or without a role."""
        if change.epoch != self.epoch or change.role == ROLE_UNSPECIFIED:
            return False
        self._identity.role = change.role
        self._identity.role_epoch += 1
        self._changed_s = now_s
        return True

    def check(self, epoch: int | None, *roles: Role.ValueType) -> None:
        """Raises StalePlacement unless the role is one of these, or `both`, and work was placed under this epoch.

        `epoch` is None where the caller does not know it.
        """
        name = Role.Name(self.role).lower()
        if self.role not in (*roles, BOTH):
            raise StalePlacement(f"this worker's role is {name}")
        if epoch is not None and epoch != self.epoch:
            raise StalePlacement(f"this worker's role was changed since then: it is {name}")
