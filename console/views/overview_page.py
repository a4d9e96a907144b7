"""The Overview page: the cluster as it is, and the last minutes compared with the targets."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import streamlit as st

from console.charts import cluster_map, time_charts
from console.charts.host_frames import link_row
from console.charts.inline_svg import drawn
from console.charts.palette import BLUE, GREEN, GREY, ORANGE, OUTCOMES, PERCENTILES, PURPLE, RED, SKY
from console.charts.worker_shapes import standing
from console.forms.worker_form import draw_worker_form
from console.gateway_api import GatewayApi
from console.live import at_once, empty, live, show_message
from console.plain_text import plain
from console.quantities import NOTHING, count, seconds, share

MINUTES = (5, 10, 30)
_REASONS = {
    "ttft": BLUE, "tbt": ORANGE, "reservation": PURPLE, "fair share": PURPLE, "shed": SKY,
    "no room": GREEN, "no worker": RED, "bad request": GREY,
}  # fmt: skip
_MS = 1000


class Seen(NamedTuple):
    """Data of the page."""

    cluster: Mapping[str, Any]
    stores: Sequence[Mapping[str, Any]]
    series: Mapping[str, Any]
    classes: Sequence[Mapping[str, Any]]
    minutes: int


def render(api: GatewayApi) -> None:
    """Draws the page."""
    title, choice = st.columns([2, 1], vertical_alignment="bottom")
    title.title("Overview")
    show_message()
    chosen = choice.segmented_control(
        "Last minutes", MINUTES, default=MINUTES[1], format_func=lambda m: f"{m} min", wrap=True
    )
    minutes = int(chosen or MINUTES[1])
    looks = (partial(api.cluster, cluster_map.MAX_LINKS), api.stores, partial(api.series, minutes), api.classes)
    live("overview", lambda: Seen(*at_once(*looks), minutes), partial(_draw, api))


def attainment(together: Mapping[str, Any]) -> float | None:
    """Share of good requests. Refusals and failures count against it; requests without a class are left out."""
    counts = [outcomes for name, outcomes in together["classes"].items() if name != "none"]
    ended = sum(outcomes["ended"] for outcomes in counts)
    return sum(outcomes["good"] for outcomes in counts) / ended if ended else None


def outcome_rates(requests: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Requests per second by outcome. Requests that completed too late count as late."""
    good, refused, failed = (requests[name] for name in ("good", "refused", "failed"))
    rows = zip(requests["ended"], good, refused, failed, strict=True)
    late = [max(ended - fine - turned - broken, 0.0) for ended, fine, turned, broken in rows]
    return {"good": list(good), "late": late, "refused": list(refused), "failed": list(failed)}


def targets(classes: Sequence[Mapping[str, Any]], name: str, factor: float = 1.0) -> dict[str, float]:
    """Targets of one kind by class, for lines on a chart."""
    return {qos_class["name"]: qos_class[name] * factor for qos_class in classes if qos_class.get(name) is not None}


def worker_row(worker: Mapping[str, Any], silent_after_s: float) -> dict[str, Any]:
    """One row of the table."""
    load = worker.get("load") or {}
    is_ = standing(worker, silent_after_s)
    return {
        "worker": worker["worker_id"],
        "role": worker["role"],
        "state": is_.word,
        "KV in use": None if is_.word == "gone" else is_.used,
        "running": load.get("num_running"),
        "waiting": load.get("num_waiting"),
        "arriving": load.get("num_reserved"),
        "prompt tokens waiting": load.get("waiting_prefill_tokens"),
        "step (ms)": _ms(worker.get("measured_step_s")),
        "predicted (ms)": _ms(worker.get("predicted_step_s")),
        "cached blocks": worker.get("cached_blocks"),
        "device": worker.get("device"),
        "host": worker.get("host"),
        "address": worker.get("address"),
        "heard (s ago)": worker.get("age_s"),
    }


