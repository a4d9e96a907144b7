"""docs/metrics.md is one table of what the registries have: no more, no less, in the same words."""

from __future__ import annotations

from pathlib import Path

from tests.deploy.metric_families import Family, all_families

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "metrics.md"
HEAD = "| metric | type | of | meaning |"


def line(family: Family, services: set[str]) -> str:
    of = "every service" if len(services) == 4 else ", ".join(sorted(services))
    return f"| `{family.name}` | {family.kind} | {of} | {family.text} |"


async def test_every_metric_is_in_the_table_and_nothing_else(tmp_path: Path) -> None:
    families = await all_families(tmp_path)
    wanted = sorted(line(family, services) for family, services in families.items())
    _, _, table = PAGE.read_text().partition(HEAD)
    written = [one for one in table.splitlines() if one.startswith("| `")]
    assert written == wanted, "the table should be:\n" + "\n".join(wanted)


async def test_names_follow_the_rules(tmp_path: Path) -> None:
    for family in await all_families(tmp_path):
        assert family.name.startswith(("halfmoon_", "vllm:")), family
        assert family.text, family
        if family.kind == "histogram":
            assert family.name.endswith("_seconds"), family
