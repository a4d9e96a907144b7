"""The files for Prometheus and Grafana, checked by the real promtool and against the metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.metric_families import all_families

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
ADAPTER = ROOT / "deploy" / "kubernetes" / "many" / "adapter.yaml"
DASHBOARD = ROOT / "deploy" / "grafana" / "halfmoon.json"
_METRIC = re.compile(r"\b(?:halfmoon_|vllm:)\w+")

needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool: install prometheus")


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = ["promtool", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=PROMETHEUS)


def panel_queries() -> list[str]:
    panels: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", ())]


def scaling_queries() -> list[str]:
    rules: list[dict[str, Any]] = yaml.safe_load(ADAPTER.read_text())["rules"]["external"]
    return [rule["metricsQuery"] for rule in rules]


@needs_promtool
def test_promtool_takes_configuration_and_rules() -> None:
    for command in (("check", "config", "prometheus.yml"), ("check", "rules", "alerts.yml")):
        done = promtool(*command)
        assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_alerts_fire_when_they_should() -> None:
    done = promtool("test", "rules", "alerts_test.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("broken", [False, True])
def test_promtool_takes_every_query(tmp_path: Path, broken: bool) -> None:
    queries = [query.replace("$__rate_interval", "1m").replace("$gateway", ".*") for query in panel_queries()]
    queries += scaling_queries()
    queries += ["sum(rate(x[1m])"] if broken else []
    rules = [{"record": f"panel:{number}", "expr": query} for number, query in enumerate(queries)]
    file = tmp_path / "panels.yml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))  # JSON is YAML
    done = promtool("check", "rules", file)
    assert (done.returncode != 0) == broken, done.stdout + done.stderr


@needs_promtool
def test_queries_to_scale_by_have_a_value_before_any_request(tmp_path: Path) -> None:
    """Else a HorizontalPodAutoscaler does not scale down."""
    tests = [{"expr": query, "eval_time": "5m", "exp_samples": [{"value": 0}]} for query in scaling_queries()]
    series = [{"series": "halfmoon_gateway_requests_in_flight", "values": "0x10"}]
    file = tmp_path / "idle.yml"
    file.write_text(json.dumps({"tests": [{"interval": "1m", "input_series": series, "promql_expr_test": tests}]}))
    done = promtool("test", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


async def test_nothing_asks_for_a_metric_that_is_not_there(tmp_path: Path) -> None:
    there = set()
    for family in await all_families(tmp_path):
        suffixes = ("_bucket", "_count", "_sum") if family.kind == "histogram" else ("",)
        there |= {family.name + suffix for suffix in suffixes}
    files = [
        *panel_queries(),
        *scaling_queries(),
        (PROMETHEUS / "alerts.yml").read_text(),
        (PROMETHEUS / "alerts_test.yml").read_text(),
    ]
    asked = {name for text in files for name in _METRIC.findall(text)}
    assert asked
    assert asked <= there


def test_the_dashboard_is_what_its_script_writes() -> None:
    show = "import json, scripts.grafana_dashboard as one; print(json.dumps(one.dashboard()))"
    done = subprocess.run([sys.executable, "-c", show], capture_output=True, text=True, check=True, cwd=ROOT)
    assert json.loads(done.stdout) == json.loads(DASHBOARD.read_text())
