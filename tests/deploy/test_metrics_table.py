"""docs/reference/metrics.md is one table of what the registries have: no more, no less, in the same words."""

from __future__ import annotations

from pathlib import Path

from tests.deploy.metric_families import PAGE, all_families, page_of


async def test_every_metric_is_in_the_table_and_nothing_else(tmp_path: Path) -> None:
    page = PAGE.read_text()
    assert page == page_of(await all_families(tmp_path), page), "run python -m tests.deploy.metric_families"


async def test_names_follow_the_rules(tmp_path: Path) -> None:
    for family in await all_families(tmp_path):
        assert family.name.startswith(("halfmoon_", "vllm:")), family
        assert family.text, family
        if family.kind == "histogram" and not family.name.startswith("vllm:"):
            assert family.name.endswith("_seconds"), family
