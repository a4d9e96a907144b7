"""Which settings of workers reach simulated ones, and what is said of the others."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from halfmoon.errors import InvalidRequest
from halfmoon.sim.latency_sources.worker_profile import PROFILES
from halfmoon.up.config.options import up_options
from halfmoon.up.config.read import Override, parse_config, read_config
from halfmoon.up.specs.service_specs import other_specs
from halfmoon.up.specs.simulated import SimulatedWorkers, ignored_settings
from halfmoon.up.supervision.announcements import print_ignored
from halfmoon.up.up_options import PreparedModel, UpOptions

SIM = "engine: sim\nconsole: {enabled: false}\n"
PLAN = Path(__file__).parents[3] / "docs" / "guide" / "examples" / "plan.yaml"
LIMITS = ("--max-batch-tokens", "--chunk-tokens", "--max-running", "--block-tokens")


def options_of(text: str) -> UpOptions:
    return up_options(parse_config(SIM + text, "halfmoon.yaml"))


def planned() -> UpOptions:
    return up_options(read_config(PLAN, [Override("engine", "sim", "--engine")]))


def processes(options: UpOptions) -> list[dict[str, str]]:
    """The options of each process of simulated workers."""
    specs = other_specs(options, PreparedModel("/m", "m"), "x:1", ["x:2"], "x:3")
    found = [spec for spec in specs if "services.simulation" in spec.arguments]
    assert [spec.name for spec in found] == [f"simulation-{index}" for index in range(len(found))]
    return [dict(zip(spec.arguments[2::2], spec.arguments[3::2], strict=True)) for spec in found]


def limits(process: dict[str, str]) -> list[str | None]:
    return [process.get(name) for name in LIMITS]


def said(options: UpOptions) -> Sequence[str]:
    terminal = Console(file=io.StringIO(), width=80)
    print_ignored(options, terminal)
    text: str = terminal.file.getvalue()  # type: ignore[attr-defined]
    return text.splitlines()


def test_limits_that_nobody_gave_are_the_profiles() -> None:
    (process,) = processes(options_of(""))
    assert limits(process) == [None] * 4


def test_limits_of_all_workers_reach_simulated_ones() -> None:
    text = "workers: {all: {max_running: 4, max_batch_tokens: 100, chunk_tokens: 10, block_tokens: 32}}"
    (process,) = processes(options_of(text))
    assert limits(process) == ["100", "10", "4", "32"]


def test_workers_with_other_limits_have_other_processes() -> None:
    text = "workers: {all: {max_running: 4}, prefill: {count: 2}, decode: [{count: 3, max_running: 8}, {count: 1}]}"
    four, eight = processes(options_of(text))
    assert [four[name] for name in ("--max-running", "--prefill", "--decode")] == ["4", "2", "1"]
    assert [eight[name] for name in ("--max-running", "--prefill", "--decode")] == ["8", "0", "3"]


def test_a_plan_has_its_batch_limits_with_simulated_workers() -> None:
    (process,) = processes(planned())
    assert (limits(process), process["--both"]) == (["2048", "512", "256", None], "3")


def test_contradicting_limits_are_refused_before_anything_starts() -> None:
    with pytest.raises(InvalidRequest, match="raise max_batch_tokens or lower max_running"):
        options_of("workers: {all: {max_running: 4, max_batch_tokens: 4}}")


def test_one_line_names_what_simulated_workers_ignore() -> None:
    text = "workers: {all: {device: cpu, kv_memory: 1MiB, max_running: 4}, decode: {offload_kv: host}}"
    (line,) = said(options_of(text))
    assert "ignore device, kv_memory, offload_kv; their latency and memory are those of the profile" in line
    assert "plan" not in line


def test_of_a_plan_it_says_where_latency_comes_from() -> None:
    (line,) = said(planned())
    assert f"those of the profile (--sim-profile {SimulatedWorkers().profile}), not the plan's" in line
    assert "ignore" not in line  # one device a worker is no other than the profile's


@pytest.mark.parametrize("text", ["", "workers: {all: {device: auto, block_tokens: 32, cuda_graphs: true}}"])
def test_nothing_is_said_where_nothing_is_lost(text: str) -> None:
    assert not said(options_of(text))


def test_several_devices_are_ignored() -> None:
    assert ignored_settings([{"--tensor-parallel": "2", "--pipeline-parallel": "1"}]) == ["tensor_parallel"]


def test_a_limit_that_is_not_given_yields_to_one_that_is() -> None:
    profile = PROFILES["instant"]
    assert profile.limited() == profile
    few = profile.limited(max_batch_tokens=100)
    assert (few.max_batch_tokens, few.max_running) == (100, 99)
    many = profile.limited(max_running=10_000)
    assert (many.max_batch_tokens, many.max_running) == (10_001, 10_000)
