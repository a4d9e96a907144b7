"""`halfmoon top`: what it draws, and what it says where there is nothing to draw."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from halfmoon.cli.top import Snapshot, TopOptions, busiest, draw, duration, spark, top
from tests.services.gateway.fakes import running_fleet
from tests.services.gateway.test_gateway_admission import complete

LOAD = {"num_running": 2, "num_waiting": 1, "free_blocks": 25, "draining": False}
WORKER: dict[str, Any] = {
    "worker_id": "d0", "role": "decode", "load": LOAD, "total_blocks": 100, "measured_step_s": 0.012,
    "predicted_step_s": None, "age_s": 0.3,
}  # fmt: skip


def on_terminal(seen: Snapshot | None, num_workers: int = 20, problem: str | None = None) -> str:
    terminal = Console(width=140, record=True, force_terminal=False)
    with terminal.capture() as said:
        terminal.print(draw(seen, num_workers, problem))
    return said.get()


async def test_the_figures_of_a_cluster(tmp_path: Path) -> None:
    terminal = Console(width=140, force_terminal=False)
    async with running_fleet(tmp_path) as fleet:
        await fleet.pair()
        await complete(fleet)
        with terminal.capture() as said:
            assert await top(TopOptions(fleet.http), terminal, once=True) == 0
    assert "p0" in said.get()
    assert "prefill" in said.get()
    assert "TTFT" in said.get()


@pytest.mark.parametrize("width", [40, 20])
def test_a_narrow_terminal_and_names_like_markup(width: int) -> None:
    evil = "[/red] [bold]x" * 5
    figures = series()
    figures["together"]["classes"] = {evil: {"ended": 10**12, "good": 1, "refused": 10**9, "failed": 0}}
    cluster = {
        "served_model": evil,
        "gateway_id": "g",
        "uptime_s": 1e9,
        "silent_after_s": 2.0,
        "missing": [evil],
        "workers": [],
    }
    cluster["workers"] = [WORKER | {"worker_id": evil}]
    terminal = Console(width=width, force_terminal=False)
    with terminal.capture() as said:
        terminal.print(draw(Snapshot(cluster, figures, []), 20, f"{evil} is away"))
    assert "[/red]" in said.get()
    assert max(map(len, said.get().splitlines())) <= width


async def test_the_token_is_sent(tmp_path: Path) -> None:
    terminal = Console(width=140, force_terminal=False)
    async with running_fleet(tmp_path, operator_token="o") as fleet:
        with terminal.capture() as said:
            assert await top(TopOptions(fleet.http), terminal, once=True) == 1
            assert await top(TopOptions(fleet.http, "o"), terminal, once=True) == 0
    assert "the operator token is needed" in said.get()


async def test_tenants_are_shown_to_operators(tmp_path: Path) -> None:
    terminal = Console(width=140, force_terminal=False)
    tenants = {"acme": {"keys": ["k"]}}
    async with running_fleet(tmp_path, operator_token="o", tenants=tenants) as fleet:
        with terminal.capture() as said:
            assert await top(TopOptions(fleet.http, "o"), terminal, once=True) == 0
    assert "acme" in said.get()
    assert "requests in 24 h" in said.get()


async def test_no_gateway_is_a_clear_message() -> None:
    terminal = Console(width=140, force_terminal=False)
    with terminal.capture() as said:
        assert await top(TopOptions("http://127.0.0.1:1"), terminal, once=True) == 1
    assert "no gateway at http://127.0.0.1:1" in said.get()


def series() -> dict[str, Any]:
    line = {name: [0.1] for name in ("p50", "p90", "p99")}
    return {
        "together": {
            "classes": {"gold": {"ended": 10, "good": 8, "refused": 1, "failed": 1}},
            "ttft_s": dict.fromkeys(line, 0.1), "tbt_s": dict.fromkeys(line),
        },
        "rates": {"prompt_tokens": [1.0], "output_tokens": [2.0]},
        "requests": {"ended": [1.0], "good": [0.5]},
        "ttft_s": line, "tbt_s": line, "num_running": [3], "used_share": [None],
    }  # fmt: skip


def test_busy_workers_come_first_and_those_that_left_before_them() -> None:
    idle = WORKER | {"worker_id": "d1", "load": LOAD | {"num_running": 0, "num_waiting": 0}}
    left = {"worker_id": "d2", "role": "decode", "left_s_ago": 3.0}
    cluster = {
        "workers": [idle, WORKER], "departed": [left], "gateway_id": "g", "uptime_s": 60.0,
        "silent_after_s": 0.2, "missing": ["prefill worker"],
    }  # fmt: skip
    assert [one["worker_id"] for one in busiest(cluster)] == ["d2", "d0", "d1"]
    said = on_terminal(Snapshot(cluster, series(), []), num_workers=2)
    assert "d0 silent 0 s" in said
    assert "✕ gone 3 s ago" in said
    assert "75 %" in said
    assert "and 1 more" in said
    assert "80.0 %" in said
    assert "there is no prefill worker" in said


@pytest.mark.parametrize(("goal", "is_marked"), [(0.9, True), (0.8, False)])
def test_a_class_is_marked_by_its_own_goal(goal: float, is_marked: bool) -> None:
    cluster = {"workers": [], "gateway_id": "g", "uptime_s": 60.0, "silent_after_s": 2.0}
    terminal = Console(width=140, force_terminal=True, color_system="standard")
    with terminal.capture() as said:
        terminal.print(draw(Snapshot(cluster, series(), [{"name": "gold", "attainment": goal}]), 20))
    assert ("\x1b[33m80.0 %" in said.get()) is is_marked


def test_what_is_old_says_so() -> None:
    assert "no gateway" in on_terminal(None, problem="no gateway")


@pytest.mark.parametrize(
    ("values", "drawn"),
    [([], ""), ([None, 0.0, 1.0], " ▁█"), ([0.0, 0.0], "▁▁"), ([1.0] * 99, "█" * 24)],
)
def test_sparks(values: list[float | None], drawn: str) -> None:
    assert spark(values) == drawn


def test_durations() -> None:
    assert [duration(one) for one in (None, 0.0123, 2.5)] == ["–", "12.3 ms", "2.5 s"]


def test_workers_of_several_hosts_are_shown_with_their_hosts_and_links() -> None:
    host: dict[str, Any] = {"addresses": [], "num_workers": {}, "stores": []}
    link = {"source": "alpha", "target": "beta", "bytes_per_s": 1.25e9, "latency_s": 0.002, "num_links": 4}
    cluster = {
        "gateway_id": "g", "uptime_s": 1.0, "silent_after_s": 2.0, "workers": [WORKER | {"host": "beta"}],
        "hosts": [host | {"name": "alpha"}, host | {"name": "beta"}], "host_links": [link],
    }  # fmt: skip
    lines = [line.split() for line in on_terminal(Snapshot(cluster, series(), [])).splitlines()]
    assert ["alpha", "beta", "1.25", "2", "ms", "4"] in lines
    assert next(line for line in lines if line[:1] == ["d0"])[-1] == "beta"
