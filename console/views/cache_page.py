"""The Cache page: which KV need not be computed again, where it lies, and how much of it is used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import streamlit as st

from console.charts import charts, time_charts
from console.charts.inline_svg import drawn
from console.charts.palette import BLUE, GREEN, TIERS, TOKENS
from console.gateway_api import GatewayApi
from console.live import at_once, empty, live
from console.plain_text import plain
from console.quantities import NOTHING, ago, count, share, size

_MINUTES = 30
_PLACEMENTS = 200
_WORKERS_SHOWN = 12
_DECISIONS = {
    "prefill_worker": ("prompts", "prefill worker chosen"),
    "decode_worker": ("prompts", "decode worker chosen"),
    "prefill_device": ("prompts", "device that was to compute them"),
    "prefix": ("prompts", "where the rest of the prefix was to come from"),
    "disaggregation": ("prompts", "whether a decode worker computed it"),
    "sharing": ("prompts", "whether several prefill workers computed it"),
    "direct_restore": ("failovers", "whether a decode worker restored it alone"),
    "copy": ("prompts", "whether the prefix was copied to a nearer store"),
    "move": ("answers", "what became of moves away from a decode worker that leaves"),
    "hot_spot": ("answers", "what became of moves off a busy decode worker"),
    "restore": ("prompts", "loaded, computed, or both, on the worker"),
    "source": ("sources", "what became of holders that were asked"),
    "missed_block": ("blocks", "asked for and not delivered"),
    "restored_token": ("prompt tokens", "where their KV came from"),
    "cache_read": ("reads", "of workers' caches by other workers"),
    "fetch_codec": ("holders", "encoding chosen for what they send"),
    "handover_token": ("tokens", "sent to the decode worker, or held there already"),
    "handover_codec": ("hand-overs", "encoding chosen for the link"),
    "stored_block": ("blocks", "what became of new ones at the stores"),
}
"""Unit and meaning of each decision that is counted. Its reasons are explained in docs/reference/metrics.md."""


class Seen(NamedTuple):
    """Data of the page."""

    cache: Mapping[str, Any]
    stores: Sequence[Mapping[str, Any]]
    series: Mapping[str, Any]
    placements: Sequence[Mapping[str, Any]]


def render(api: GatewayApi) -> None:
    """Draws the page."""
    st.title("Cache")
    looks = (api.cache, api.stores, partial(api.series, _MINUTES), partial(api.placements, _PLACEMENTS))
    live("cache", lambda: Seen(*at_once(*looks)), _draw)


def compression(tier: Mapping[str, Any], block_bytes: int | None) -> float | None:
    """How many times smaller blocks are in the tier than on a worker; None if it is empty."""
    used = tier["used_bytes"]
    return tier["num_blocks"] * block_bytes / used if used and block_bytes else None


def tier_row(store: Mapping[str, Any], tier: Mapping[str, Any], block_bytes: int | None) -> dict[str, Any]:
    """One row of the table."""
    return {
        "store": store["address"],
        "tier": tier["tier"],
        "full": min(1.0, tier["used_bytes"] / tier["budget_bytes"]) if tier["budget_bytes"] else None,
        "used": size(tier["used_bytes"]),
        "budget": size(tier["budget_bytes"]),
        "blocks": tier["num_blocks"],
        "copies": store.get("num_replicas") if tier["tier"] == "dram" else None,
        "begun elsewhere": store.get("num_begun_elsewhere") if tier["tier"] == "dram" else None,
        "compression": compression(tier, block_bytes),
        "hits": tier["num_hits_total"],
        "evicted": tier["num_evicted_total"],
        "waiting": tier["num_waiting"],
        "damaged": tier["num_corrupted_total"],
        "failed": tier["num_failed_total"],
    }


class Restored(NamedTuple):
    """Prompt tokens by source: the worker's own cache, a store or another worker, computing."""

    planned: dict[str, int]  # predicted at placement
    measured: dict[str, int]  # what actually happened


