"""QoS classes: which requests belong to them, their targets, and how they degrade before refusal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from halfmoon.errors import InvalidRequest
from halfmoon.policy.admission.tenants import ANYONE, Tenant

MatchKind = Literal["header", "api_key", "tenant", "model"]
Degradation = Literal["cap_max_tokens", "lower_kv_precision", "shed_lowest_class"]
EarlyRejection = Literal["strict", "overload"]

DEFAULT_CLASS = "default"
BATCH_CLASS = "batch"
_LAST = 1_001  # the priority after all that a class may be given
_ROUNDING = 1e-9  # three times 0.1 plus 0.7 may exceed 1


def _check(holds: bool, param: str, problem: str) -> None:
    if not holds:
        raise InvalidRequest(f"a class's {param} {problem}", param=param)


@dataclass(frozen=True, slots=True)
class MatchRule:
    """A condition that puts a request into a class."""

    kind: MatchKind
    value: str  # of the header, the API key as `Caller` has it, the tenant's name, or the model alias
    header: str = ""  # such as x-customer-tier, case-insensitive


@dataclass(frozen=True, slots=True)
class QosClass:
    """One class. `attainment` of its requests must meet each target; None sets no target."""

    name: str
    priority: int = 0  # smaller goes first
    reserved: float = 0.0  # fraction of the cluster's decode memory kept for it, and lent out while unused
    ttft_s: float | None = None
    tbt_s: float | None = None
    attainment: float = 0.9
    rules: tuple[MatchRule, ...] = ()
    degradation: tuple[Degradation, ...] = ()  # steps in this order, each on top of those before
    capped_tokens: int = 256  # what cap_max_tokens leaves
    early_rejection: EarlyRejection = "strict"  # overload: reject only what an idle cluster would serve in time
    max_pause_s: float = 0.0  # how long its answers may be paused for higher classes at a time; 0: never
    kv_policy: str | None = None  # of requests that name none (`halfmoon.kv.kv_policy`); None: all KV is kept
    has_promises: bool = True  # False: its targets are other classes', by which its own requests are only admitted

    def __post_init__(self) -> None:
        _check(bool(self.name), "name", "must not be empty")
        _check(0 <= self.reserved <= 1, "reserved", "must be between 0 and 1")
        _check(0 < self.attainment <= 1, "attainment", "must be above 0 and at most 1")
        _check(self.ttft_s is None or self.ttft_s > 0, "ttft_s", "must be above 0")
        _check(self.tbt_s is None or self.tbt_s > 0, "tbt_s", "must be above 0")
        _check(self.max_pause_s >= 0, "max_pause_s", "must not be negative")
        _check(self.capped_tokens >= 1, "capped_tokens", "must be at least 1")
        _check(len(set(self.degradation)) == len(self.degradation), "degradation", "must name each step once")
        _check(all(rule.kind != "header" or rule.header for rule in self.rules), "rules", "must name the header")
        _check(all(rule.value for rule in self.rules), "rules", "must name a value")

    @property
    def tbt_target_s(self) -> float:
        """What bounds prompts that are computed beside its answers, in seconds a step; inf: nothing."""
        return math.inf if self.tbt_s is None or not self.has_promises else self.tbt_s


NO_PROMISES = QosClass(DEFAULT_CLASS)


@dataclass(frozen=True, slots=True)
class Caller:
    """What a request is classified by."""

    headers: Mapping[str, str]  # names in lower case
    api_key: str = ""  # its public name, not the secret
    model: str = ""
    tenant: Tenant = ANYONE

    def satisfies(self, rule: MatchRule) -> bool:
        """Whether the rule holds for this request."""
        if rule.kind == "header":
            return self.headers.get(rule.header.lower()) == rule.value
        own = {"api_key": self.api_key, "tenant": self.tenant.name, "model": self.model}
        return own[rule.kind] == rule.value


class ClassTable:
    """Owns the classes. A request belongs to the first class, by priority, with a rule that holds."""

    def __init__(self, classes: Iterable[QosClass] = ()) -> None:
        """Raises InvalidRequest if two classes share a name, or if reservations exceed the cluster."""
        self.classes = tuple(sorted(classes, key=lambda qos: (qos.priority, qos.name)))
        names = [qos.name for qos in self.classes]
        _check(len(set(names)) == len(names), "name", "must differ from class to class")
        reserved = math.fsum(qos.reserved for qos in self.classes)
        _check(reserved <= 1 + _ROUNDING, "reserved", "must not add up to more than 1")
        self._default = next((qos for qos in self.classes if qos.name == DEFAULT_CLASS), NO_PROMISES)

    @property
    def priorities(self) -> set[int]:
        """The priorities of all classes, and of requests without a class."""
        return {qos.priority for qos in self.classes} | {self._default.priority}

    @property
    def of_batches(self) -> QosClass:
        """The class called batch or, without one, the lowest: refused where the strictest target would be missed."""
        own = next((qos for qos in self.classes if qos.name == BATCH_CLASS), None)
        if own is not None:
            return own
        ttft_s = min((qos.ttft_s for qos in self.classes if qos.ttft_s is not None), default=None)
        tbt_s = min((qos.tbt_s for qos in self.classes if qos.tbt_s is not None), default=None)
        return QosClass(BATCH_CLASS, _LAST, ttft_s=ttft_s, tbt_s=tbt_s, early_rejection="overload", has_promises=False)

    def named(self, name: str) -> QosClass:
        """The class of this name, or else that of requests that match no rule."""
        return next((qos for qos in self.classes if qos.name == name), self._default)

    def of(self, caller: Caller) -> QosClass:
        """The class of a request: of those that its tenant may use, the first with a rule that holds.

        If none holds, the tenant's default class; without one, the class named default, or else one without targets.
        """
        tenant = caller.tenant
        for qos in self.classes:
            if tenant.may_use(qos.name) and any(caller.satisfies(rule) for rule in qos.rules):
                return qos
        own_default = tenant.usual_class(DEFAULT_CLASS)
        return next((qos for qos in self.classes if qos.name == own_default), self._default)
