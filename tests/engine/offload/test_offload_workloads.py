"""Whatever comes, is cut off, is handed over, and however the choice changes meanwhile: the tokens are the same."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from halfmoon.engine.config import OffloadConfig, OffloadSchedule
from halfmoon.engine.engine import Engine
from halfmoon.engine.offload.runner import OffloadRunner
from halfmoon.engine.request import EngineRequest
from halfmoon.errors import NoCapacity
from halfmoon.kv.kv_layout import KVSlice
from halfmoon.policy.offload.recompute import OffloadCosts, Recompute
from tests.engine.engine_runs import MakeEngine, finish, generate, request, tokens

BLOCK_BYTES = 8 * 3 * 2 * 64 * 4
CHEAP, DEAR = Recompute(0.5, 0.1), Recompute(0.5, 500.0)
COSTS = (
    OffloadCosts(1.0, 0.0, CHEAP, Recompute(0.0, 5.0)),  # inputs, of KV from elsewhere as well
    OffloadCosts(1.0, 0.0, CHEAP, Recompute(0.0, 0.1)),  # tokens
    OffloadCosts(1.0, 0.0, DEAR, Recompute(0.0, 1e9)),  # loading, also of what was kept as inputs
)


class Arrival(NamedTuple):
    """A request, and what is done with it."""

    step: int
    length: int
    max_tokens: int
    is_handed_over: bool
    cancelled_after: int | None  # steps


arrivals = st.builds(
    Arrival, st.integers(0, 6), st.integers(2, 44), st.integers(2, 10), st.booleans(), st.none() | st.integers(0, 6)
)
names = count()


def receive(engine: Engine, one: EngineRequest, roomy: Engine) -> list[int]:
    """The first token, if there was room for KV from elsewhere; else the request waits."""
    try:
        held = engine.reserve(one)
    except NoCapacity:
        engine.add(one)
        return []
    roomy.add(replace(one, request_id=f"{one.request_id}-prefill", prefill_only=True))
    [output] = finish(roomy)
    num_layers, num_tokens = engine.layout.num_layers, len(one.prompt_token_ids)
    if held < num_tokens:
        payload = roomy.kv_read(output.request_id, KVSlice(0, num_layers, held, num_tokens - held))
        engine.kv_write(one.request_id, KVSlice(0, num_layers, held, num_tokens - held), payload)
    engine.start(one.request_id, output.token_id)
    roomy.cancel(output.request_id)
    return [output.token_id]


@pytest.mark.parametrize("schedule", ["latency", "throughput"])
def test_the_tokens_are_those_of_an_engine_with_room(make_engine: MakeEngine, schedule: OffloadSchedule) -> None:
    roomy = make_engine("opt")
    offload = OffloadConfig(host_bytes=9 * BLOCK_BYTES, schedule=schedule)
    engine = make_engine("opt", offload=offload, num_blocks=16, max_context_tokens=56)
    assert isinstance(engine._runner, OffloadRunner)
    chooser = engine._runner.chooser

    @settings(max_examples=20, deadline=None)
    @given(st.lists(arrivals, min_size=1, max_size=6), st.lists(st.sampled_from(COSTS), min_size=1, max_size=3))
    def check(coming: list[Arrival], costs: list[OffloadCosts]) -> None:
        requests = {f"r{next(names)}": arrival for arrival in coming}
        made = {name: request(name, one.length, one.max_tokens) for name, one in requests.items()}
        expected = generate(roomy, *made.values())
        found: dict[str, list[int]] = {name: [] for name in requests}
        step = 0
        while step <= 6 or engine.has_work():
            for name, one in requests.items():
                if one.step == step and one.is_handed_over:
                    found[name] += receive(engine, made[name], roomy)
                elif one.step == step:
                    engine.add(made[name])
                if one.cancelled_after is not None and one.step + one.cancelled_after == step:
                    engine.cancel(name)
            chooser.use(costs[step // 3 % len(costs)], learns=False)
            outputs = engine.step().outputs
            for name in requests:
                found[name] += tokens(outputs, name)
            engine.check_integrity()
            step += 1
        for name, one in requests.items():
            if one.cancelled_after is None:
                assert found[name] == expected[name]
            else:
                assert found[name] == expected[name][: len(found[name])]
        assert engine.stats().num_free_blocks == engine.num_blocks

    check()
    engine.close()
