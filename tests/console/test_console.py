"""The console's pages against a fake gateway."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

testing = pytest.importorskip("streamlit.testing.v1")

from console.gateway_api import GatewayApi, GatewayError  # noqa: E402
from console.plain_text import plain  # noqa: E402
from console.settings import DEFAULT_GATEWAY_URL, api_key, gateway_ca, gateway_url, operator_token  # noqa: E402
from console.views.slo_page import NEW  # noqa: E402
from halfmoon.rpc.tls.authority import Authority  # noqa: E402
from halfmoon.rpc.tls.http_context import server_context  # noqa: E402
from tests.console.fake_gateway import (  # noqa: E402
    CLUSTER,
    EDITS,
    GOLD,
    LOAD,
    SERIES,
    STORES,
    WORKER,
    FakeGateway,
)

PAGES = ("overview", "placements", "cache", "slo", "autopilot", "tenants", "try")


def one_page(page: str, url: str) -> None:
    """What AppTest runs: a page of the console."""
    from importlib import import_module

    from console.gateway_api import GatewayApi

    import_module(f"console.views.{page}_page").render(GatewayApi(url))


def open_page(page: str, url: str) -> Any:
    shown = testing.AppTest.from_function(one_page, kwargs={"page": page, "url": url}, default_timeout=60).run()
    assert not shown.exception, shown.exception
    return shown


def drawings(shown: Any) -> list[str]:
    return [one.proto.json for one in shown.get("bidi_component")]


def with_table(shown: Any) -> Any:
    """The overview's table of workers is made when somebody opens it."""
    assert not shown.dataframe
    shown.session_state["workers-table"] = True
    return shown.run()


def test_a_gateway_with_tls(gateway: FakeGateway, tmp_path: Path) -> None:
    Authority.create(tmp_path / "authority").issue("gateway", "g", ("localhost",)).write(tmp_path)
    tls = server_context(tmp_path / "tls.crt", tmp_path / "tls.key")
    gateway.server.socket = tls.wrap_socket(gateway.server.socket, server_side=True)
    url = gateway.url.replace("http:", "https:")
    trusted = gateway_ca({"HALFMOON_CONSOLE_GATEWAY_CA": str(tmp_path / "ca.crt")})
    assert GatewayApi(url, ca=trusted).cluster()["workers"]
    with pytest.raises(GatewayError, match="certificate verify failed"):
        GatewayApi(url).cluster()
    with pytest.raises(ValueError, match="is not a file"):
        gateway_ca({"HALFMOON_CONSOLE_GATEWAY_CA": str(tmp_path / "nothing")})


def test_the_overview_shows_figures_workers_and_the_map(gateway: FakeGateway) -> None:
    shown = with_table(open_page("overview", gateway.url))
    figures = {metric.label: metric.value for metric in shown.metric}
    assert figures == {
        "Requests/s": "2", "Tokens/s": "10", "TTFT p50": "100 ms", "TBT p50": "10 ms", "In time": "80.0 %",
        "KV in use": "25.0 %",
    }  # fmt: skip
    table = shown.dataframe[0].value
    assert list(table["worker"]) == ["prefill-1", "decode-1"]
    assert list(table["state"]) == ["serving", "draining"]
    assert list(table["KV in use"]) == [0.25, 0.25]
    cluster, *figures_over_time = drawings(shown)
    assert 'data-worker="decode-1" data-standing="draining"' in json.loads(cluster)
    assert 'data-store="h:9"' in json.loads(cluster)
    assert len(figures_over_time) == 6


def test_an_empty_cluster_says_what_is_missing(gateway: FakeGateway) -> None:
    gateway.answers["/halfmoon/v1/cluster"] = (200, CLUSTER | {"workers": [], "missing": ["prefill worker"]})
    gateway.answers["/halfmoon/v1/series"] = (200, SERIES | {"age_s": []})
    shown = open_page("overview", gateway.url)
    assert "there is no prefill worker" in shown.warning[0].value
    said = " ".join(one.value for one in shown.markdown)
    assert "No worker has joined" in said
    assert "No request in the last 10 minutes" in said
    assert not shown.dataframe


