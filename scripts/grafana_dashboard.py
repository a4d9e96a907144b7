"""Writes deploy/grafana/halfmoon.json: panels from a short list, so that the dashboard can be reviewed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

TARGET = Path(__file__).parents[1] / "deploy" / "grafana" / "halfmoon.json"
_SOURCE = {"type": "prometheus", "uid": "${source}"}
_ON = '{instance=~"$gateway"}'


class Panel(NamedTuple):
    """One panel: queries by legend."""

    title: str
    unit: str
    queries: dict[str, str]
    is_stacked: bool = False


def _quantiles(metric: str) -> dict[str, str]:
    buckets = f"sum by (le) (rate({metric}_bucket{_ON}[$__rate_interval]))"
    return {f"p{100 * share:g}": f"histogram_quantile({share}, {buckets})" for share in (0.5, 0.9, 0.99)}


def _rate(metric: str, by: str = "", labels: str = _ON) -> str:
    total = f"rate({metric}{labels}[$__rate_interval])"
    return f"sum by ({by}) ({total})" if by else f"sum({total})"


ROWS: dict[str, list[Panel]] = {
    "Requests": [
        Panel("Time to first token", "s", _quantiles("halfmoon_gateway_ttft_seconds")),
        Panel("Time between tokens", "s", _quantiles("halfmoon_gateway_tbt_seconds")),
        Panel("Requests by outcome", "reqps", {"{{status}}": _rate("halfmoon_gateway_requests_total", "status")}, True),
        Panel(
            "Refusals by class and reason",
            "reqps",
            {"{{qos_class}} {{reason}}": _rate("halfmoon_gateway_refusals_total", "qos_class, reason")},
            True,
        ),
        Panel(
            "Tokens",
            "short",
            {
                "prompt": _rate("halfmoon_gateway_prompt_tokens_total"),
                "prompt, cached": _rate("halfmoon_gateway_cached_tokens_total"),
                "output": _rate("halfmoon_gateway_output_tokens_total"),
            },
        ),
        Panel(
            "Running",
            "short",
            {
                "requests": f"sum(halfmoon_gateway_requests_in_flight{_ON})",
                "moved to other workers per minute": f"60 * {_rate('halfmoon_gateway_retries_total')}",
            },
        ),
    ],
    "Workers": [
        Panel(
            "KV blocks in use",
            "percentunit",
            {"{{worker_id}}": f"1 - halfmoon_worker_free_blocks{_ON} / halfmoon_worker_total_blocks{_ON}"},
        ),
        Panel(
            "Requests by worker",
            "short",
            {
                "{{worker_id}} running": f"halfmoon_worker_num_running{_ON}",
                "{{worker_id}} waiting": f"halfmoon_worker_num_waiting{_ON}",
            },
        ),
        Panel(
            "Error of predictions",
            "percentunit",
            {"{{kind}} {{worker_id}}": f"halfmoon_prediction_error_ratio{_ON}"},
        ),
        Panel(
            "Engine steps, p90",
            "s",
            {
                "{{instance}}": "histogram_quantile(0.9, sum by (le, instance) "
                "(rate(halfmoon_engine_step_seconds_bucket[$__rate_interval])))"
            },
        ),
        Panel("Preemptions", "ops", {"{{instance}}": _rate("halfmoon_engine_preemptions_total", "instance", "")}),
        Panel("KV handed over", "Bps", {"{{direction}}": _rate("halfmoon_handover_bytes_total", "direction", "")}),
        Panel(
            "Exposed hand-over time, p99",
            "s",
            {
                "{{instance}}": "histogram_quantile(0.99, sum by (le, instance) "
                "(rate(halfmoon_handover_exposed_seconds_bucket[$__rate_interval])))"
            },
        ),
    ],
    "Store and ledger": [
        Panel(
            "Store use by tier",
            "percentunit",
            {"{{tier}}": "halfmoon_kvstore_used_bytes / (halfmoon_kvstore_budget_bytes > 0)"},
        ),
        Panel(
            "Blocks read by tier",
            "ops",
            {
                "{{tier}}": _rate("halfmoon_kvstore_hits_total", "tier", ""),
                "missed": _rate("halfmoon_kvstore_misses_total", "", ""),
            },
            True,
        ),
        Panel("Blocks evicted", "ops", {"{{tier}}": _rate("halfmoon_kvstore_evicted_total", "tier", "")}),
        Panel("Ledger rows", "ops", {"{{result}}": _rate("halfmoon_ledger_rows_total", "result")}),
    ],
}


def dashboard() -> dict[str, Any]:
    """The dashboard for import into Grafana 10 or later."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in ROWS.items():
        panels.append({"type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}, "collapsed": False})
        y += 1
        for number, panel in enumerate(row):
            panels.append(_panel(panel, x=12 * (number % 2), y=y + 8 * (number // 2)))
        y += 8 * -(-len(row) // 2)
    return {
        "uid": "halfmoon",
        "title": "Halfmoon",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_source_variable(), _gateway_variable()]},
        "panels": [{**panel, "id": number} for number, panel in enumerate(panels, 1)],
    }


def _panel(panel: Panel, x: int, y: int) -> dict[str, Any]:
    stacking = {"stacking": {"mode": "normal"}, "fillOpacity": 40} if panel.is_stacked else {"fillOpacity": 8}
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": 12, "h": 8},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "min": 0, "custom": {"showPoints": "never", **stacking}},
            "overrides": [],
        },
        "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list", "placement": "bottom"}},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": _SOURCE, "expr": expr, "legendFormat": legend}
            for number, (legend, expr) in enumerate(panel.queries.items())
        ],
    }


def _source_variable() -> dict[str, Any]:
    return {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _gateway_variable() -> dict[str, Any]:
    return {
        "name": "gateway",
        "label": "Gateway",
        "type": "query",
        "datasource": _SOURCE,
        "query": "label_values(halfmoon_gateway_requests_in_flight, instance)",
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
    }


if __name__ == "__main__":
    TARGET.write_text(json.dumps(dashboard(), indent=1) + "\n")
    print(TARGET)
