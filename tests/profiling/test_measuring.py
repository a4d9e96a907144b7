"""Sweeps and side-by-side measurements over probes that need no time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.profiling import measured_slowdowns as side_by_side
from halfmoon.profiling.measured_slowdowns import measured_slowdowns
from halfmoon.profiling.measuring import measured_transfers, measured_work, trimmed_mean
from halfmoon.profiling.sweep import SweepLimits
from tests.profiling.profiling_fakes import FakeProbe

LIMITS = SweepLimits(longest_prompt=128, largest_batch=4, longest_context=64, repeats=2, steps=3)


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=20), st.floats(100.0, 1e6))
def test_a_stall_of_the_machine_does_not_count(seconds: list[float], stall_s: float) -> None:
    mean_s = trimmed_mean(seconds)
    assert min(seconds) - 1e-9 <= mean_s <= max(seconds) + 1e-9
    if len(seconds) > 2:
        assert trimmed_mean([*seconds, stall_s]) <= max(seconds) + 1e-9


async def test_prompts_and_batches_take_turns_and_every_point_is_repeated() -> None:
    busy: set[str] = set()
    prefill, decode = FakeProbe("prefill", busy), FakeProbe("decode", busy)
    heard: list[tuple[str, int, int]] = []
    prompts, steps = await measured_work(prefill, decode, LIMITS, lambda *news: heard.append(news))  # type: ignore[arg-type]
    assert [sample.seconds for sample in prompts] == pytest.approx([0.001 * one.new_tokens for one in prompts])
    assert {sample.seconds for sample in steps} == {0.01}
    whole = [length for length in prefill.prompts if length == 128]
    assert len(whole) >= LIMITS.repeats
    stages = [stage for stage, _, _ in heard]
    assert stages.index("decode batches") < len(stages) - 1 - stages[::-1].index("prompts")
    assert {stage for stage, done, total in heard if done == total} == {"prompts", "decode batches"}
    assert set(prefill.receivers) == {None, decode.target.worker_id}  # warm-up and prefixes stay, points are sent


async def test_a_transport_that_is_declined_is_left_out() -> None:
    probe: Any = FakeProbe("decode", set())  # whatever is offered, it comes by gRPC
    transfers = await measured_transfers(probe, LIMITS, lambda *news: None)
    assert {sample.transport for sample in transfers} == {"grpc"}
    assert [sample.num_bytes for sample in transfers] == [6400, 12800]


@pytest.mark.parametrize(
    ("roles", "pairs"),
    [
        (("prefill", "decode"), {("prefill", "decode"), ("decode", "prefill")}),
        (("decode", "decode"), {("decode", "decode")}),
        (("both", "both"), {(a, b) for a in ("prefill", "decode") for b in ("prefill", "decode")}),
    ],
)
async def test_each_work_is_compared_alone_and_beside_each_other_work(
    roles: tuple[Any, Any], pairs: set[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts side by side need real concurrency: here a prompt makes its worker busy until it is cancelled."""
    busy: set[str] = set()
    one, other = (FakeProbe(role, busy, slowdown=1.75, number=at) for at, role in enumerate(roles))
    monkeypatch.setattr(side_by_side, "_ROUNDS", 3)

    async def prompts(probe: FakeProbe, receiver: FakeProbe | None, begun: Any) -> None:
        busy.add(probe.target.worker_id)
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            busy.discard(probe.target.worker_id)

    monkeypatch.setattr(side_by_side, "_prompt_after_prompt", prompts)
    found = await measured_slowdowns(one, other, lambda *news: None)  # type: ignore[arg-type]
    assert {(sample.work, sample.neighbour) for sample in found} == pairs
    assert [sample.slowdown for sample in found] == pytest.approx([1.75] * len(found))
    assert busy == set()
