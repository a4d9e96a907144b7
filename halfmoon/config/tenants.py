"""Tenants as the configuration file and the control API write them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Self

from pydantic import ByteSize, Field, model_validator

from halfmoon.config.section import Section
from halfmoon.errors import InvalidRequest
from halfmoon.policy.admission.qos_classes import DEFAULT_CLASS
from halfmoon.policy.admission.tenants import Tenant

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_MIN_RATE = 1e-3  # what takes longer than days is no rate
_MAX_RATE = 1e12
_MAX_BYTES = (1 << 63) - 1
_MIN_WEIGHT = 1e-3


class TenantConfig(Section):
    """What one tenant may use."""

    classes: list[str] | None = Field(
        None, min_length=1, max_length=256, description="classes that its requests may belong to; none: all"
    )
    default_class: str | None = Field(
        None, min_length=1, description="class of its requests that match no rule; none: the class called default"
    )
    requests_per_minute: float | None = Field(
        None, ge=_MIN_RATE, le=_MAX_RATE, description="limit on requests; none: no limit"
    )
    tokens_per_minute: float | None = Field(
        None, ge=_MIN_RATE, le=_MAX_RATE, description="limit on tokens of prompts and outputs together; none: no limit"
    )
    kv_bytes: ByteSize | None = Field(
        None, gt=0, le=_MAX_BYTES, description="KV kept for it in each store, such as 2GiB; none: no limit"
    )
    weight: float = Field(
        1.0,
        ge=_MIN_WEIGHT,
        le=1_000,
        description="its share of a class, relative to other tenants that have requests waiting",
    )
    cache_pool: str | None = Field(
        None, min_length=1, max_length=64, description="tenants of one pool share cached KV; none: its cache is its own"
    )

    @model_validator(mode="after")
    def _may_use_its_default(self) -> Self:
        if self.default_class is not None and self.classes is not None and self.default_class not in self.classes:
            raise ValueError(f"default_class {self.default_class!r} must be one of classes")
        return self

    def as_tenant(self, name: str) -> Tenant:
        """Converts the section to a tenant."""
        classes = None if self.classes is None else tuple(self.classes)
        kv_bytes = None if self.kv_bytes is None else int(self.kv_bytes)
        rates = (self.requests_per_minute, self.tokens_per_minute)
        return Tenant(name, classes, self.default_class, *rates, kv_bytes, self.weight, self.cache_pool)


class DeclaredTenant(TenantConfig):
    """One tenant and its keys."""

    keys: list[str] = Field(
        default_factory=list,
        max_length=256,
        description="its API keys, or `sha256:` and the digests that `halfmoon keys digest` prints",
    )


class TenantsConfig(Section):
    """The tenants that a file declares."""

    tenants: dict[str, DeclaredTenant] = Field(
        default_factory=dict,
        description="tenants by name: their keys and limits. Others are added with `halfmoon keys`",
    )


def check_tenants(tenants: Iterable[str]) -> None:
    """Raises InvalidRequest for names that `check_tenant_name` refuses."""
    for name in tenants:
        check_tenant_name(name)


def check_tenant_name(name: str) -> None:
    """Raises InvalidRequest for a name that URLs, logs and metrics cannot hold."""
    if not _NAME.fullmatch(name):
        raise InvalidRequest(
            "a tenant's name has at most 64 letters, digits, dots, dashes and underscores, the first a letter or digit",
            param="tenant",
        )


def check_tenant_classes(name: str, tenant: TenantConfig, configured: Collection[str]) -> None:
    """Raises InvalidRequest if the tenant is held to a class that is not configured. The default class always is."""
    known = {*configured, DEFAULT_CLASS}
    for named in (*(tenant.classes or ()), *filter(None, [tenant.default_class])):
        if named not in known:
            raise InvalidRequest(
                f"tenant {name} names the class {named!r}, which is not configured: there are "
                f"{', '.join(sorted(known))}; add it to the classes first",
                param="classes",
            )