def busiest(workers: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Workers that left first, then by number of requests."""

    def rank(worker: Mapping[str, Any]) -> tuple[bool, int]:
        load = worker.get("load") or {}
        return "left_s_ago" not in worker, -load.get("num_running", 0) - load.get("num_waiting", 0)

    return sorted(workers, key=rank)


def _draw(api: GatewayApi, seen: Seen) -> None:
    cluster, series = seen.cluster, seen.series
    workers = cluster_map.all_workers(cluster)
    _headline(cluster)
    _figures(series, workers)
    if workers:
        drawn(cluster_map.draw(cluster, seen.stores), "cluster")
    else:
        empty("No worker has joined", "Workers register with the gateway by themselves when they start.")
    is_working = any((worker.get("load") or {}).get("num_running") for worker in workers)
    if series["age_s"] and (is_working or any(series["requests"]["ended"])):
        _charts(seen)
    else:
        _first_steps(api.url, cluster.get("served_model") or "", seen.minutes)
    _table(api, workers, cluster["silent_after_s"])
    _links(cluster)
    _peers(cluster)


def _headline(cluster: Mapping[str, Any]) -> None:
    missing = cluster.get("missing")
    if missing:
        st.warning(f"Requests are refused: there is no {' and no '.join(missing)}.", icon=":material/block:")
    uptime, context = seconds(cluster.get("uptime_s")), cluster.get("context_tokens")
    st.caption(
        f"**{plain(cluster.get('served_model') or 'no model', 80)}** · context {context or '?'} tokens · up {uptime}"
    )


def _figures(series: Mapping[str, Any], workers: Sequence[Mapping[str, Any]]) -> None:
    together, rates, requests = series["together"], series["rates"], series["requests"]
    running = sum((worker.get("load") or {}).get("num_running", 0) for worker in workers)
    waiting = sum((worker.get("load") or {}).get("num_waiting", 0) for worker in workers)
    tiles = (
        ("Requests/s", count(_latest(requests["ended"])), f"{running} running, {waiting} waiting"),
        ("Tokens/s", count(_latest(rates["output_tokens"])), "of outputs"),
        ("TTFT p50", seconds(together["ttft_s"]["p50"]), _p99(together["ttft_s"])),
        ("TBT p50", seconds(together["tbt_s"]["p50"]), _p99(together["tbt_s"])),
        ("In time", share(attainment(together)), "of all requests, refusals included"),
        ("KV in use", share(_latest(series["used_share"])), "of all workers' blocks"),
    )
    for column, (label, value, note) in zip(st.columns(len(tiles)), tiles, strict=True):
        column.metric(label, value, border=True, help=note or None)


def _first_steps(gateway_url: str, model: str, minutes: int) -> None:
    """What to do where nothing was asked."""
    empty(f"No request in the last {minutes} minutes", "Ask on the Try it page, or from a terminal:", ":material/chat:")
    body = json.dumps(
        {"model": model, "stream": True, "messages": [{"role": "user", "content": "What is a half moon?"}]}
    )
    st.code(
        f"curl -N {gateway_url}/v1/chat/completions -H 'Content-Type: application/json' -d '{body}'",
        "sh",
        wrap_lines=True,
    )


def _charts(seen: Seen) -> None:
    series = seen.series
    left, right = st.columns(2)
    ttft_s, tbt_s = series["ttft_s"], series["tbt_s"]
    with left.container(border=True):
        st.markdown("**Time to first token**")
        _over_time(seen, _scaled(ttft_s), PERCENTILES, "ms", "ttft", targets(seen.classes, "ttft_s", _MS))
    with right.container(border=True):
        st.markdown("**Time between tokens**")
        _over_time(seen, _scaled(tbt_s), PERCENTILES, "ms", "tbt", targets(seen.classes, "tbt_s", _MS))
    with left.container(border=True):
        st.markdown("**Requests by outcome**")
        _stacked(seen, outcome_rates(series["requests"]), OUTCOMES, "outcomes", "No request ended.")
    with right.container(border=True):
        st.markdown("**Refusals by reason**")
        _stacked(seen, series["refusals"], _REASONS, "refusals", "No request was refused.")
    with left.container(border=True):
        st.markdown("**Tokens**")
        lines = {"prompt, computed": series["rates"]["prefill_tokens"], "output": series["rates"]["output_tokens"]}
        colours = {"prompt, computed": BLUE, "output": ORANGE}
        _over_time(seen, lines, colours, "tokens/s", "tokens")
    with right.container(border=True):
        st.markdown("**Queues**")
        lines = {"running": series["num_running"], "waiting": series["num_waiting"]}
        _over_time(seen, lines, {"running": GREEN, "waiting": PURPLE}, "requests", "queues")


def _over_time(
    seen: Seen,
    lines: Mapping[str, Sequence[float | None]],
    colours: Mapping[str, str],
    unit: str,
    name: str,
    limits: Mapping[str, float] | None = None,
) -> None:
    drawn(time_charts.over_time(seen.series["age_s"], lines, colours, unit, seen.minutes, limits), f"overview-{name}")


def _stacked(
    seen: Seen, bands: Mapping[str, Sequence[float]], colours: Mapping[str, str], name: str, nothing: str
) -> None:
    series = seen.series
    svg = time_charts.stacked(series["age_s"], bands, colours, "requests/s", seen.minutes, series["bucket_s"], nothing)
    drawn(svg, f"overview-{name}")


def _table(api: GatewayApi, workers: Sequence[Mapping[str, Any]], silent_after_s: float) -> None:
    if not workers:
        return
    table = st.expander(
        f"All {len(workers)} workers in a table", key="workers-table", on_change="rerun", icon=":material/table_rows:"
    )
    if not table.open:  # the browser needs half a second for its first table
        return
    columns = {
        "KV in use": st.column_config.ProgressColumn(format="percent", min_value=0, max_value=1),
        "step (ms)": st.column_config.NumberColumn(format="%.1f"),
        "predicted (ms)": st.column_config.NumberColumn(format="%.1f"),
        "heard (s ago)": st.column_config.NumberColumn(format="%.1f"),
    }
    table.dataframe(
        [worker_row(worker, silent_after_s) for worker in busiest(workers)],
        column_config=columns,
        hide_index=True,
        placeholder=NOTHING,
        key="workers",
    )
    with table:
        draw_worker_form(api, workers)


def _links(cluster: Mapping[str, Any]) -> None:
    """The measured links between hosts, slowest first, where there are several hosts."""
    links = cluster.get("host_links", ())
    if len(cluster.get("hosts", ())) < 2 or not links:
        return
    table = st.expander("Links between hosts", key="links-table", on_change="rerun", icon=":material/lan:")
    if table.open:
        columns = {name: st.column_config.NumberColumn(format="%.2f") for name in ("GB/s", "latency (ms)")}
        table.dataframe([link_row(link) for link in links], column_config=columns, hide_index=True, key="links")


def peer_row(peer: Mapping[str, Any]) -> dict[str, Any]:
    """One peer gateway, and what became of the requests that it was offered."""
    offers = peer["offers"]
    failed = ("slow", "away", "unfit", "failed", "broken")
    return {
        "peer": peer["url"],
        "state": "asked" if peer["state"] == "closed" else "left alone after failures",
        "answered": offers.get("served", 0),
        "too late there, too": offers.get("declined", 0) + offers.get("late", 0),
        "failed": sum(offers.get(outcome, 0) for outcome in failed),
        "not asked": offers.get("paused", 0) + offers.get("busy", 0),
    }


def _peers(cluster: Mapping[str, Any]) -> None:
    """The peer gateways, where there are any."""
    peers = cluster.get("peers", ())
    if peers:
        table = st.expander("Peer clusters", key="peers-table", on_change="rerun", icon=":material/hub:")
        if table.open:
            table.dataframe([peer_row(peer) for peer in peers], hide_index=True, key="peers")


def _scaled(percentiles: Mapping[str, Sequence[float | None]]) -> dict[str, list[float | None]]:
    return {name: [_ms(value) for value in percentiles[name]] for name in PERCENTILES}


def _latest(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else value_s * _MS


def _p99(percentiles: Mapping[str, float | None]) -> str:
    return f"p90 {seconds(percentiles['p90'])}, p99 {seconds(percentiles['p99'])}"
