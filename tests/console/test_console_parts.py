"""The parts of the console that draw and reckon without a page."""

from __future__ import annotations

from typing import Any, get_args
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("streamlit")

from console.charts import charts, cluster_map, time_charts
from console.charts.host_frames import link_row
from console.charts.palette import SPANS, TTFT_PARTS
from console.charts.worker_shapes import standing
from console.forms.class_form import preview_sentence, rules_of, seconds_of
from console.forms.class_history import change, undo_of
from console.plain_text import plain
from console.quantities import ago, count, seconds, share, size
from console.sign_in import is_right
from console.views.cache_page import decision_rows, restored
from console.views.overview_page import attainment, outcome_rates, peer_row
from console.views.placements_page import candidate_parts, pairs, placement_row, prompt_side
from halfmoon.policy.values import Disaggregation
from tests.console.fake_gateway import CACHE, CLUSTER, EDITS, GOLD, PLACEMENT, PREVIEW, REFUSED, STORES, WORKER


def drawn(cluster: dict[str, Any]) -> ElementTree.Element:
    """It is well-formed, or this raises."""
    return ElementTree.fromstring(cluster_map.draw(cluster, STORES))


def of_worker(root: ElementTree.Element) -> dict[str, str]:
    return {one.get("data-worker", ""): one.get("data-standing", "") for one in root.iter() if one.get("data-worker")}


def many(count: int, role: str) -> list[dict[str, Any]]:
    return [
        WORKER | {"worker_id": f"{role}-{number}", "role": role, "address": f"{role}:{number}"}
        for number in range(count)
    ]


def test_names_of_others_stay_within_the_drawing() -> None:
    name = "x" * 300 + "\n\n<script>alert(1)</script>"
    cluster = CLUSTER | {"served_model": name, "workers": [WORKER | {"worker_id": name}]}
    text = cluster_map.draw(cluster, STORES)
    assert "\n" not in text  # an empty line would end the HTML, and Markdown begin
    root = ElementTree.fromstring(text)
    assert not list(root.iter("script"))
    assert "min-width:720px" in root.get("style", "")  # a telephone scrolls it, and can read it
    shown = [one.text or "" for one in root.iter() if one.tag.endswith("text")]
    assert max(len(one) for one in shown) < 60


def test_text_of_others_is_no_markdown() -> None:
    assert plain("![a](b) $c$ :d:\n<e>") == r"\!\[a\](b) \$c\$ \:d\: \<e\>"
    assert plain("x" * 500, 10) == "x" * 9 + "…"


def test_256_workers_are_one_drawing_of_moderate_size() -> None:
    cluster = CLUSTER | {"workers": [*many(128, "prefill"), *many(128, "decode")]}
    assert len(of_worker(drawn(cluster))) == 256
    assert len(cluster_map.draw(cluster, STORES)) < 150_000


def test_few_workers_have_their_links() -> None:
    svg = cluster_map.draw(CLUSTER, STORES)
    assert "prefill-1 → decode-1: 1.00 GB/s" in svg
    assert of_worker(drawn(CLUSTER)) == {"prefill-1": "serving", "decode-1": "draining"}


def on_hosts(num_hosts: int, num_workers: int) -> dict[str, Any]:
    workers = [
        worker | {"worker_id": f"{worker['worker_id']}-{host}", "host": f"host-{host}"}
        for host in range(num_hosts)
        for role in ("prefill", "decode")
        for worker in many(num_workers, role)
    ]
    link = {"source": "host-0", "target": "host-1", "bytes_per_s": 1.25e9, "latency_s": 0.002, "num_links": 4}
    return CLUSTER | {"workers": workers, "host_links": [link]}


def shown_hosts(root: ElementTree.Element) -> list[str]:
    return [one.get("data-host", "") for one in root.iter() if one.get("data-host") is not None]


