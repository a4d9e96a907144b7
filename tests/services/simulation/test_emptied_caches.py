"""POST /reset_prefix_cache: what workers and stores had cached is gone, and the gateway knows it."""

from __future__ import annotations

from pathlib import Path

from tests.services.simulation.test_simulated_fleet import INSTANTLY, running_fleet
from tests.services.simulation.test_tenants_apart import cached_tokens


async def test_a_reset_really_empties_the_workers(tmp_path: Path) -> None:
    async with running_fleet(tmp_path, INSTANTLY) as fleet:
        await fleet.add(1, 1)
        index = fleet.gateway.cluster.membership.index
        await cached_tokens(fleet, "")
        await fleet.until(lambda: index.num_pairs > 0)
        assert await cached_tokens(fleet, "") > 0
        url = f"{fleet.gateway.http}/reset_prefix_cache"
        async with fleet.session.post(url) as response:
            said = await response.json()
        assert (said["success"], len(said["workers"]), said["stores"]) == (True, 2, [])
        await fleet.until(lambda: index.num_pairs == 0)
        assert await cached_tokens(fleet, "") == 0
        async with fleet.session.post(f"{url}?reset_running_requests=true") as response:
            assert (response.status, (await response.json())["error"]["param"]) == (400, "reset_running_requests")
