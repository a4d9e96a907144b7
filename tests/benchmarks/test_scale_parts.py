"""What a large cluster needs, by the costs of a small one."""

from __future__ import annotations

from benchmarks.gateway.scale_parts import Costs, needed

IDLE = [(10, 0.021), (100, 0.03), (1_000, 0.12)]  # 2 % alone, 0.1 ms/s for each worker


def test_gateways_share_requests_and_each_pays_for_all_workers() -> None:
    lines = needed(Costs(IDLE, request_s=0.01, index_s=50e-6), num_workers=1_000, rate=1_000.0)
    assert "0.10 ms of CPU/s" in lines[0]
    assert "22 % of a core" in lines[1]
    assert "2 alone, 10 for reports, 10 for block events" in lines[1]
    assert lines[2].startswith("21 gateways")  # 10 cores of requests over 0.48 of a core
    assert lines[3].startswith("21000 reports/s")


def test_more_gateways_do_not_help_once_each_is_busy_with_what_all_pay() -> None:
    lines = needed(Costs(IDLE, request_s=0.01, index_s=300e-6), num_workers=1_000, rate=1_000.0)
    assert lines[-1].startswith("no number of gateways is enough")
