"""QoS classes: whose requests they are, what they are promised, and what they give up before they are refused."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from halfmoon.errors import InvalidRequest

MatchKind = Literal["header", "api_key", "model"]
Degradation = Literal["cap_max_tokens", "lower_kv_precision", "shed_lowest_class"]
EarlyRejection = Literal["strict", "overload"]

DEFAULT_CLASS = "default"
_ROUNDING = 1e-9  # 0.1 three times and 0.7 may be more than 1


def _check(holds: bool, param: str, problem: str) -> None:
    if not holds:
        raise InvalidRequest(f"a class's {param} {problem}", param=param)


@dataclass(frozen=True, slots=True)
class MatchRule:
    """A request is of the class when this holds of it."""

    kind: MatchKind
    value: str  # of the header, the API key, or the model's alias
    header: str = ""  # such as x-customer-tier, in any case


@dataclass(frozen=True, slots=True)
class QosClass:
    """One class. Times are targets that `attainment` of its requests must meet; None promises nothing."""

    name: str
    priority: int = 0  # smaller goes first
    reserved: float = 0.0  # fraction of the cluster's decode memory that waits for it, and is lent out meanwhile
    ttft_s: float | None = None
    tbt_s: float | None = None
    attainment: float = 0.9
    rules: tuple[MatchRule, ...] = ()
    degradation: tuple[Degradation, ...] = ()  # in this order, each on top of those before
    capped_tokens: int = 256  # what cap_max_tokens leaves
    early_rejection: EarlyRejection = "strict"  # overload: only of what would meet its targets on an idle cluster

    def __post_init__(self) -> None:
        _check(bool(self.name), "name", "must not be empty")
        _check(0 <= self.reserved <= 1, "reserved", "must be between 0 and 1")
        _check(0 < self.attainment <= 1, "attainment", "must be above 0 and at most 1")
        _check(self.ttft_s is None or self.ttft_s > 0, "ttft_s", "must be above 0")
        _check(self.tbt_s is None or self.tbt_s > 0, "tbt_s", "must be above 0")
        _check(self.capped_tokens >= 1, "capped_tokens", "must be at least 1")
        _check(len(set(self.degradation)) == len(self.degradation), "degradation", "must name each step once")
        _check(all(rule.kind != "header" or rule.header for rule in self.rules), "rules", "must name the header")
        _check(all(rule.value for rule in self.rules), "rules", "must name a value: nothing is nobody's")


NO_PROMISES = QosClass(DEFAULT_CLASS)


@dataclass(frozen=True, slots=True)
class Caller:
    """What tells whose request it is."""

    headers: Mapping[str, str]  # names in lower case
    api_key: str = ""
    model: str = ""

    def satisfies(self, rule: MatchRule) -> bool:
        """Whether the rule holds of this request."""
        if rule.kind == "header":
            return self.headers.get(rule.header.lower()) == rule.value
        return (self.api_key if rule.kind == "api_key" else self.model) == rule.value


class ClassTable:
    """Owns the classes as of one version. A request is of the first class, by priority, with a rule that holds."""

    def __init__(self, classes: Iterable[QosClass] = (), version: int = 0) -> None:
        """Raises InvalidRequest for two classes of one name, or reservations of more than everything."""
        self.version = version
        self.classes = tuple(sorted(classes, key=lambda one: (one.priority, one.name)))
        names = [one.name for one in self.classes]
        _check(len(set(names)) == len(names), "name", "must differ from class to class")
        reserved = math.fsum(one.reserved for one in self.classes)
        _check(reserved <= 1 + _ROUNDING, "reserved", "must not add up to more than 1")
        self._default = next((one for one in self.classes if one.name == DEFAULT_CLASS), NO_PROMISES)

    @property
    def priorities(self) -> set[int]:
        """Of all classes, and of requests that are of none."""
        return {one.priority for one in self.classes} | {self._default.priority}

    def of(self, caller: Caller) -> QosClass:
        """The class of a request. Where no rule holds it is the one named default, else one that promises nothing."""
        for one in self.classes:
            if any(caller.satisfies(rule) for rule in one.rules):
                return one
        return self._default