def test_workers_of_several_hosts_are_in_frames_with_the_speeds_between_them() -> None:
    cluster = on_hosts(2, 2)
    root = drawn(cluster)
    assert shown_hosts(root) == ["host-0", "host-1"]
    assert len(of_worker(root)) == 8
    svg = cluster_map.draw(cluster, STORES)
    assert "→ host-1 1.25 GB/s" in svg
    assert "host-0 → host-1: 1.25 GB/s, 2 ms latency, median of 4" in svg
    assert shown_hosts(drawn(on_hosts(1, 2))) == []


def test_64_hosts_with_1024_workers_are_one_drawing() -> None:
    cluster = on_hosts(64, 8)
    root = drawn(cluster)
    assert len(shown_hosts(root)) == 64
    assert len(of_worker(root)) == 1024
    assert len(cluster_map.draw(cluster, STORES)) < 600_000


def test_a_link_between_hosts_as_a_row() -> None:
    (link,) = on_hosts(2, 1)["host_links"]
    assert link_row(link) == {"from": "host-0", "to": "host-1", "GB/s": 1.25, "latency (ms)": 2.0, "links": 4}


def test_a_peer_has_a_row_of_what_became_of_its_offers() -> None:
    offers = {"served": 3, "declined": 1, "late": 2, "slow": 1, "paused": 4}
    row = peer_row({"url": "http://b", "state": "open", "offers": offers})
    assert row == {
        "peer": "http://b",
        "state": "left alone after failures",
        "answered": 3,
        "too late there, too": 3,
        "failed": 1,
        "not asked": 4,
    }


def test_names_from_elsewhere_are_escaped() -> None:
    evil = '<script>"x"</script>'
    cluster = CLUSTER | {"served_model": evil, "workers": [WORKER | {"worker_id": evil}]}
    assert list(of_worker(drawn(cluster))) == [evil]
    assert "<script>" not in cluster_map.draw(cluster, STORES)


@pytest.mark.parametrize(
    ("worker", "word"),
    [
        (WORKER, "serving"),
        (WORKER | {"age_s": 5.0}, "silent"),
        (WORKER | {"load": {"draining": True}}, "draining"),
        (WORKER | {"load": None}, "serving"),
        ({"worker_id": "x", "role": "decode", "left_s_ago": 1.0}, "gone"),
    ],
)
def test_standings(worker: dict[str, Any], word: str) -> None:
    assert standing(worker, 1.8).word == word
    assert of_worker(drawn(CLUSTER | {"workers": [], "departed": [worker]}))[worker["worker_id"]] == word


def test_undo_puts_back_what_was_there() -> None:
    undo = undo_of(EDITS[0], [GOLD])
    assert undo is not None
    assert undo.body is not None
    assert (undo.version, undo.body["ttft_s"]) == (2, 1.0)
    removal = undo_of(EDITS[1], [GOLD])
    assert removal is not None
    assert (removal.version, removal.body) == (2, None)


def test_what_is_so_already_is_not_undone() -> None:
    assert undo_of(EDITS[0], [GOLD | {"ttft_s": 1.0, "version": 3}]) is None
    assert undo_of(EDITS[1], []) is None
    gone = undo_of(EDITS[0], [])
    assert gone is not None
    assert gone.version == 0  # it is made again


def test_an_edit_in_a_line() -> None:
    assert [change(edit) for edit in EDITS] == ["TTFT 1 s → 500 ms", "made"]
    assert change(EDITS[0] | {"definition": None}) == "removed"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({}, "refused 4.0 % more (2 → 10)"),
        ({"num_would_be_refused": 2}, "refused the same number (2 → 2)"),
        ({"num_would_be_refused": 0, "num_newly_admitted": 2}, "2 refused requests would have been admitted"),
        (
            {"num_undecided": 3},
            "3 were refused before they were tokenized; whether they would be refused now is unknown",
        ),
        ({"num_served": 0, "num_meeting": 0}, "and served none"),
        ({"num_requests": 0}, "nothing to preview"),
    ],
)
def test_previews_in_words(changed: dict[str, int], said: str) -> None:
    assert said in preview_sentence({**PREVIEW, **changed})