def restored(placements: Sequence[Mapping[str, Any]]) -> Restored:
    """Sums over the requests that have their first token."""
    total = Restored(dict.fromkeys(TOKENS, 0), dict.fromkeys(TOKENS, 0))
    for placement in placements:
        chosen = next(
            (
                candidate
                for candidate in placement["candidates"]
                if candidate["worker_id"] == placement["prefill_worker"]
            ),
            None,
        )
        measured = placement["measured"] or {}
        if chosen is None or measured.get("ttft_s") is None:
            continue
        _add(total.planned, placement["prompt_tokens"], chosen["cached_tokens"], chosen["fetched_tokens"])
        loaded = measured["loaded_tokens"]
        _add(total.measured, placement["prompt_tokens"], measured["cached_tokens"] - loaded, loaded)
    return total


def hit_shares(ages_s: Sequence[float], rates: Mapping[str, Sequence[float]]) -> list[float | None]:
    """Share of prompt tokens not computed again at each moment; None where there were none."""
    pairs = zip(rates["cached_tokens"], rates["prompt_tokens"], strict=True)
    return [cached / prompt if prompt else None for cached, prompt in pairs][: len(ages_s)]


def _add(total: dict[str, int], num_prompt: int, cached: int, loaded: int) -> None:
    total["cached"] += cached
    total["loaded"] += loaded
    total["computed"] += num_prompt - cached - loaded


def _draw(seen: Seen) -> None:
    cache, series = seen.cache, seen.series
    if not cache["workers"]:
        empty("No worker has joined", "The caches of workers appear here once they join.")
        return
    _figures(cache, seen.stores, series)
    left, right = st.columns(2)
    with left.container(border=True, height="stretch"):
        st.markdown("**Prompt tokens not computed again**")
        shares = {"cached": [part and 100 * part for part in hit_shares(series["age_s"], series["rates"])]}
        unit = "% of prompt tokens"
        drawn(time_charts.over_time(series["age_s"], shares, {"cached": GREEN}, unit, _MINUTES), "hit-share")
    with right.container(border=True, height="stretch"):
        st.markdown("**Restore decisions** of the latest prompts")
        _restores(seen.placements)
    st.subheader("Stores")
    _stores(seen.stores, cache.get("block_bytes"))
    left, right = st.columns([3, 2])
    with left:
        st.subheader("Hottest prefixes")
        _prefixes(cache["prefixes"])
    with right:
        st.subheader("Workers")
        _workers(cache["workers"])
    st.subheader("Decisions")
    _decisions(cache.get("decisions") or ())


def _figures(cache: Mapping[str, Any], stores: Sequence[Mapping[str, Any]], series: Mapping[str, Any]) -> None:
    together = series["together"]
    prompt, saved = together["prompt_tokens"], together["cached_tokens"]
    blocks = sum(worker["cached_blocks"] for worker in cache["workers"])
    stored = sum(tier["used_bytes"] for _, tier in tiers_of(stores))
    hits = sum(tier_hits(stores).values())
    reads = hits + sum(store.get("num_misses_total", 0) for store in stores)
    tiles = (
        ("Token hit rate", share(saved / prompt if prompt else None), f"of the last {_MINUTES} minutes' prompts"),
        ("Tokens saved", count(saved), f"in the last {_MINUTES} minutes"),
        ("Cached blocks", count(blocks), "blocks in the workers' prefix caches"),
        ("Bytes in stores", size(stored), "in all tiers"),
        ("Store hit rate", share(hits / reads if reads else None), "share of block reads since the stores started"),
    )
    for column, (label, value, note) in zip(st.columns(len(tiles)), tiles, strict=True):
        column.metric(label, value, border=True, help=note)


def _restores(placements: Sequence[Mapping[str, Any]]) -> None:
    planned, measured = restored(placements)
    if not any(measured.values()):
        st.caption("No prompt has been computed yet.")
        return
    kinds = (("planned", planned), ("done", measured))
    rows = [{"label": label, "part": name, "value": value} for label, tokens in kinds for name, value in tokens.items()]
    charts.show(charts.parts(rows, TOKENS, "prompt tokens"), "restores")
    st.caption(
        f"{count(measured['cached'])} were already on the worker, {count(measured['loaded'])} were loaded, "
        f"{count(measured['computed'])} computed. Loading and computing proceed towards each other until they meet, so "
        "the outcome differs from the plan if either was faster than expected."
    )