def test_placements_show_what_was_predicted_and_what_came(gateway: FakeGateway) -> None:
    table = open_page("placements", gateway.url).dataframe[0].value
    assert list(table["outcome"]) == ["ok", "refused: ttft"]
    assert list(table["TTFT predicted"]) == pytest.approx([62.0, 62.0])
    assert table["TTFT"][0] == pytest.approx(80.0)


def test_no_placement_yet(gateway: FakeGateway) -> None:
    gateway.answers["/halfmoon/v1/placements"] = (200, [])
    assert any("No requests yet" in one.value for one in open_page("placements", gateway.url).markdown)


def test_the_cache_by_tier(gateway: FakeGateway) -> None:
    shown = open_page("cache", gateway.url)
    figures = {metric.label: metric.value for metric in shown.metric}
    assert figures["Token hit rate"] == "25.0 %"
    assert figures["Store hit rate"] == "85.7 %"
    tiers = shown.dataframe[0].value
    assert (list(tiers["tier"]), list(tiers["full"]), list(tiers["compression"])) == (
        ["dram", "disk"],
        [0.25] * 2,
        [2.0] * 2,
    )
    assert list(shown.dataframe[-1].value["by reason"]) == ["local 7, worker 3", "kept loaded 2"]


def test_the_cache_of_several_stores(gateway: FakeGateway) -> None:
    away = {"state": "away", "address": "h:11", "reason": "gone"}
    gateway.answers["/halfmoon/v1/stores"] = (200, [*STORES, STORES[0] | {"address": "h:10"}, away])
    shown = open_page("cache", gateway.url)
    tiers = shown.dataframe[0].value
    assert list(zip(tiers["store"], tiers["tier"], strict=True)) == [
        (address, tier) for address in ("h:9", "h:10") for tier in ("dram", "disk")
    ]
    figures = {metric.label: metric.value for metric in shown.metric}
    assert figures["Bytes in stores"] == "3.9 KiB"
    assert "gone" in shown.warning[0].value


def test_a_tier_in_trouble_says_why(gateway: FakeGateway) -> None:
    dram, disk = STORES[0]["tiers"]
    tiers = [dram, disk | {"trouble": "No space left on device", "budget_bytes": 500}]
    gateway.answers["/halfmoon/v1/stores"] = (200, [STORES[0] | {"tiers": tiers}])
    shown = open_page("cache", gateway.url)
    assert "disk tier" in shown.warning[0].value
    assert "No space left on device" in shown.warning[0].value
    assert list(shown.dataframe[0].value["full"]) == [0.25, 1.0], "more than it may hold, until it is given back"


@pytest.mark.parametrize(
    ("stores", "said"),
    [
        ([], "Neither the workers nor the gateway use a store"),
        ([{"state": "away", "address": "h:9", "reason": "gone"}], "gone"),
    ],
)
def test_a_store_that_is_not_there(gateway: FakeGateway, stores: list[dict[str, str]], said: str) -> None:
    gateway.answers["/halfmoon/v1/stores"] = (200, stores)
    shown = open_page("cache", gateway.url)
    assert any(said in one.value for one in (*shown.caption, *shown.warning))


def test_classes_are_edited_over_their_version(gateway: FakeGateway) -> None:
    shown = open_page("slo", gateway.url)
    next(one for one in shown.number_input if one.label == "TTFT target (ms)").set_value(250.0)
    next(one for one in shown.button if one.label == "Save").click().run()
    assert gateway.edits() == [("PUT", "/halfmoon/v1/classes/gold")]
    sent = gateway.bodies[-1]
    assert (sent["version"], sent["ttft_s"], sent["tbt_s"], sent["reserved"]) == (2, 0.25, None, 0.25)
    assert sent["rules"] == GOLD["rules"]


def test_a_preview_is_a_sentence(gateway: FakeGateway) -> None:
    shown = open_page("slo", gateway.url)
    next(one for one in shown.button if one.label == "Preview").click().run()
    assert "200 requests" in shown.info[0].value
    assert "refused 4.0 % more (2 → 10) and met the targets of 98.9 %" in shown.info[0].value


def test_what_the_gateway_refuses_is_said(gateway: FakeGateway) -> None:
    gateway.answers["/halfmoon/v1/classes/gold"] = (409, {"error": {"message": "has version 7 by now"}})
    shown = open_page("slo", gateway.url)
    next(one for one in shown.button if one.label == "Save").click().run()
    assert "has version 7 by now" in shown.error[0].value


