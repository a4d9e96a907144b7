"""Reserved shares of the cluster, and the lending of what their owners do not use."""

from __future__ import annotations

from collections.abc import Iterable

from halfmoon.policy.admission.qos_classes import QosClass

_MEMORY_S = 30.0  # how long an owner's demand is kept free after its latest request


class Reservations:
    """Owns what each class uses and recently wanted, in tokens of KV. Knows nothing of workers.

    A reservation keeps free what its owner recently wanted, at most its share. While the owner is away all of it is
    lent, and usage is not limited here: each worker decides how full it may be. A lent part comes back as borrowed
    requests end, since new ones find no room.
    """

    def __init__(self) -> None:
        self._used: dict[str, int] = {}
        self._wanted: dict[str, tuple[int, float]] = {}  # highest demand, including refused requests, and its time

    def may_use(
        self,
        qos: QosClass,
        num_tokens: int,
        capacity_tokens: float,
        classes: Iterable[QosClass],
        now_s: float,
        in_use_tokens: float = 0.0,
    ) -> bool:
        """Whether this class may use `num_tokens` more. Counts as its demand in either case.

        `in_use_tokens` is what workers report, which includes the requests of other gateways.
        """
        used = self._used.get(qos.name, 0)
        self._note_demand(qos.name, used + num_tokens, now_s)
        if used + num_tokens <= qos.reserved * capacity_tokens:
            return True
        owners = [other for other in classes if other.name != qos.name and self._is_active(other, now_s)]
        if not owners:
            return True
        kept = sum(self._kept(other, capacity_tokens) for other in owners)
        return max(sum(self._used.values()), in_use_tokens) + num_tokens + kept <= capacity_tokens

    def take(self, name: str, num_tokens: int) -> None:
        """Adds the tokens of a placed request to its class."""
        self._used[name] = self._used.get(name, 0) + num_tokens

    def give_back(self, name: str, num_tokens: int) -> None:
        """Returns the tokens of a request that has ended."""
        self._used[name] -= num_tokens
        assert self._used[name] >= 0, "more was given back than taken"

    def _is_active(self, owner: QosClass, now_s: float) -> bool:
        return owner.reserved > 0 and owner.name in self._wanted and now_s - self._wanted[owner.name][1] <= _MEMORY_S

    def _kept(self, owner: QosClass, capacity_tokens: float) -> float:
        wanted, _ = self._wanted[owner.name]
        return max(0.0, min(wanted, owner.reserved * capacity_tokens) - self._used.get(owner.name, 0))

    def _note_demand(self, name: str, wanted: int, now_s: float) -> None:
        before, at_s = self._wanted.get(name, (0, now_s))
        if wanted >= before or now_s - at_s > _MEMORY_S:
            self._wanted[name] = (wanted, now_s)
