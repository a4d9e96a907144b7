"""What one tenant can find out about another's prompts: nothing, unless they share a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.services.gateway.fakes import MODEL
from tests.services.simulation.test_simulated_fleet import INSTANTLY, SimulatedFleet, running_fleet

MEMO = "The merger with Lunar Holdings will be announced on Friday. " * 4
OWN, OTHER = "hm-victim", "hm-stranger"


async def cached_tokens(fleet: SimulatedFleet, key: str, prompt: str = MEMO, **more: Any) -> int:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, **more}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with fleet.session.post(f"{fleet.gateway.http}/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        details = (await response.json())["usage"]["prompt_tokens_details"]
        return int(details["cached_tokens"]) if details else 0


async def oracle(fleet: SimulatedFleet, *keys: str, **more: Any) -> list[int]:
    """What each key reads of the memo that the first one sent before."""
    await cached_tokens(fleet, keys[0], **more)
    await fleet.until(lambda: fleet.gateway.cluster.membership.index.num_pairs > 0)
    return [await cached_tokens(fleet, key, **more) for key in keys]


async def test_cached_tokens_tell_a_tenant_nothing_of_another(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, INSTANTLY, api_key=(OWN, OTHER)) as fleet:
        await fleet.add(1, 1)
        own, other = await oracle(fleet, OWN, OTHER)
        assert own > 200  # of 240
        assert other == 0
        own, other = await oracle(fleet, OWN, OTHER, cache_salt="both send it")
        assert (own > 200, other) == (True, 0)
        assert await cached_tokens(fleet, OWN, cache_salt="mine alone") == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"api_key": (OWN, OTHER), "shared_cache": True},
        {"tenants": {"a": {"keys": [OWN, OTHER]}}},  # one tenant, two keys
        {"tenants": {"a": {"keys": [OWN], "cache_pool": "p"}, "b": {"keys": [OTHER], "cache_pool": "p"}}},
    ],
)
async def test_tenants_that_share_a_cache(tmp_path: Path, settings: dict[str, Any]) -> None:
    async with running_fleet(tmp_path, INSTANTLY, **settings) as fleet:
        await fleet.add(1, 1)
        own, other = await oracle(fleet, OWN, OTHER)
        assert own == other > 200
        assert await cached_tokens(fleet, OTHER, cache_salt="mine alone") == 0


async def test_without_keys_everybody_shares_prompts_as_before(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, INSTANTLY) as fleet:
        await fleet.add(1, 1)
        own, other = await oracle(fleet, "", OTHER)
        assert own == other > 200