def field(shown: Any, label: str) -> Any:
    return next(one for one in shown.number_input if one.label == label)


def test_what_is_typed_stays_where_somebody_else_saves_meanwhile(gateway: FakeGateway) -> None:
    shown = open_page("slo", gateway.url)
    field(shown, "TTFT target (ms)").set_value(250.0)
    gateway.answers["/halfmoon/v1/classes"] = (200, {"classes": [GOLD | {"version": 3, "ttft_s": 2.0}]})
    gateway.answers["/halfmoon/v1/classes/gold"] = (409, {"error": {"message": "has version 3 by now"}})
    next(one for one in shown.button if one.label == "Save").click().run()
    assert gateway.bodies[-1]["version"] == 2  # which the gateway refuses
    assert "Version 3 was saved elsewhere" in shown.warning[0].value
    assert any("has version 3 by now" in one.value for one in shown.error)
    assert field(shown, "TTFT target (ms)").value == 250.0
    next(one for one in shown.button if one.label == "Load the new version").click().run()
    assert field(shown, "TTFT target (ms)").value == 2000.0
    assert not shown.warning


def test_a_form_in_which_nothing_was_typed_follows(gateway: FakeGateway) -> None:
    shown = open_page("slo", gateway.url)
    gateway.answers["/halfmoon/v1/classes"] = (200, {"classes": [GOLD | {"version": 3, "ttft_s": 2.0}]})
    shown.run()
    assert field(shown, "TTFT target (ms)").value == 2000.0
    assert not shown.warning


def test_a_class_that_somebody_else_removes_meanwhile_is_told_of(gateway: FakeGateway) -> None:
    shown = open_page("slo", gateway.url)
    field(shown, "TTFT target (ms)").set_value(250.0)
    gateway.answers["/halfmoon/v1/classes"] = (200, {"classes": [GOLD | {"name": "silver"}]})
    next(one for one in shown.button if one.label == "Save").click().run()
    assert gateway.edits() == []
    assert [one.value.partition(".")[0] for one in shown.warning] == ["Class gold was removed elsewhere"]
    assert not shown.run().warning


def test_a_new_class_of_a_name_that_is_taken_is_not_sent(gateway: FakeGateway) -> None:
    shown = open_page("slo", gateway.url)
    shown.selectbox(key="class").set_value(NEW).run()
    next(one for one in shown.text_input if one.label == "Name").set_value("gold").run()
    assert shown.warning[0].value == "There is a class called gold: choose it above to edit it."
    assert all(one.disabled for one in shown.button if one.label in ("Preview", "Save"))


def test_a_class_named_like_the_entry_for_a_new_one_is_another_entry(gateway: FakeGateway) -> None:
    gateway.answers["/halfmoon/v1/classes"] = (200, {"classes": [GOLD | {"name": "+ New class"}]})
    shown = open_page("slo", gateway.url)
    assert shown.selectbox(key="class").value == "+ New class"
    shown.selectbox(key="class").set_value(NEW).run()
    assert next(one for one in shown.text_input if one.label == "Name").value == ""


