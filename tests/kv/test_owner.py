from __future__ import annotations

import pytest

from halfmoon.errors import InvalidRequest
from halfmoon.kv.owner import SHARED, KVOwner


def test_nobody_in_particular_has_no_quota() -> None:
    assert KVOwner() == SHARED
    assert (SHARED.tenant, SHARED.quota_bytes) == ("", 0)


@pytest.mark.parametrize("tenant", ["a" * 65, "a b", "a\n", "ü", "../a/", "a\0"])
def test_a_tenant_is_a_short_plain_id(tenant: str) -> None:
    with pytest.raises(InvalidRequest, match="at most 64 letters"):
        KVOwner(tenant)


def test_a_quota_is_not_negative() -> None:
    with pytest.raises(InvalidRequest):
        KVOwner("a", -1)