def test_forms_become_bodies() -> None:
    assert seconds_of(None) is None
    assert seconds_of(0.0) is None
    assert seconds_of(250.0) == 0.25
    rows: list[dict[str, Any]] = [
        {"kind": "header", "header": "X", "value": "y"},
        {"kind": None, "header": "X", "value": ""},
        {"value": None},
    ]
    assert rules_of(rows) == [{"kind": "header", "header": "X", "value": "y"}]


def test_each_reason_of_a_decode_worker_is_a_sentence() -> None:
    for reason in set(get_args(Disaggregation)) - {"off"}:
        assert (prompt_side(PLACEMENT | {"disaggregation": reason}) or "").startswith("Computed by")
    assert prompt_side(PLACEMENT | {"disaggregation": "off"}) is prompt_side(REFUSED) is None


def test_guessed_tokens_are_shown_where_there_were_any() -> None:
    assert placement_row(PLACEMENT)["guessed"] == "9 of 12 right"
    assert placement_row(PLACEMENT | {"measured": PLACEMENT["measured"] | {"drafts": 0}})["guessed"] is None
    assert placement_row(REFUSED)["guessed"] is None


def test_refusals_count_against_attainment_and_strangers_do_not() -> None:
    counts = {"ended": 10, "good": 6, "refused": 3, "failed": 1}
    assert attainment({"classes": {"gold": counts, "none": counts | {"ended": 99}}}) == 0.6
    assert attainment({"classes": {}}) is None


def test_what_is_whole_and_not_good_is_late() -> None:
    rates = {"ended": [4.0, 0.0], "good": [1.0, 0.0], "refused": [1.0, 0.0], "failed": [0.5, 0.0]}
    assert outcome_rates(rates)["late"] == [1.5, 0.0]


def chart_values(svg: str) -> list[str]:
    """What is told of its moments."""
    return [one.text or "" for one in ElementTree.fromstring(svg).iter() if one.tag.endswith("title")]


def test_lines_over_time_have_gaps_targets_and_tips() -> None:
    svg = time_charts.over_time(
        [12.5, 7.5, 2.5], {"p50": [100.0, None, 50.0]}, {"p50": "#000"}, "ms", 10, {"<gold>": 90}
    )
    assert chart_values(svg) == ["0.2 min ago: p50 100 ms", "0.0 min ago: p50 50 ms"]
    circles = [one for one in ElementTree.fromstring(svg).iter() if one.tag.endswith("circle")]
    assert len(circles) == 1 + 2  # the legend's, and two points without neighbours
    assert "&lt;gold&gt; target" in svg


def test_names_of_targets_that_do_not_fit_are_in_tooltips() -> None:
    limits = {"gold": 1.0, "a" * 64: 1.0, "b" * 64: 1.0, "silver": 1.0}
    svg = time_charts.over_time([2.5], {"p50": [1.0]}, {"p50": "blue"}, "ms", 10, limits)
    written = [one.text or "" for one in ElementTree.fromstring(svg).iter() if one.tag.endswith("text")]
    assert [name for name in written if name.endswith(" target")] == ["gold target", f"{'a' * 23}… target"]
    named = [name for name in chart_values(svg) if name.endswith(" target")]
    assert named == [f"{name} target" for name in list(limits)[1:]]


def test_columns_stand_on_each_other() -> None:
    svg = time_charts.stacked(
        [7.5, 2.5], {"good": [1.0, 0.0], "late": [3.0, 0.0]}, {"good": "#0a0", "late": "#a00"}, "req/s", 10, 5.0
    )
    good, late = (
        one for one in ElementTree.fromstring(svg).iter() if one.get("fill") in ("#0a0", "#a00") and one.get("width")
    )
    assert float(late.get("y", 0)) + float(late.get("height", 0)) == pytest.approx(float(good.get("y", 0)), abs=0.2)
    assert float(late.get("height", 0)) == pytest.approx(3 * float(good.get("height", 0)), abs=0.2)


def test_nothing_is_a_chart_too() -> None:
    assert chart_values(time_charts.stacked([], {}, {}, "req/s", 5, 5.0)) == []
    assert chart_values(time_charts.over_time([1.0], {"p50": [None]}, {"p50": "#000"}, "ms", 30)) == []


