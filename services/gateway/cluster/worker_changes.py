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
    raise NotFound(f"no worker is called {name}: GET /halfmoon/v1/cluster lists them")


def check_without(worker: Member, members: Iterable[Member], role: Role | None = None) -> None:
    """Raises ChangeRefused if the cluster serves now and would not without this worker, or with it in another role."""
    others = [member.role for member in members if member is not worker and not member.load.draining]
    after = others if role is None else [*others, role]
    if _serves([*others, worker.role]) and not _serves(after):
        raise ChangeRefused(
            f"{worker.worker_id} is the last worker that can {_phase(after)}: start or change another one first, or "
            "force it"
        )


def _serves(roles: Sequence[Role]) -> bool:
    return "both" in roles or {"prefill", "decode"} <= set(roles)


def _phase(roles: Sequence[Role]) -> Role | str:
    """The phase that these roles cannot serve."""
    if not roles:
        return "serve"
    return "decode" if "decode" not in roles else "prefill"
