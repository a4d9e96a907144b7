"""When devices that share a prompt's tokens pay, by the roofline."""

from __future__ import annotations

from dataclasses import replace

import pytest

from halfmoon.errors import InvalidRequest
from halfmoon.sim.latency_sources.distserve import DistServeCoefficients
from halfmoon.sim.latency_sources.latency_model import LatencyModel
from halfmoon.sim.latency_sources.model_catalogue import model_shape
from halfmoon.sim.latency_sources.roofline import Roofline
from halfmoon.sim.latency_sources.sequence_parallel import long_prompt_tokens, parallel_model

SOURCE = Roofline(model_shape("llama-3-8b"))


def worker(num_ranks: int, gpu: str = "h100") -> LatencyModel:
    return parallel_model(SOURCE, gpu, 1, 1, num_ranks)


def test_long_prompts_gain_almost_the_number_of_ranks_and_short_ones_nothing() -> None:
    one = worker(1)
    for num_ranks in (2, 4, 8):
        ring = worker(num_ranks)
        assert ring.prefill_s(128) == one.prefill_s(128)
        gain = one.prefill_s(128_000) / ring.prefill_s(128_000)
        assert 0.85 * num_ranks < gain <= num_ranks
        assert ring.kv_tokens == num_ranks * one.kv_tokens
        assert ring.num_devices == num_ranks
        assert ring.cycle(8) == one.cycle(8), "decodes gain nothing"


def test_the_length_from_which_it_pays_is_where_both_take_as_long() -> None:
    for gpu in ("h100", "l40s"):
        one, ring = worker(1, gpu), worker(4, gpu)
        most = long_prompt_tokens(ring)
        assert most is not None
        assert ring.prefill_s(most) == one.prefill_s(most)
        assert ring.prefill_s(most + 1) < one.prefill_s(most + 1)
    assert long_prompt_tokens(one) is None


def test_a_slow_link_leaves_prompts_on_one_rank_until_attention_hides_it() -> None:
    ring = worker(4)
    assert ring.ring is not None
    slow = replace(ring, ring=ring.ring._replace(key_s=1e-3, query_s=1e-3))
    assert long_prompt_tokens(slow) is None
    fast, slower = long_prompt_tokens(ring), long_prompt_tokens(replace(ring, ring=ring.ring._replace(round_s=0.1)))
    assert fast is not None
    assert slower is not None
    assert fast < slower


def test_queries_go_round_for_few_rows_behind_many_keys() -> None:
    ring = worker(4).ring
    assert ring is not None
    few, many = ring.exposed_s(64, 100_000, 0.0), ring.exposed_s(50_000, 100_000, 0.0)
    assert few == pytest.approx(ring.round_s + 64 * ring.query_s)
    assert many == pytest.approx(ring.round_s + 100_000 * ring.key_s)
    assert ring.exposed_s(50_000, 100_000, attention_s=1.0) == ring.round_s, "attention hides keys"


def test_a_faster_worker_has_faster_links() -> None:
    assert worker(4).scaled(2).prefill_s(50_000) == pytest.approx(worker(4).prefill_s(50_000) / 2)


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="SP4 does not go with TP2 x PP1"):
        parallel_model(SOURCE, "h100", 2, 1, 4)
    with pytest.raises(InvalidRequest, match="need to be a roofline's"):
        parallel_model(DistServeCoefficients("opt-13b"), None, 1, 1, 2)
