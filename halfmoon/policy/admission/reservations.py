"""Who may use how much of the cluster: reserved shares, and lending of what their owners do not use."""

from __future__ import annotations

from collections.abc import Iterable

from halfmoon.policy.admission.classes import QosClass

_MEMORY_S = 30.0  # how long an owner's demand is kept free after it was last there


class Reservations:
    """Owns what each class uses and lately wanted, in tokens of KV. Knows nothing of workers.

    A reservation keeps free what its owner wanted lately, at most its share: all of it is lent while the owner
    is away, and then nobody is counted: how full a worker may be is its own to say. A lent part comes back as the
    borrowers' requests end, for new ones find no room.
    """

    def __init__(self) -> None:
        self._used: dict[str, int] = {}
        self._wanted: dict[str, tuple[int, float]] = {}  # the highest use, the refused one included, and when

    def may_use(
        self,
        qos: QosClass,
        num_tokens: int,
        capacity_tokens: float,
        classes: Iterable[QosClass],
        now_s: float,
        in_use_tokens: float = 0.0,
    ) -> bool:
        """Whether `num_tokens` more may go to this class. The wish is remembered as demand either way.

        `in_use_tokens` is what workers say: more than is known here where other gateways use them, too.
        """
        used = self._used.get(qos.name, 0)
        self._note_demand(qos.name, used + num_tokens, now_s)
        if used + num_tokens <= qos.reserved * capacity_tokens:
            return True
        owners = [other for other in classes if other.name != qos.name and self._was_here_lately(other, now_s)]
        if not owners:
            return True
        kept = sum(self._kept(other, capacity_tokens) for other in owners)
        return max(sum(self._used.values()), in_use_tokens) + num_tokens + kept <= capacity_tokens

    def take(self, name: str, num_tokens: int) -> None:
        """A request of the class was placed."""
        self._used[name] = self._used.get(name, 0) + num_tokens

    def give_back(self, name: str, num_tokens: int) -> None:
        """It ended."""
        self._used[name] -= num_tokens
        assert self._used[name] >= 0, "more was given back than taken"

    def _was_here_lately(self, owner: QosClass, now_s: float) -> bool:
        return owner.reserved > 0 and owner.name in self._wanted and now_s - self._wanted[owner.name][1] <= _MEMORY_S

    def _kept(self, owner: QosClass, capacity_tokens: float) -> float:
        wanted, _ = self._wanted[owner.name]
        return max(0.0, min(wanted, owner.reserved * capacity_tokens) - self._used.get(owner.name, 0))

    def _note_demand(self, name: str, wanted: int, now_s: float) -> None:
        before, at_s = self._wanted.get(name, (0, now_s))
        if wanted >= before or now_s - at_s > _MEMORY_S:
            self._wanted[name] = (wanted, now_s)