def test_a_new_class_is_chosen_once_it_is_saved(gateway: FakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    def save(api: GatewayApi, name: str, body: object) -> dict[str, object]:
        gateway.answers["/halfmoon/v1/classes"] = (200, {"classes": [GOLD, GOLD | {"name": name, "version": 1}]})
        return {"version": 1}

    monkeypatch.setattr(GatewayApi, "put_class", save)
    shown = open_page("slo", gateway.url)
    shown.selectbox(key="class").set_value(NEW).run()
    next(one for one in shown.text_input if one.label == "Name").set_value("silver").run()
    next(one for one in shown.button if one.label == "Save").click().run()
    assert shown.selectbox(key="class").value == "silver"
    assert not shown.warning


def test_no_name_becomes_a_link() -> None:
    """Streamlit would make one even where every mark has its backslash."""
    parts = {
        "http://evil.org": "http|://evil.org",
        "HTTPS://a@b.org": "HTTPS|://a|@b.org",
        "www.evil.org": "www|.evil.org",
    }
    for name, apart in parts.items():
        assert plain(name).replace("\\", "") == apart.replace("|", ":small[]")
    assert plain("a.org") == "a.org"


EVIL = "![x](http://evil/p.png) <script>alert(1)</script> $x$ :material/hub:"


def test_names_are_shown_letter_by_letter(gateway: FakeGateway) -> None:
    gateway.answers["/halfmoon/v1/classes"] = (200, {"classes": [GOLD | {"name": EVIL}]})
    gateway.answers["/halfmoon/v1/class_edits"] = (200, [EDITS[0] | {"name": EVIL}])
    gateway.answers["/halfmoon/v1/cluster"] = (200, CLUSTER | {"served_model": EVIL * 20})
    shown = (open_page("slo", gateway.url), open_page("overview", gateway.url))
    drawn = [one.value for page in shown for one in (*page.markdown, *page.caption)]
    named = [text for text in drawn if "evil" in text and "<svg" not in text]
    assert len(named) >= 2
    assert all(plain(EVIL, 64) in text or plain(EVIL * 20, 80) in text for text in named)
    assert not any(EVIL[:20] in text or "evil/p.png) <" in text for text in named)


def test_an_edit_is_undone_by_another_edit(gateway: FakeGateway) -> None:
    shown = open_page("slo", gateway.url)
    next(one for one in shown.button if one.label == "Undo").click().run()
    assert gateway.edits() == [("PUT", "/halfmoon/v1/classes/gold")]
    assert (gateway.bodies[-1]["version"], gateway.bodies[-1]["ttft_s"]) == (2, 1.0)


def test_without_classes_the_page_says_what_that_means(gateway: FakeGateway) -> None:
    gateway.answers["/halfmoon/v1/classes"] = (200, {"classes": []})
    gateway.answers["/halfmoon/v1/class_edits"] = (200, [])
    shown = open_page("slo", gateway.url)
    assert any("No class yet" in one.value for one in shown.markdown)
    assert next(one for one in shown.button if one.label == "Save").disabled  # it has no name yet


def test_chat_streams_a_reply_and_keeps_the_history(gateway: FakeGateway) -> None:
    shown = open_page("try", gateway.url).chat_input[0].set_value("Hi").run()
    assert [message.markdown[0].value for message in shown.chat_message] == ["Hi", "Hello"]
    shown.chat_input[0].set_value("More").run()
    assert [message["content"] for message in gateway.bodies[-1]["messages"]] == ["Hi", "Hello", "More"]
    assert (gateway.bodies[-1]["model"], gateway.bodies[-1]["stream"]) == ("SmolLM2-135M", True)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((429, {"error": {"message": "no capacity now"}}), "the gateway answered 429: no capacity now"),
        ((200, [{"error": {"message": "the worker died"}}]), "the worker died"),
        ((502, "nonsense"), "the gateway answered 502"),
    ],
)
def test_a_failed_reply_is_said_and_not_remembered(gateway: FakeGateway, answer: Any, said: str) -> None:
    good = gateway.answers["/v1/chat/completions"]
    gateway.answers["/v1/chat/completions"] = answer
    shown = open_page("try", gateway.url).chat_input[0].set_value("Hi").run()
    assert plain(said) in shown.error[0].value
    gateway.answers["/v1/chat/completions"] = good
    shown.chat_input[0].set_value("Again").run()
    assert [message["content"] for message in gateway.bodies[-1]["messages"]] == ["Again"]


@pytest.mark.parametrize("page", PAGES)
def test_an_unreachable_gateway_is_a_clear_message(page: str) -> None:
    [said] = open_page(page, "http://127.0.0.1:1").error
    assert plain("no gateway at http://127.0.0.1:1") in said.value


def test_a_part_without_its_data_says_why_though_the_rest_is_there(gateway: FakeGateway) -> None:
    edits = gateway.answers["/halfmoon/v1/class_edits"]
    gateway.answers["/halfmoon/v1/class_edits"] = (503, {"error": {"message": "the ledger is away"}})
    shown = open_page("slo", gateway.url)
    assert len(shown.dataframe) == 1
    assert ["the ledger is away" in one.value for one in shown.error] == [True]
    gateway.answers["/halfmoon/v1/class_edits"] = edits
    assert not shown.run().error
    assert shown.selectbox(key="class").value == "gold"


