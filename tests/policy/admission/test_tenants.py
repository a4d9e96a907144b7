"""Tenants: who shares KV with whom, and which classes their requests belong to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.policy.admission.qos_classes import Caller, ClassTable, MatchRule, QosClass
from halfmoon.policy.admission.tenants import ANYONE, Tenant, kv_salt

NAMES = st.sampled_from(["", "a", "b"])
TENANTS = st.builds(lambda name, pool: Tenant(name, cache_pool=pool or None), NAMES, NAMES)
SALTS = st.one_of(st.none(), st.text(min_size=1, max_size=40))

GOLD = QosClass("gold", priority=-1, rules=(MatchRule("header", "gold", "x-tier"),))
OWN = QosClass("own", rules=(MatchRule("tenant", "acme"),))
DEFAULT = QosClass("default")


@given(TENANTS, SALTS, TENANTS, SALTS)
def test_salts_differ_unless_tenants_share_a_pool(
    one: Tenant, salt: str | None, two: Tenant, other: str | None
) -> None:
    pools = [(tenant.name and tenant.cache_pool) or None for tenant in (one, two)]
    is_one_cache = pools[0] == pools[1] if any(pools) else one.name == two.name
    assert (kv_salt(one, salt) == kv_salt(two, other)) == (is_one_cache and (salt or "") == (other or ""))


@given(TENANTS, SALTS)
def test_without_tenants_and_in_a_shared_cache_the_salt_is_the_clients_own(tenant: Tenant, salt: str | None) -> None:
    own = (salt or "").encode()
    assert kv_salt(ANYONE, salt) == own
    assert (kv_salt(tenant, salt, is_shared=True) == own) == (not tenant.name or tenant.cache_pool is None)


@given(st.text(max_size=256), SALTS)
def test_no_client_can_write_the_salt_of_a_tenant(written: str, salt: str | None) -> None:
    stranger = kv_salt(Tenant("stranger"), written, is_shared=True)
    assert stranger != kv_salt(Tenant("acme"), salt)
    assert kv_salt(Tenant("acme"), salt)[0] == 0xFF  # no text in UTF-8 begins so


@pytest.mark.parametrize(
    ("tenant", "tier", "expected"),
    [
        (ANYONE, "", "default"),
        (ANYONE, "gold", "gold"),
        (Tenant("acme"), "", "own"),
        (Tenant("acme"), "gold", "gold"),
        (Tenant("acme", classes=("own",)), "gold", "own"),
        (Tenant("other", classes=("default",)), "gold", "default"),
        (Tenant("other", default_class="gold"), "", "gold"),
        (Tenant("other", classes=("gold",)), "", "gold"),
        (Tenant("other", default_class="removed"), "", "default"),
    ],
)
def test_the_class_of_a_tenants_request(tenant: Tenant, tier: str, expected: str) -> None:
    table = ClassTable((GOLD, OWN, DEFAULT))
    assert table.of(Caller({"x-tier": tier}, tenant=tenant)).name == expected
