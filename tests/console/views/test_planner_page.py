"""The Planner page against a fake planner and a fake gateway."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

testing = pytest.importorskip("streamlit.testing.v1")

from console.charts.plan_charts import curve_rows, over_rate  # noqa: E402
from console.forms.planner_form import measured_profile  # noqa: E402
from console.plan_view import compared_to_colocated  # noqa: E402
from console.planner_api import PlannerApi, PlannerError, SearchState  # noqa: E402
from console.settings import gateway_url, planner_address  # noqa: E402
from console.views.planner_page import STAGES  # noqa: E402
from halfmoon.pb import planner_pb2, planner_pb2_grpc  # noqa: E402
from halfmoon.plan.planning import make_plan  # noqa: E402
from halfmoon.plan.request import PlanRequest  # noqa: E402
from halfmoon.rpc.credentials.credential import credential_from  # noqa: E402
from halfmoon.rpc.credentials.sources import client_credential  # noqa: E402
from halfmoon.rpc.tls.authority import Authority  # noqa: E402
from halfmoon.rpc.tls.identity_files import identity_files, state_paths  # noqa: E402
from halfmoon.rpc.tls.server_credentials import server_credentials  # noqa: E402
from halfmoon.up.state.certificates import RoleCertificates  # noqa: E402
from tests.console.fake_gateway import CACHE, CLUSTER, FakeGateway, running_fake_gateway  # noqa: E402
from tests.console.fake_planner import APART, SUMMARY, FakePlanner, plan, running_fake_planner  # noqa: E402

ROWS = [{"start_time": float(number), "prompt_len": 100, "output_len": 10} for number in range(41)]
ASKED = {"model": "m", "gpu": "h200", "workload": "chat", "ttft_s": 0.2, "tpot_s": 0.1}


def the_page(gateway: str, planner: str | None) -> None:
    """What AppTest runs."""
    from console.gateway_api import GatewayApi
    from console.planner_api import PlannerApi
    from console.views import planner_page

    planner_page.render(GatewayApi(gateway), None if planner is None else PlannerApi(planner))


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with running_fake_gateway() as fake:
        fake.answers["/halfmoon/v1/workload"] = (200, {"requests": ROWS, "rate_per_s": 1.0})
        yield fake


@pytest.fixture
def planner() -> Iterator[FakePlanner]:
    with running_fake_planner() as fake:
        yield fake


def open_page(gateway: FakeGateway, planner: FakePlanner | None) -> Any:
    addresses = {"gateway": gateway.url, "planner": planner and planner.address}
    return checked(testing.AppTest.from_function(the_page, kwargs=addresses, default_timeout=60).run())


def checked(shown: Any) -> Any:
    assert not shown.exception, shown.exception
    return shown


def click(shown: Any, label: str) -> Any:
    return checked(next(one for one in shown.button if one.label == label).click().run())


def of_key(shown: Any, kind: str, key: str) -> Any:
    return next(one for one in getattr(shown, kind) if one.key == key)


def until(shown: Any, holds: Callable[[SearchState], bool]) -> Any:
    """Looks again until the search has come so far."""
    last_s = time.monotonic() + 60
    while not holds(shown.session_state["plan_search"].state):
        assert time.monotonic() < last_s
        shown = checked(shown.run())
    return checked(shown.run())


def until_over(shown: Any) -> Any:
    return until(shown, lambda state: state.is_over)


def test_a_search_is_asked_for_shown_and_its_plan_drawn(gateway: FakeGateway, planner: FakePlanner) -> None:
    shown = open_page(gateway, planner)
    of_key(shown, "number_input", "plan-rate").set_value(10.0)
    of_key(shown, "selectbox", "plan-gpu").set_value("l40s")
    shown = click(shown, "Search")
    assert next(one for one in shown.button if one.label == "Search").disabled
    assert any(one.label == "Cancel" for one in shown.button)
    planner.go.set()
    shown = until_over(shown)
    asked = planner.asked[0]
    assert (asked.model, asked.gpu, asked.workload, asked.rate_per_s) == ("llama-3-8b", "l40s", "chat", 10.0)
    assert (asked.ttft_s, asked.tpot_s, asked.attainment, asked.with_curves) == (0.25, 0.05, 0.9, True)
    assert not asked.HasField("objective")
    assert {metric.label: metric.value for metric in shown.metric} == {
        "GPUs": "2", "Costs": "$7.60/h", "Sustains": "12 req/s", "In time": "95.0 %", "Per GPU": "6 req/s"
    }  # fmt: skip
    assert any("#2 llama-3-8b on h200" in one.value for one in shown.markdown)
    assert list(shown.dataframe[0].value["plan"]) == [2, 1]


def test_a_map_is_asked_for_and_drawn(gateway: FakeGateway, planner: FakePlanner) -> None:
    planner.go.set()
    page = until_over(click(open_page(gateway, planner), "Map targets"))
    assert planner.asked[0].is_map
    assert not planner.asked[0].with_curves
    assert "Separate workers win all." in [one.value for one in page.markdown]
    assert "orange means separate" in [one.value for one in page.caption]
    chart, *_ = page.get("vega_lite_chart")  # plans have further ones
    assert "padding" not in json.loads(chart.proto.spec), "Streamlit's front end writes into it as into an object"


def test_newer_options_are_asked_for(gateway: FakeGateway, planner: FakePlanner) -> None:
    shown = open_page(gateway, planner)
    of_key(shown, "text_input", "plan-prices").set_value("h200=3.5, l40s = 0.8")
    of_key(shown, "selectbox", "plan-decode-gpu").set_value("l40s")
    of_key(shown, "selectbox", "plan-criterion").set_value("marginal")
    of_key(shown, "selectbox", "plan-codec").set_value("int8")
    of_key(shown, "number_input", "plan-tbt").set_value(80.0)
    of_key(shown, "number_input", "plan-host-kv").set_value(64.0)
    of_key(shown, "checkbox", "plan-thorough").check()
    until(click(shown, "Search"), lambda state: bool(state.progress))
    asked = planner.asked[0]
    assert dict(asked.prices) == {"h200": 3.5, "l40s": 0.8}
    assert (asked.decode_gpu, asked.HasField("prefill_gpu"), asked.criterion) == ("l40s", False, "marginal")
    assert (asked.kv_codec, asked.tbt_s, asked.HasField("network_gbit_per_s")) == ("int8", 0.08, False)
    assert asked.is_thorough
    assert (asked.host_bytes_per_gpu, asked.HasField("host_weight_bytes_per_gpu")) == (64 << 30, False)
    shown = checked(of_key(shown, "text_input", "plan-prices").set_value("h200").run())
    assert any("prices as GPU=DOLLARS" in one.value for one in shown.caption)


def test_plans_of_before_are_not_asked_for_at_each_click(gateway: FakeGateway, planner: FakePlanner) -> None:
    shown = open_page(gateway, planner)
    for rate in (1.0, 2.0):
        checked(of_key(shown, "number_input", "plan-rate").set_value(rate).run())
    assert planner.num_listed == 1


def test_cancelling_ends_the_call(gateway: FakeGateway, planner: FakePlanner) -> None:
    shown = click(click(open_page(gateway, planner), "Search"), "Cancel")
    assert planner.ended.wait(60)
    shown = until_over(shown)
    assert "cancelled" in shown.info[0].value
    assert not shown.error


def test_a_search_that_nobody_holds_ends(planner: FakePlanner) -> None:
    search = PlannerApi(planner.address).search(ASKED, {})
    state = search.state
    assert planner.begun.wait(60)
    del search
    gc.collect()
    assert planner.ended.wait(60)
    assert state.plan is None


def test_what_the_planner_refuses_is_said(gateway: FakeGateway, planner: FakePlanner) -> None:
    planner.found = None
    planner.go.set()
    shown = until_over(click(open_page(gateway, planner), "Search"))
    assert shown.error[0].value == "TTFT 0.25 s cannot be met"
    assert not next(one for one in shown.button if one.label == "Search").disabled


def test_who_waits_is_told_how_many_are_before(gateway: FakeGateway, planner: FakePlanner) -> None:
    planner.updates = [planner_pb2.PlanUpdate(waiting=planner_pb2.Waiting(ahead=3))]
    shown = click(open_page(gateway, planner), "Search")
    shown = until(shown, lambda state: state.num_ahead > 0)
    assert any("Waiting for 3 other searches" in one.value for one in shown.markdown)


def test_the_last_hour_is_a_workload(gateway: FakeGateway, planner: FakePlanner) -> None:
    shown = open_page(gateway, planner)
    shown = checked(of_key(shown, "button_group", "plan-kind").set_value("Last hour here").run())
    assert any("41 requests, 1 per second" in one.value for one in shown.caption)
    until(click(shown, "Search"), lambda state: bool(state.progress))
    asked = planner.asked[0]
    assert (asked.workload, asked.rate_per_s) == ("last-hour.json", 1.0)
    assert {one.name: json.loads(one.content) for one in asked.files} == {"last-hour.json": ROWS}


def test_an_hour_without_requests_is_no_workload(gateway: FakeGateway, planner: FakePlanner) -> None:
    gateway.answers["/halfmoon/v1/workload"] = (200, {"requests": [], "rate_per_s": None})
    shown = open_page(gateway, planner)
    shown = checked(of_key(shown, "button_group", "plan-kind").set_value("Last hour here").run())
    assert any("No request was answered here" in one.value for one in shown.caption)
    assert next(one for one in shown.button if one.label == "Search").disabled


@pytest.mark.parametrize(("kind", "says"), [("Trace", "a trace"), ("Last hour here", "the last hour's requests")])
def test_what_is_missing_is_named(gateway: FakeGateway, planner: FakePlanner, kind: str, says: str) -> None:
    del gateway.answers["/halfmoon/v1/workload"]
    shown = open_page(gateway, planner)
    shown = checked(of_key(shown, "button_group", "plan-kind").set_value(kind).run())
    assert any(one.value == f"Still needed: {says}." for one in shown.caption)
    assert next(one for one in shown.button if one.label == "Search").disabled


def test_without_plans_the_page_says_how_to_begin(gateway: FakeGateway, planner: FakePlanner) -> None:
    planner.plans = []
    shown = open_page(gateway, planner)
    assert any("No plan yet" in one.value for one in shown.markdown)
    shown = click(shown, "Search")
    assert not any("No plan yet" in one.value for one in shown.markdown), "one is being searched for"
    shown = until_over(click(shown, "Cancel"))
    assert any("No plan yet" in one.value for one in shown.markdown)


def test_a_plan_that_was_not_kept_is_said_to_be(gateway: FakeGateway, planner: FakePlanner) -> None:
    assert planner.found is not None
    planner.found.id = 0
    planner.go.set()
    shown = until_over(click(open_page(gateway, planner), "Search"))
    assert "there is no other copy" in shown.warning[0].value


def test_without_a_planner_the_page_says_what_to_do(gateway: FakeGateway) -> None:
    assert any("No planner" in one.value for one in open_page(gateway, None).markdown)


def test_a_planner_that_is_away_is_a_clear_message(gateway: FakeGateway) -> None:
    addresses = {"gateway": gateway.url, "planner": "127.0.0.1:1"}
    shown = checked(testing.AppTest.from_function(the_page, kwargs=addresses, default_timeout=60).run())
    assert "no planner at 127.0.0.1" in shown.error[0].value


def test_a_planner_without_its_ledger_still_searches(gateway: FakeGateway, planner: FakePlanner) -> None:
    planner.is_ledger_away = True
    planner.found = plan(0)
    planner.go.set()
    shown = open_page(gateway, planner)
    assert shown.warning[0].value == "Earlier plans cannot be read now: the ledger does not answer"
    shown = until_over(click(shown, "Search"))
    assert any("there is no other copy" in one.value for one in shown.warning)
    assert shown.metric


def test_the_operator_token_is_sent(planner: FakePlanner) -> None:
    PlannerApi(planner.address, "secret").catalogue()
    PlannerApi(planner.address).catalogue()
    assert planner.tokens == ["Bearer secret", None]


def test_the_credential_is_sent(planner: FakePlanner) -> None:
    credential = credential_from("s" * 40, "operator")
    PlannerApi(planner.address, credential=credential).catalogue()
    assert planner.credentials == [credential.tokens["planner"]]


def test_measured_workers_become_coefficients() -> None:
    models = {"prefill_model": {"a": 0.1, "b": 0.01, "c": 0.0}, "step_model": {"d": 0.2, "e": 0.02, "f": 0.0}}
    quick = {"prefill_model": {"a": 0.0, "b": 0.001, "c": 0.0}, "step_model": {"d": 0.0, "e": 0.0, "f": 0.0}}
    workers = [CLUSTER["workers"][0] | models, CLUSTER["workers"][0] | quick]
    profile = measured_profile({"workers": workers}, CACHE)
    assert profile == {
        "name": "this cluster", "prefill": [0.1, 0.01, 0.0], "step": [0.2, 0.02, 0.0], "kv_tokens": 6400,
        "kv_token_bytes": 3, "link_bytes_per_s": 1e9,
    }  # fmt: skip
    assert measured_profile({"workers": [workers[1]]}, CACHE) is None


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, "1.20 times the goodput per GPU of the best colocated one, 2 both TP1."),
        ({"colocated": None}, "No colocated layout"),
        ({"colocated": APART}, "A colocated layout is best here"),
    ],
)
def test_beside_the_colocated(changed: dict[str, Any], says: str) -> None:
    assert compared_to_colocated(SUMMARY | changed).startswith(says)


def test_curves_have_shapes_beside_colours_and_the_goal_is_drawn() -> None:
    rows = [row for curve in SUMMARY["curves"] for row in curve_rows(curve["layout"], curve)]
    assert [row["goodput"] for row in rows] == [5.0, 9.0, 5.0, 6.0]
    lines, goal, rate = over_rate(rows, "attainment", 0.9, 10.0).spec["layer"]
    assert len(set(lines["encoding"]["shape"]["scale"]["range"])) == 2
    assert (goal["data"]["values"], rate["data"]["values"]) == ([{"limit": 0.9}], [{"limit": 10.0}])


def test_where_the_planner_is() -> None:
    both = ["--gateway", "http://a:1", "--planner", "b:2"]
    assert (planner_address(both, {}), gateway_url(both, {})) == ("b:2", "http://a:1")
    assert planner_address([], {"HALFMOON_CONSOLE_PLANNER": "c:3"}) == "c:3"
    assert planner_address([], {}) is None
    looks: list[Callable[[], object]] = [
        lambda: planner_address(["--planner", "b"], {}),
        lambda: planner_address(["x"]),
    ]
    for look in looks:
        with pytest.raises(ValueError, match="planner"):
            look()


def test_errors_are_for_people() -> None:
    with pytest.raises(PlannerError, match=r"no planner at 127\.0\.0\.1:1"):
        PlannerApi("127.0.0.1:1").plans()


def test_every_stage_of_a_search_has_a_name() -> None:
    said: set[str] = set()
    request = PlanRequest("llama-3-8b", "h100", "chat", 0.5, 0.1, gpus_per_node=2, rate_per_s=2, num_requests=20)
    make_plan(request, 1, lambda what, done, total: said.add(what), with_curves=True)
    assert {"goodputs", "curves"} <= said <= STAGES.keys()


def test_a_planner_on_mutual_tls(tmp_path: Path) -> None:
    Authority.create(tmp_path / "authority")
    issued = RoleCertificates(tmp_path / "authority", tmp_path)
    issued.issue()
    server = grpc.server(ThreadPoolExecutor(1))
    planner_pb2_grpc.add_PlannerServicer_to_server(FakePlanner(), server)
    own = identity_files(state_paths(tmp_path, "planner"), "planner")
    port = server.add_secure_port("127.0.0.1:0", server_credentials(own))
    server.start()
    try:
        operator = client_credential("operator", "127.0.0.1:1", tmp_path, {})
        assert PlannerApi(f"127.0.0.1:{port}", None, operator).catalogue().gpus == ("h200", "l40s")
        with pytest.raises(PlannerError, match="no planner at"):
            PlannerApi(f"127.0.0.1:{port}").catalogue()
    finally:
        server.stop(None).wait()
