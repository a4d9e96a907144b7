"""Which changes of a worker the cluster can bear: a pure core."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from halfmoon.errors import Incompatible, InvalidRequest, NotFound
from halfmoon.policy.view.worker_view import Role
from services.gateway.cluster.member import Member


class ChangeRefused(Incompatible):
    """A worker may not be changed so, now; `retry_after_ms` says when to come back, if that can help."""


def named(name: str, members: Sequence[Member]) -> Member:
    """The member with this worker id, or the only one whose id begins so. Raises NotFound or InvalidRequest."""
    found = [member for member in members if member.worker_id.startswith(name)]
    exact = [member for member in found if member.worker_id == name]
    if len(exact or found) == 1:
        return (exact or found)[0]
    if found:
        ids = ", ".join(sorted(member.worker_id for member in found))
        raise InvalidRequest(f"several workers have ids that begin with {name}: {ids}", param="name")
    raise NotFound(f"no worker is called {name}: `halfmoon top` shows them, and GET /halfmoon/v1/cluster")


def check_without(worker: Member, members: Iterable[Member], role: Role | None = None) -> None:
    """Raises ChangeRefused if the cluster serves now and would not without this worker, or with it in another role."""
    others = [member.role for member in members if member is not worker and not member.load.draining]
    after = others if role is None else [*others, role]
    if _serves([*others, worker.role]) and not _serves(after):
        raise ChangeRefused(
            f"{worker.worker_id} is the last worker that can {_phase(after)}: start or change another one first, or "
            "force it"
        )


def check_role_change(
    worker: Member, role: Role, members: Iterable[Member], dwell_s: float, now_s: float, *, force: bool
) -> None:
    """Raises ChangeRefused if the worker cannot serve the role now. `force` is for a person who knows better.

    A worker keeps a role for `dwell_s`, so that nothing changes it to and fro.
    """
    if not worker.identity.can_change_role:
        raise ChangeRefused(f"{worker.worker_id} is of a release that cannot change roles: start it again in the role")
    if worker.load.draining:
        raise ChangeRefused(f"{worker.worker_id} drains, and ends then")
    if force:
        return
    left_s = worker.role_since_s + dwell_s - now_s
    if left_s > 0:
        raise ChangeRefused(
            f"{worker.worker_id} has changed its role a moment ago, and may again in {left_s:.0f} s, or by force",
            retry_after_ms=int(1000 * left_s),
        )
    check_without(worker, members, role)


def check_epoch(worker: Member, epoch: int | None) -> None:
    """Raises ChangeRefused if a change was decided under another epoch of the worker's role."""
    if epoch is not None and epoch != worker.role_epoch:
        raise ChangeRefused(
            f"the role of {worker.worker_id} was changed since epoch {epoch}: it is {worker.role}, "
            f"epoch {worker.role_epoch}"
        )


def _serves(roles: Sequence[Role]) -> bool:
    return "both" in roles or {"prefill", "decode"} <= set(roles)


def _phase(roles: Sequence[Role]) -> Role | str:
    """The phase that these roles cannot serve."""
    if not roles:
        return "serve"
    return "decode" if "decode" not in roles else "prefill"