def decision_rows(decisions: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row for each decision that was made: how often, and for which reasons, the most frequent one first."""
    rows = []
    for decision, (unit, meaning) in _DECISIONS.items():
        counts = {one["reason"]: one["count"] for one in decisions if one["decision"] == decision and one["count"]}
        if counts:
            ranked = sorted(counts, key=lambda reason: -counts[reason])
            reasons = ", ".join(f"{reason.replace('_', ' ')} {count(counts[reason])}" for reason in ranked)
            rows.append({"decision": meaning, "of": unit, "number": sum(counts.values()), "by reason": reasons})
    return rows


def _decisions(decisions: Sequence[Mapping[str, Any]]) -> None:
    rows = decision_rows(decisions)
    if not rows:
        st.caption("No prompt has been placed yet.")
        return
    columns = {"of": st.column_config.TextColumn(width=115), "by reason": st.column_config.TextColumn(width="large")}
    st.dataframe(rows, column_config=columns, hide_index=True, key="decisions")
    st.caption("Since this gateway and the workers that are here started.")


def _stores(stores: Sequence[Mapping[str, Any]], block_bytes: int | None) -> None:
    if not stores:
        st.caption("Neither the workers nor the gateway use a store: start them with --kv-store host:port.")
        return
    for store in stores:
        if store["state"] == "away":
            why = plain(f"The store at {store['address']} does not answer: {store['reason']}")
            st.warning(why, icon=":material/cloud_off:")
    tiers = tiers_of(stores)
    if not tiers:
        return
    for store, tier in tiers:
        if tier.get("trouble"):
            why = plain(f"The {tier['tier']} tier of the store at {store['address']} is in trouble: {tier['trouble']}")
            st.warning(why, icon=":material/warning:")
    bar = st.column_config.ProgressColumn(format="percent", min_value=0, max_value=1)
    times = st.column_config.NumberColumn(format="%.2f×")
    rows = [tier_row(store, tier, block_bytes) for store, tier in tiers]
    st.dataframe(
        rows, column_config={"full": bar, "compression": times}, hide_index=True, placeholder=NOTHING, key="tiers"
    )
    if len(stores) > 1:
        st.caption(
            "The stores are one pool: each block is kept about once, so a prompt that several workers computed lies on "
            "several stores (*begun elsewhere*: runs of blocks behind another store's). *Copies* are of prefixes asked "
            "for again and again near a store; unused ones are dropped."
        )
    hits = [{"label": "blocks read", "part": name, "value": value} for name, value in tier_hits(stores).items()]
    if hits:
        charts.show(charts.parts(hits, TIERS, "blocks"), "tier-hits")


def tier_hits(stores: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Blocks read from each kind of tier, over all stores; kinds without reads are left out."""
    hits = Counter[str]()
    for _, tier in tiers_of(stores):
        hits[tier["tier"]] += tier["num_hits_total"]
    return dict(+hits)


def tiers_of(stores: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """All tiers with their stores; a store that is away has none."""
    return [(store, tier) for store in stores for tier in store.get("tiers", ())]


def _prefixes(prefixes: Sequence[Mapping[str, Any]]) -> None:
    if not prefixes:
        st.caption("No prompt has shared a prefix with an earlier one yet.")
        return
    rows = [
        {
            "prefix": prefix["key"],
            "tokens": prefix["tokens"],
            "uses": prefix["uses"],
            "tokens saved": prefix["tokens"] * prefix["uses"],
            "replicas": prefix["replicas"],
            "last": ago(prefix["age_s"]),
        }
        for prefix in prefixes
    ]
    st.dataframe(rows, hide_index=True, placeholder=NOTHING, key="prefixes")


def _workers(workers: Sequence[Mapping[str, Any]]) -> None:
    """Draws the workers with the most cached blocks."""
    ranked = sorted(workers, key=lambda worker: -worker["cached_blocks"])
    rows = [
        {
            "worker": worker["worker_id"],
            "cached": worker["cached_blocks"] / worker["total_blocks"] if worker["total_blocks"] else None,
            "blocks": worker["cached_blocks"],
            "tokens": worker["cached_blocks"] * worker["block_tokens"],
        }
        for worker in ranked[:_WORKERS_SHOWN]
    ]
    bar = st.column_config.ProgressColumn("of its memory", format="percent", min_value=0, max_value=1, color=BLUE)
    st.dataframe(rows, column_config={"cached": bar}, hide_index=True, placeholder=NOTHING, key="caches")
    if len(ranked) > _WORKERS_SHOWN:
        st.caption(f"The first {_WORKERS_SHOWN} of {len(ranked)} workers.")