@given(st.floats(1e-6, 1e12))
def test_a_grid_reaches_over_its_values(most: float) -> None:
    step = time_charts.grid_step(most)
    assert most <= 4.001 * step <= 2.6 * most


def test_stores_are_drawn_with_those_who_use_them() -> None:
    away = {"state": "away", "address": "h:8", "reason": "<gone>"}
    root = ElementTree.fromstring(cluster_map.draw(CLUSTER, [*STORES, away]))
    shown = {one.get("data-store"): one.get("data-standing") for one in root.iter() if one.get("data-store")}
    assert shown == {"h:9": "there", "h:8": "away"}
    texts = [one.text for one in root.iter() if one.tag.endswith("text")]
    assert {"20 blocks · 2.0 KiB of 7.8 KiB", "✕ away"} <= set(texts)
    with_store, without = (
        cluster_map.draw(CLUSTER | {"workers": [WORKER | {"kv_store": one}]}, STORES) for one in ("h:9", None)
    )
    assert with_store.count("<path") == without.count("<path") + 1


def test_quantities() -> None:
    assert [seconds(one) for one in (None, 0.0123, 1.5, 600.0)] == ["–", "12.3 ms", "1.5 s", "10 min"]
    assert [ago(one) for one in (0.2, 42.0, 120.0, 7_200.0)] == ["now", "42 s ago", "2 min ago", "2 h ago"]
    assert [size(one) for one in (512, 1536, 3 << 30)] == ["512 B", "1.5 KiB", "3.0 GiB"]
    assert [count(one) for one in (None, 3, 3.25, 12_345, 4_560_000)] == ["–", "3", "3.2", "12.3k", "4.56M"]
    assert [seconds(one) for one in (0.9994, 0.9996, 1.0)] == ["999 ms", "1 s", "1 s"]
    assert [count(one) for one in (999_400, 999_600, 999_999_999)] == ["999k", "1M", "1G"]
    assert [size(one) for one in (1023, (1 << 20) - 1, (1 << 30) - 1)] == ["1023 B", "1.0 MiB", "1.0 GiB"]
    assert [share(one) for one in (None, 0.123, 0.9996)] == ["–", "12.3 %", "100 %"]


def test_the_right_token() -> None:
    assert is_right("secret", "secret")
    assert not is_right("Secret", "secret")


def test_what_was_loaded_in_the_end_stands_beside_the_plan() -> None:
    planned, measured = restored([PLACEMENT, REFUSED, PLACEMENT | {"measured": None}])
    assert planned == {"cached": 64, "loaded": 0, "computed": 36}
    assert measured == {"cached": 40, "loaded": 24, "computed": 36}


def test_decisions_have_a_row_each_with_their_reasons() -> None:
    rows = decision_rows(CACHE["decisions"])
    assert [(row["of"], row["number"], row["by reason"]) for row in rows] == [
        ("prompts", 10, "local 7, worker 3"),
        ("failovers", 2, "kept loaded 2"),
    ]


def test_candidates_and_timelines_become_charts() -> None:
    rows = candidate_parts(PLACEMENT)
    chart = charts.parts(rows, TTFT_PARTS, "ms")
    assert chart.spec["encoding"]["y"]["sort"] == ["prefill-1 ◀ chosen", "prefill-2"]
    assert [row["value"] for row in chart.rows] == pytest.approx([10.0, 0.0, 50.0, 10.0, 0.0, 100.0])
    span = {"service": "gateway", "name": "admission", "start_ms": 1.0, "end_ms": 3.0, "predicted_ms": None}
    assert charts.spans([span], SPANS).rows[0]["took_ms"] == 2.0


def test_predictions_are_compared_where_both_are_known() -> None:
    assert pairs([PLACEMENT, REFUSED], "ttft") == [{"predicted": pytest.approx(0.062), "measured": 0.08}]
    assert charts.against(pairs([PLACEMENT], "ttft"), "red").spec["layer"][0]["data"]["values"][0]["predicted"] == 0.01
