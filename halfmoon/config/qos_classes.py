"""QoS classes as the configuration file and the control API write them.

`halfmoon.policy.admission.qos_classes.QosClass` checks their values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, NoReturn

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from halfmoon.config.section import Section
from halfmoon.errors import InvalidRequest
from halfmoon.kv.kv_policy import parse_kv_policy
from halfmoon.policy.admission.qos_classes import (
    NO_PROMISES,
    ClassTable,
    Degradation,
    EarlyRejection,
    MatchKind,
    MatchRule,
    QosClass,
)
from halfmoon.rpc.credentials.api_keys import rule_value

_MAX_RULES = 256
_MAX_VALUE_CHARS = 1_024
_MAX_HEADER_CHARS = 256
_MAX_TARGET_S = 1e6
_MAX_NAME_CHARS = 64
_HEADER_NAME = re.compile(r"[-!#$%&'*+.^_`|~0-9A-Za-z]+")  # a token of HTTP: RFC 9110, 5.6.2
_CONTROL = re.compile(r"[\0-\x08\x0a-\x1f\x7f]")
_PATH_STEPS = (".", "..")  # clients remove them from a URL
_OF_NO_CLASS = "none"  # what figures call requests that were refused before their class was known


class _Strict(BaseModel):
    """ "5" is not 5, true is not 1."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, hide_input_in_errors=True)


class RuleConfig(_Strict):
    """A rule that assigns matching requests to a class."""

    kind: MatchKind = Field(
        description="what is compared: an HTTP header, the API key, the tenant's name, or the model's name"
    )
    value: str = Field(
        max_length=_MAX_VALUE_CHARS,
        description="the value that matches; only `sha256:` and the id are kept of an API key",
    )
    header: str = Field("", max_length=_MAX_HEADER_CHARS, description="name of the header, for kind: header")

    @field_validator("value")
    @classmethod
    def _without_secret(cls, value: str, info: ValidationInfo) -> str:
        is_key = info.data.get("kind") == "api_key" and value and not _is_unsendable(value)
        return rule_value(value) if is_key else value


class ClassConfig(_Strict):
    """One class. The share `attainment` of its requests must meet the targets. Without targets it promises nothing."""

    priority: int = Field(0, ge=-1_000, le=1_000, description="smaller numbers are served first")
    reserved: float = Field(
        0.0, description="share of the decode workers' KV memory reserved for the class; lent to others while unused"
    )
    ttft_s: float | None = Field(None, le=_MAX_TARGET_S, description="target for the time to the first token")
    tbt_s: float | None = Field(None, le=_MAX_TARGET_S, description="target for the time between tokens")
    attainment: float = Field(0.9, description="share of requests that must meet the targets")
    early_rejection: EarlyRejection = Field(
        "strict",
        description="what gets 429: 'strict': every request predicted to miss a target; 'overload': only requests that "
        "miss it because of other requests, so that a slow host still serves those too long for the target",
    )
    rules: Annotated[list[RuleConfig], Field(fail_fast=True, max_length=_MAX_RULES)] = Field(
        default_factory=list, description="a request that matches one of them belongs to this class"
    )
    degradation: Annotated[list[Degradation], Field(fail_fast=True)] = Field(
        default_factory=list, description="what the class gives up before a request is refused, in this order"
    )
    capped_tokens: int = Field(
        NO_PROMISES.capped_tokens, lt=1 << 31, description="output tokens that cap_max_tokens leaves"
    )

    max_pause_s: float = Field(
        NO_PROMISES.max_pause_s,
        le=_MAX_TARGET_S,
        description="how long a running answer may be paused at a time for a higher class that needs its place or its "
        "KV memory; then it goes on for as long, before all classes; 0: never",
    )
    kv_policy: str | None = Field(
        None,
        max_length=32,
        description="which KV is kept of requests that name no `kv_policy` themselves, such as sinks:4+1024; default: "
        "all of it",
    )

    def as_class(self, name: str) -> QosClass:
        """Converts the section to a class. Raises InvalidRequest for values out of range."""
        kv_policy = None if self.kv_policy is None else parse_kv_policy(self.kv_policy)
        return QosClass(
            name,
            self.priority,
            self.reserved,
            self.ttft_s,
            self.tbt_s,
            self.attainment,
            tuple(MatchRule(rule.kind, rule.value, rule.header) for rule in self.rules),
            tuple(self.degradation),
            self.capped_tokens,
            self.early_rejection,
            self.max_pause_s,
            None if kv_policy is None else str(kv_policy),
        )


DEFAULT_TARGETS = ClassConfig(ttft_s=30.0, tbt_s=1.0, early_rejection="overload")
"""Targets of the class called default, unless the file or an operator changes them."""


class ClassesConfig(Section):
    """The classes that a file declares."""

    classes: dict[str, ClassConfig] = Field(
        default_factory=dict,
        description="QoS classes by name: rules that assign requests, and targets. The class called default takes "
        "requests that match no rule",
    )


def check_reachable(name: str, written: ClassConfig) -> None:
    """Raises InvalidRequest for a name that a URL cannot hold, for `none`, and for rules that match no request.

    Only edits are checked: classes that an earlier release wrote to the ledger stay active.
    """
    if name != name.strip() or name in _PATH_STEPS:
        raise InvalidRequest("a class's name must not begin or end with a space, nor be . or ..", param="name")
    if not (name.isprintable() and len(name) <= _MAX_NAME_CHARS):
        raise InvalidRequest(f"a class's name has at most {_MAX_NAME_CHARS} characters, all printable", param="name")
    if name == _OF_NO_CLASS:
        raise InvalidRequest(
            "a class cannot be called none: figures have the requests without a class under that name", param="name"
        )
    for index, rule in enumerate(written.rules):
        if rule.kind == "header" and rule.header and not _HEADER_NAME.fullmatch(rule.header):
            _refuse_rule(index, "header", "is not the name of an HTTP header")
        if rule.kind != "model" and _is_unsendable(rule.value):
            _refuse_rule(index, "value", "matches no request: HTTP strips spaces and forbids control characters")


def check_classes(classes: Mapping[str, ClassConfig]) -> None:
    """Raises InvalidRequest, which has the first mistake of each class, for those that cannot be active together."""
    made, mistakes = [], []
    for name, written in classes.items():
        try:
            check_reachable(name, written)
            made.append(written.as_class(name))
        except InvalidRequest as error:
            mistakes.append(f"{name}: {error.message}")
    if mistakes:
        raise InvalidRequest("; ".join(mistakes), param="classes")
    ClassTable(made)


def _is_unsendable(value: str) -> bool:
    """Whether no header can carry the value."""
    return value != value.strip() or _CONTROL.search(value) is not None


def _refuse_rule(index: int, part: str, problem: str) -> NoReturn:
    param = f"rules[{index}].{part}"
    raise InvalidRequest(f"{param} {problem}", param=param)
