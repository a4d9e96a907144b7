"""Which tenant gives up a block when a tier is full."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halfmoon.catalog.block_identity import BlockMeta, block_id
from halfmoon.catalog.catalog import Catalog
from halfmoon.catalog.entry import Tier
from halfmoon.kv.owner import KVOwner
from halfmoon.policy.eviction import PolicyName, policy_named


def catalog(policy: PolicyName = "lru") -> Catalog:
    return Catalog({tier: policy_named(policy) for tier in Tier})


def block(number: int) -> bytes:
    return block_id(number.to_bytes(16, "big"))


def add(it: Catalog, tenant: str, *numbers: int) -> None:
    for number in numbers:
        it.add(replace(BlockMeta(block(number)), tenant=tenant), Tier.DRAM, 1)


def victims(it: Catalog, num: int) -> list[int]:
    found = [it.pop_victim(Tier.DRAM) for _ in range(num)]
    return [int.from_bytes(victim[-16:], "big") for victim in found if victim is not None]


def test_a_flood_of_one_tenant_pushes_out_its_own() -> None:
    it = catalog()
    add(it, "small", *range(10))
    for number in range(100, 1000):
        add(it, "flood", number)
        if it.num_blocks(Tier.DRAM) > 100:
            it.match([block(5)], 0.0)  # the small one is still there
            assert it.pop_victim(Tier.DRAM) is not None
    held = [entry.meta.id for entry in it if entry.meta.tenant == "small"]
    assert block(5) in held
    plain = catalog()
    add(plain, "", *range(10))
    for number in range(100, 1000):
        add(plain, "", number)
        if plain.num_blocks(Tier.DRAM) > 100:
            plain.pop_victim(Tier.DRAM)
    assert not any(block(number) in plain for number in range(10)), "without tenants the flood takes all"


def test_what_nobody_uses_goes_in_the_end() -> None:
    it = catalog()
    add(it, "idle", *range(10))
    for number in range(100, 20_000):
        add(it, "busy", number)
        if it.num_blocks(Tier.DRAM) > 100:
            it.pop_victim(Tier.DRAM)
    assert it.num_blocks(Tier.DRAM) == 100
    assert sum(entry.meta.tenant == "idle" for entry in it) <= 2


def test_equal_tenants_give_in_turns() -> None:
    it = catalog()
    for number in range(0, 40, 2):
        add(it, "a", number)
        add(it, "b", number + 1)
    gone = victims(it, 20)
    assert sum(number % 2 for number in gone) in range(8, 13)


def test_a_tenant_above_its_quota_gives_first_however_new_its_blocks() -> None:
    it = catalog()
    add(it, "old", *range(50))
    add(it, "over", *range(100, 105))
    it.tenants.set_quota(KVOwner("over", 3))
    assert victims(it, 3)[:2] == [100, 101]
    assert it.tenants.is_over("over") is False


@pytest.mark.parametrize("policy", ["lru", "lfu", "length-aware", "cost-aware"])
def test_one_tenant_alone_gets_the_policy_itself(policy: PolicyName) -> None:
    orders = []
    for tenant in ("", "alone"):
        it = catalog(policy)
        add(it, tenant, *range(20))
        it.match([block(3)], 0.0)
        orders.append(victims(it, 20))
    assert orders[0] == orders[1]
    assert len(orders[0]) == 20


def test_what_may_not_go_does_not_stand_in_the_way_of_others() -> None:
    it = catalog()
    add(it, "pinned", *range(10))
    add(it, "free", 100)
    for number in range(10):
        it.pin(block(number), True)
    assert victims(it, 2) == [100]
