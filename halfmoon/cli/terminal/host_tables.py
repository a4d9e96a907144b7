"""The hosts of the gateways' workers, and the measured links between them, as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

Cluster = Mapping[str, Any]  # as the control API answers

_MAX_LINKS = 20


def hosts_tables(cluster: Cluster) -> list[Table]:
    """Returns tables of hosts and links; none where all workers are on one host."""
    hosts = cluster.get("hosts", ())
    if len(hosts) < 2:
        return []
    table = Table("host", "addresses", "workers", "stores", box=None, header_style="dim")
    for host in hosts:
        workers = ", ".join(f"{number} {role}" for role, number in sorted(host["num_workers"].items()))
        table.add_row(*map(Text, (host["name"], ", ".join(host["addresses"]), workers, ", ".join(host["stores"]))))
    return [table, *links_tables(cluster)]


def links_tables(cluster: Cluster) -> list[Table]:
    """Returns the table of measured links, slowest first; none where all workers are on one host."""
    links = cluster.get("host_links", ())
    if len(cluster.get("hosts", ())) < 2 or not links:
        return []
    table = Table("from", "to", "GB/s", "latency", "links", box=None, header_style="dim")
    for link in links[:_MAX_LINKS]:
        speed, latency = f"{link['bytes_per_s'] / 1e9:.3g}", f"{link['latency_s'] * 1e3:.3g} ms"
        table.add_row(Text(link["source"]), Text(link["target"]), speed, latency, str(link["num_links"]))
    if len(links) > _MAX_LINKS:
        table.caption = f"and {len(links) - _MAX_LINKS} more"
    return [table]