def test_what_was_known_stays_while_the_gateway_is_away(gateway: FakeGateway) -> None:
    shown = with_table(open_page("overview", gateway.url))
    gateway.answers["/halfmoon/v1/cluster"] = (503, {"error": {"message": "the ledger is away"}})
    shown.run()
    assert "the ledger is away" in shown.error[0].value
    assert list(shown.dataframe[0].value["worker"]) == ["prefill-1", "decode-1"]


def test_a_worker_that_left_is_still_there_and_red(gateway: FakeGateway) -> None:
    left = {"worker_id": "decode-1", "role": "decode", "left_s_ago": 2.0}
    gateway.answers["/halfmoon/v1/cluster"] = (200, CLUSTER | {"workers": [WORKER], "departed": [left]})
    shown = with_table(open_page("overview", gateway.url))
    assert list(shown.dataframe[0].value["state"]) == ["gone", "serving"]
    assert 'data-worker="decode-1" data-standing="gone"' in json.loads(drawings(shown)[0])


def test_where_nothing_was_asked_the_overview_says_how_to(gateway: FakeGateway) -> None:
    idle = [worker | {"load": LOAD | {"num_running": 0}} for worker in CLUSTER["workers"]]
    gateway.answers["/halfmoon/v1/cluster"] = (200, CLUSTER | {"workers": idle})
    asked = {name: [0.0, 0.0] for name in SERIES["requests"]}
    gateway.answers["/halfmoon/v1/series"] = (200, SERIES | {"requests": asked})
    shown = open_page("overview", gateway.url)
    assert any("No request in the last 10 minutes" in one.value for one in shown.markdown)
    assert f"curl -N {gateway.url}/v1/chat/completions" in shown.code[0].value


def test_a_reply_that_breaks_off_is_an_error(gateway: FakeGateway) -> None:
    gateway.closes_early = True
    pieces = GatewayApi(gateway.url).chat({})
    assert [next(pieces)["delta"].get("content") for _ in range(2)] == ["Hel", "lo"]
    with pytest.raises(GatewayError, match="broke off"):
        next(pieces)


@pytest.mark.parametrize("what", ["cluster", "series", "cache", "classes", "placements", "class_edits"])
def test_another_server_is_not_a_gateway(gateway: FakeGateway, what: str) -> None:
    gateway.answers[f"/halfmoon/v1/{what}"] = (200, "hello")
    api = GatewayApi(gateway.url)
    looks: dict[str, Callable[[], object]] = {
        "cluster": api.cluster, "series": lambda: api.series(5), "cache": api.cache, "classes": api.classes,
        "placements": lambda: api.placements(5), "class_edits": api.class_edits,
    }  # fmt: skip
    with pytest.raises(GatewayError, match="something that is not"):
        looks[what]()


@pytest.mark.parametrize(
    ("environment", "control", "chat"),
    [
        ({}, None, None),
        ({"HALFMOON_CONSOLE_API_KEY": "k"}, None, "Bearer k"),
        ({"HALFMOON_CONSOLE_API_KEY": "k", "HALFMOON_CONSOLE_OPERATOR_TOKEN": "o"}, "Bearer o", "Bearer k"),
    ],
)
def test_each_key_goes_where_it_belongs(
    gateway: FakeGateway, environment: dict[str, str], control: str | None, chat: str | None
) -> None:
    api = GatewayApi(gateway.url, api_key(environment), operator_token(environment))
    api.cluster()
    gateway.answers["/v1/chat/completions"] = (200, [])
    list(api.chat({}))
    assert gateway.keys["/halfmoon/v1/cluster"] == control
    assert gateway.keys.get("/v1/chat/completions") == chat


def test_where_the_gateway_is() -> None:
    assert gateway_url([], {}) == DEFAULT_GATEWAY_URL
    assert gateway_url([], {"HALFMOON_CONSOLE_GATEWAY_URL": "http://a:1/"}) == "http://a:1"
    assert gateway_url(["--gateway", "https://b"], {"HALFMOON_CONSOLE_GATEWAY_URL": "http://a:1"}) == "https://b"
    for wrong in (["--gateway"], ["--gateway", "b:1"], ["x"]):
        with pytest.raises(ValueError, match=r"gateway"):
            gateway_url(wrong, {})
