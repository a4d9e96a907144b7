"""Prometheus finds what `halfmoon up` opens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from halfmoon.up.hosts import ThisHost
from halfmoon.up.specs.service_specs import other_specs
from halfmoon.up.state.metrics_targets import TARGETS_FILE, MetricsTargets
from halfmoon.up.supervision.child import ServiceSpec
from halfmoon.up.this_host.reserved_ports import ReservedPorts
from halfmoon.up.up_options import PreparedModel, UpOptions


@pytest.fixture
def ports() -> Iterator[ReservedPorts]:
    with ReservedPorts() as reserved:
        yield reserved


def specs_of(targets: MetricsTargets) -> list[ServiceSpec]:
    options = UpOptions(num_decode=2, device="cpu", console=False)
    wanted = other_specs(options, PreparedModel("/m", "m"), "x:1", ["x:2"], "x:3")
    return [targets.opened(spec) for spec in wanted]


@pytest.mark.parametrize("first", [0, 9100])
def test_every_port_that_is_opened_is_listed(tmp_path: Path, ports: ReservedPorts, first: int) -> None:
    targets = MetricsTargets(tmp_path, first, ports, print)
    specs = specs_of(targets)
    targets.write("http://127.0.0.1:8000", ThisHost(None).metrics_address, specs)
    listed = {one["labels"]["service"]: one for one in json.loads((tmp_path / TARGETS_FILE).read_text())}
    assert list(listed) == ["gateway", "kvstore", "planner", "prefill-0", "decode-0", "decode-1"]
    for spec in specs:
        port = spec.arguments[spec.arguments.index("--metrics-port") + 1]
        assert listed[spec.name]["targets"] == [f"127.0.0.1:{port}"]
    given = [spec.metrics_port for spec in specs]
    assert len(set(given)) == len(given)
    assert not first or given == [9100, 9101, 9102, 9103, 9104]
    assert listed["decode-0"]["labels"]["job"] == "halfmoon-workers"
    assert listed["gateway"]["targets"] == ["127.0.0.1:8000"]


def test_a_gateway_with_tls_is_scraped_with_it(tmp_path: Path, ports: ReservedPorts) -> None:
    MetricsTargets(tmp_path, 0, ports, print).write("https://127.0.0.1:8000", ThisHost(None).metrics_address, [])
    (gateway,) = json.loads((tmp_path / TARGETS_FILE).read_text())
    assert (gateway["targets"], gateway["labels"]["__scheme__"]) == (["127.0.0.1:8000"], "https")


def test_none_opens_none(tmp_path: Path, ports: ReservedPorts) -> None:
    targets = MetricsTargets(tmp_path, None, ports, print)
    specs = specs_of(targets)
    assert not any("--metrics-port" in spec.arguments for spec in specs)
    targets.write("http://127.0.0.1:8000", ThisHost(None).metrics_address, specs)
    assert len(json.loads((tmp_path / TARGETS_FILE).read_text())) == 1
