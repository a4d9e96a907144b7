"""Every metric that the services have, out of their own registries.

`python -m tests.deploy.metric_families` writes the table of docs/reference/metrics.md anew.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from halfmoon.ledger.ledger import open_ledger
from halfmoon.worker.metrics import WorkerMetrics
from services.gateway.cluster.membership import Membership
from services.gateway.cluster.prefix_replication import PrefixCopies
from services.gateway.telemetry.metrics import GatewayMetrics
from services.gateway.telemetry.recent_telemetry import RecentTelemetry
from services.kvstore.metrics import KVStoreMetrics
from services.kvstore.pool import Pool
from services.planner.metrics import PlannerMetrics

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"
_RULE = "|---|---|---|---|\n"


class Family(NamedTuple):
    """One metric, as one service has it."""

    name: str  # as it is scraped: counters end in _total
    kind: str
    text: str


def _families(registry: CollectorRegistry) -> Iterator[Family]:
    for metric in registry.collect():
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        yield Family(name, metric.type, metric.documentation)


async def all_families(tmp_path: Path) -> dict[Family, set[str]]:
    """With the services that have them."""
    membership = Membership("f", 1.0)
    copies = PrefixCopies(membership, 1.0)
    async with open_ledger(f"sqlite:///{tmp_path / 'ledger.db'}") as ledger:
        registries = {
            "gateway": GatewayMetrics(membership, ledger, RecentTelemetry(), copies, "m").registry,
            "worker": WorkerMetrics().registry,
            "kvstore": KVStoreMetrics(Pool(memoryview(bytearray(1024)))).registry,
            "planner": PlannerMetrics().registry,
        }
        found: dict[Family, set[str]] = {}
        for service, registry in registries.items():
            for family in _families(registry):
                found.setdefault(family, set()).add(service)
    return found


def page_of(families: Mapping[Family, set[str]], page: str) -> str:
    """The page with this table in place of its own."""
    lines = []
    for family, services in families.items():
        of = "every service" if len(services) == 4 else ", ".join(sorted(services))
        lines.append(f"| `{family.name}` | {family.kind} | {of} | {family.text.replace('|', chr(92) + '|')} |")
    return page.partition(_RULE)[0] + _RULE + "\n".join(sorted(lines)) + "\n"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as directory:
        PAGE.write_text(page_of(asyncio.run(all_families(Path(directory))), PAGE.read_text()))
