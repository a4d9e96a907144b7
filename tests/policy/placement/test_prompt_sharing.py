"""How many idle prefill workers compute one prompt."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from halfmoon.policy.models.latency import PrefillModel
from halfmoon.policy.placement.place import PlacementRules, place
from halfmoon.policy.values import Placement, PlacementRequest
from halfmoon.policy.view.cluster_view import ClusterView
from halfmoon.policy.view.worker_view import WorkerView
from tests.policy.placement.test_place import STEP, worker
from tests.policy.reported_state import ReportedState

MODEL = PrefillModel(0.005, 1e-4, 1e-8)
TOKENS = 16_000
KNOWN: dict[str, Any] = {
    "prefill_model": MODEL,
    "step_tokens": 2048,
    "layer_passes": 5,
    "num_layers": 32,
    "kv_bytes_per_token": 1e5,
    "kv_dtype": "int8",
    "fetch_s_per_token": 1e-6,
    "context_tokens": 10**6,
    "total_blocks": 10**4,
    "free_blocks": 10**4,
}
PREFILLS = [worker(f"p{number}", "prefill", **KNOWN) for number in range(4)]
DECODE = worker("d0", "decode", step_model=STEP, **KNOWN)


def shared(*workers: WorkerView, max_degree: int = 8, tokens: int = TOKENS, **more: Any) -> Placement:
    view, rules = ClusterView([*workers, DECODE]), PlacementRules(max_prefill_degree=max_degree)
    request = PlacementRequest(tokens, 20, **more)
    return place(view, request, rules, ReportedState(view, rules), 0.0, random.Random(0))


def test_all_idle_workers_share_a_long_prompt_and_its_first_token_comes_sooner() -> None:
    alone = shared(*PREFILLS, max_degree=1)
    assert (alone.sharing, alone.segments, alone.helpers) == (None, None, ())
    placement = shared(*PREFILLS)
    assert placement.sharing == "shared"
    assert placement.segments is not None
    assert placement.segments.degree == 4
    assert {one.worker_id for one in (*placement.helpers, placement.prefill)} == {f"p{number}" for number in range(4)}
    assert placement.ttft_s == placement.segments.seconds < alone.ttft_s / 2.5


def test_the_degree_is_bounded_by_the_setting_and_by_who_is_idle() -> None:
    two = shared(*PREFILLS, max_degree=2)
    assert two.segments is not None
    assert two.segments.degree == 2
    busy = [replace(one, waiting_prefill_tokens=1_000, prefill_free_s=0.1) for one in PREFILLS[2:]]
    placement = shared(*PREFILLS[:2], *busy)
    assert placement.segments is not None
    assert {one.worker_id for one in (*placement.helpers, placement.prefill)} == {"p0", "p1"}


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"waiting_prefill_tokens": 1_000}, "none_idle"),
        ({"layer_passes": 0}, "none_idle"),
        ({"kv_bytes_per_token": 2e5}, "none_idle"),
        ({"kv_dtype": "fp8"}, "none_idle"),  # of as many bytes
        ({"free_blocks": TOKENS // 16}, "none_idle"),
        ({"fetch_s_per_token": 1e-3}, "not_faster"),
        ({"prefill_model": MODEL.scaled(30)}, "not_faster"),
    ],
)
def test_who_cannot_help_does_not(changed: dict[str, Any], reason: str) -> None:
    placement = shared(PREFILLS[0], replace(PREFILLS[1], prefill_free_s=0.1, **changed))
    assert placement.prefill.worker_id == "p0"
    assert (placement.sharing, placement.helpers) == (reason, ())


def test_short_prompts_and_those_of_which_more_is_wanted_stay_on_one() -> None:
    assert shared(*PREFILLS, tokens=300).sharing == "not_faster"
    assert shared(*PREFILLS, tokens=15).sharing == "too_short"
    busy = [replace(one, waiting_prefill_tokens=1_000, prefill_free_s=0.1) for one in PREFILLS[1:]]
    assert shared(PREFILLS[0], *busy, tokens=100).sharing == "too_short"  # whoever is idle
    assert shared(*PREFILLS, may_share=False).sharing == "needs_one"
    assert shared(*PREFILLS, is_failover=True).sharing == "needs_one"
    unknown = replace(PREFILLS[1], prefill_model=PrefillModel())  # it might be the best
    assert shared(PREFILLS[0], unknown).sharing == "unable"
    cannot_wait = [replace(one, layer_passes=0) for one in PREFILLS]
    assert shared(*cannot_wait).sharing == "unable"


def test_workers_of_one_host_that_slow_each_other_down_do_not_share() -> None:
    apart = [replace(one, contention=1.0, host_name=one.worker_id) for one in PREFILLS[:2]]
    together = [replace(one, contention=1.0, host_name="host") for one in PREFILLS[:2]]
    assert shared(*apart).sharing == "shared"
    assert shared(*together).sharing == "not_faster"


def test_only_what_all_have_counts_as_cached() -> None:
    cached = np.array([40, 300, 0], dtype=np.int64)  # of two holders
    of = [replace(one, holder=number) for number, one in enumerate(PREFILLS[:2])]
    placement = shared(*of, cached_blocks=cached)
    assert placement.sharing == "shared"
    assert placement.cached_tokens == 40 * 16
    most = np.array([40, 990, 0], dtype=np.int64)
    assert shared(*of, cached_blocks=most).sharing == "not_faster"


def test_each_worker_has_its_own_part_of_the_work() -> None:
    placement = shared(*PREFILLS)
    assert placement.segments is not None
    shares = placement.shares(TOKENS)
    assert [one.prefill.worker_id for one in shares] == [
        placement.prefill.worker_id,
        *(one.worker_id for one in placement.helpers),
    ]
    own = [TOKENS - one.cached_tokens for one in shares]
    assert sum(own) == TOKENS
    assert max(own) < 1.3 * min(own)
    alone = shared(*PREFILLS, max_degree=1)
    assert alone.shares(TOKENS) == [alone]
