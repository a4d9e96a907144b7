"""The steps before the first request: they measure, and leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable

from halfmoon.engine.engine import Engine
from halfmoon.engine.request import EngineRequest, SamplingParams
from halfmoon.engine.warm_up_steps import warm_up_steps


def test_first_steps_measure_prompts_of_several_lengths(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(max_batch_tokens=64, max_running=2)
    results = warm_up_steps(engine)
    assert [result.num_prefill_tokens for result in results] == [8, 16, 32]
    assert all(result.duration_s > 0 and not result.num_decode_seqs for result in results)
    assert not engine.has_work()
    assert engine.stats().num_free_blocks == engine.stats().num_blocks
    prompt = tuple(7 * token % 97 for token in range(40))  # one of those prompts, of another tenant
    engine.add(EngineRequest("a", prompt, SamplingParams(max_tokens=1, temperature=0.0), prefill_only=True))
    assert engine.step().num_cached_tokens == {"a": 0}
